"""Live page: figures, door, server, browser and terminal."""
