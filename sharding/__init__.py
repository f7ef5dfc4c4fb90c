"""The device mesh, expert parallelism, and collectives."""
