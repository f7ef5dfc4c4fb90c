"""Routed experts on many devices: how token rows reach them, how many bytes that takes, where their replicas stand."""
