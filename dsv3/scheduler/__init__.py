"""Host state of requests: who waits, who runs in which slot, and in which pages; imports no jax."""
