"""The server's files and batches: the store in a directory, and the runner. Imports no HTTP."""
