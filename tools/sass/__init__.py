"""Reads the main loops of kernels from their machine code (SASS), and says in a model what binds them."""
