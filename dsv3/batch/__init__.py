"""Batch inference over a file in OpenAI's batch format: what `python -m launch.batch` runs.

`lines` reads and writes the format, `journal` keeps the output file exact across kills, `run` moves lines through a
`Completer`, and `completer` is the one that answers with this package's engine. docs/batch.md is for users.
"""
