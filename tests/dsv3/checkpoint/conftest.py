"""Fixtures of the checkpoint tests."""

import os

import pytest


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    """Skips fsync (5 ms per file): a test cannot cut the power, and tests check only the order of syncs."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
