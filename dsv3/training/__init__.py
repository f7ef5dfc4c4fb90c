"""Training of a small DeepSeek-V3-architecture model on the text of Python's standard library."""
