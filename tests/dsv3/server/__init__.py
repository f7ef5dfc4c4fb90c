"""A package, so that servers shared by its tests end with the last of them (`conftest.py`)."""
