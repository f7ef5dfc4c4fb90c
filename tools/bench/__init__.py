"""Loads OpenAI-compatible servers and measures them: what `python -m launch.bench serve` runs.

`workload` decides what is sent and when. `client` and `stream` send one request and read its stream. `loops` sends all
of them, `interrupt` ends that early. `metrics` turns the records into figures, and `report` shows them.
docs/benchmarking.md defines every figure.
"""
