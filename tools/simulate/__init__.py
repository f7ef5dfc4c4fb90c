"""A fleet in virtual time: the engine's scheduler and the router's choice, a table for devices (docs/simulate.md)."""
