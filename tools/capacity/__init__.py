"""A fleet on paper: how many instances a day of traffic needs, and what they cost (docs/fleet.md). Imports no jax."""
