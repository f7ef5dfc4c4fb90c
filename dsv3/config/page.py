"""The page of the latent cache, for all who count in pages; imports no jax."""

PAGE_SIZE = 64
"""Tokens in a page of the latent cache (FlashMLA's page)."""


def pages_for(tokens: int) -> int:
    """Returns how many pages hold `tokens` tokens."""
    return -(-tokens // PAGE_SIZE)
