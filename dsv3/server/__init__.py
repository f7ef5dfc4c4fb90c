"""The server: `http` and its processes, `protocol` (schemas), `serving` (requests to responses), `engine`, `batches`.

The API server tokenizes (`serving.prompts`); a worker process renders chat templates (`templates`).
"""
