"""Puts a served model together over a mesh: step functions, their communication, expert maps, weights."""
