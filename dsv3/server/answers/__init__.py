"""Turns the JSON of a request into the JSON of its answer, whole or as events; knows nothing of HTTP or ASGI.

The HTTP routes and the batch tool call the same functions. `kinds.KINDS` is the way in.
"""
