"""Companions of the runtime: they import it, and it never imports them."""
