"""KV transfer between instances: one serves pages of its host pool, another fetches those that it lacks."""
