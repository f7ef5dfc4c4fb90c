"""Turns the JSON of a request into the JSON of its response, whole or as events; imports nothing of HTTP or ASGI.

The HTTP routes and the batch tool call the same functions. `handlers.KINDS` lists the handlers by path.
"""
