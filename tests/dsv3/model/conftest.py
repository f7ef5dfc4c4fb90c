"""What spares tests of this directory compilations."""

import pytest

from pallas_kernels.backend import has_jax_triton
from tests.dsv3.model.deepseek_v4 import PARTS

_PTX = ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry left_out() { ret; }\n"


@pytest.fixture
def parts_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles parts of an operation-by-operation run, once for all tests."""
    for part in PARTS:
        monkeypatch.setattr(*part)


@pytest.fixture
def triton_bodies_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Omits the machine code of Triton kernels, in programs that are analysed and never run.

    Such kernels have keys of their own in jax-triton's cache, so that no other test gets them.
    """
    if not has_jax_triton():
        return
    from jax_triton import triton_lib

    nothing = triton_lib.CompilationResult(_PTX, "left_out", 0, "", "")
    key = triton_lib.TritonFunction._make_cache_key

    monkeypatch.setattr(triton_lib, "compile_ttir_to_ptx_inplace", lambda *_: nothing)
    monkeypatch.setattr(triton_lib.TritonFunction, "_make_cache_key", lambda *args: (key(*args), "left out"))
