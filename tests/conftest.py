"""Settings every test shares: the CPU backend, fixed before jax is imported."""

import os

# With the CUDA plugin of the `aot` extra installed and no GPU, jax would otherwise try, and fail, to start it.
os.environ["JAX_PLATFORMS"] = "cpu"
