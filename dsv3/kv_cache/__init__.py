"""The paged latent cache: memory layout, page pool, prefix cache, KV events; offload tiers and transfer below."""
