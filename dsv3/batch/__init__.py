"""Batch inference over a file in OpenAI's batch format: what `python -m launch.batch` runs.

`journal` reads and writes the format and keeps the output file exact across kills, `run` moves lines through a
`Completer`, `servers` is one that asks running servers, `tables` makes lines of tables. docs/batch.md is for users.
"""
