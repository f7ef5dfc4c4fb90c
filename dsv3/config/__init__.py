"""Configuration: models of the family and their Hugging Face files, options, the limits of an engine. No jax."""
