"""The server: `http` and its processes, `protocol` (schemas), `serving` (requests to responses), `engine`, `batches`.

Tokenization runs in the API server (`serving.prompts`), chat templates in a worker process (`templates`).
"""
