"""The kernels themselves, in Triton's language. Nothing here imports jax: Triton's interpreter runs them in tests."""
