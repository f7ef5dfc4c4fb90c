"""What spares tests of this directory compilations."""

import pytest

from tests.dsv3.model.deepseek_v4 import PARTS


@pytest.fixture
def parts_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles parts of an operation-by-operation run, once for all tests."""
    for part in PARTS:
        monkeypatch.setattr(*part)
