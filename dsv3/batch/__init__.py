"""Batch inference over a file in OpenAI's batch format, or a table; `python -m launch.batch` runs it.

`journal` parses the format and keeps the output file consistent across kills, `run` sends lines to a `Completer`,
`servers` has one for running servers, `tables` makes lines of tables. docs/batch.md is for users.
"""
