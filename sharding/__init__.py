"""Which device holds what, and what crosses the wire."""
