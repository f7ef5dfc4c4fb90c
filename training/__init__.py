"""Trains a small model of DeepSeek-V3's architecture on the text of Python's standard library."""
