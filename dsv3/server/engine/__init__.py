"""The engine's process, and the fronts' side of it: how requests reach the engine, and results a front."""
