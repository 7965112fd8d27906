"""Live page: figures, door, server and browser."""
