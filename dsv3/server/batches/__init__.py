"""Files and batches that a server keeps for its clients in a directory, and what answers them; imports no HTTP."""
