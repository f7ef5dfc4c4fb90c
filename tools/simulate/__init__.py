"""A fleet in virtual time: the engine's scheduler and the router's choice, with a table for devices (docs/fleet.md)."""
