"""Settings every test shares, fixed before jax is imported."""

import os

# With the CUDA plugin of the `aot` extra installed and no GPU, jax would otherwise try, and fail, to start it.
os.environ["JAX_PLATFORMS"] = "cpu"
# Meshes of up to eight devices, on one CPU.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
