"""Request handlers: the JSON of a request in, the JSON of its response out, whole or as events. Imports no HTTP.

The HTTP routes and the batch runner call the same handlers; `handlers.KINDS` lists them by path.
"""
