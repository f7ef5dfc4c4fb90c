"""A load generator for OpenAI-compatible servers: what `python -m launch.bench serve` runs.

`workload` decides what is sent and when, `transport` and `stream` send one request and read its stream, `load` runs
the loop, `metrics` turns the records into figures, `report` shows them. docs/benchmarking.md defines every figure.
"""
