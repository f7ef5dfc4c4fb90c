"""The engine process, its supervisor, and the API servers' client of it."""
