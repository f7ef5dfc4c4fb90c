"""The server's files and batches: a store in a directory, and what runs the batches. Imports no HTTP."""
