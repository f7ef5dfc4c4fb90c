"""The paged latent cache: memory layout, page pool, prefix index."""
