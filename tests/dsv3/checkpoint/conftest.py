"""What the tests of checkpoints share."""

import os

import pytest


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    """A test cannot cut the power, so waiting for the disk (5 ms a file) would prove nothing; the order is tested."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
