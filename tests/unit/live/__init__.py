"""Live page: figures, authenticator, server and browser."""
