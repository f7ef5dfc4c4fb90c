"""Collectives in two halves, and packing of rows into words."""
