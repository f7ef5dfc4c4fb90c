"""Host state of requests: the waiting queue, batch slots, pages, and results; imports no jax."""
