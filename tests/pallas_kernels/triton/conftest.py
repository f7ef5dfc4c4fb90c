"""Sends the Triton kernels of public operations to the interpreter."""

import jax
import numpy as np
import pytest

from pallas_kernels import gpus
from pallas_kernels.triton import call
from tests.pallas_kernels.triton.interpreter import Interpreter


@pytest.fixture(scope="session")
def interpreter():
    """One for all files: a process takes a second to import Triton."""
    process = Interpreter()
    yield process
    process.close()


@pytest.fixture
def interpreted(interpreter, monkeypatch):
    """Traces kernels for an Ampere GPU with little shared memory, and runs them here; unwritten values are NaN."""

    def start(kernel, arrays, outputs, *, grid, backend=None, warps=0, stages=0, **arguments):
        def launch(*values):
            unwritten = [_unwritten(out) for out in outputs]
            return tuple(interpreter.run(kernel, [*map(np.array, values), *unwritten], grid, arguments)[len(values) :])

        return jax.pure_callback(launch, tuple(outputs), *arrays)

    def update(kernel, targets, arrays, *, grid, backend=None, warps=0, stages=0, **arguments):
        def launch(*values):
            results = interpreter.run(kernel, [np.array(value) for value in values], grid, arguments)
            return tuple(results[: len(targets)])

        shapes = tuple(jax.ShapeDtypeStruct(target.shape, target.dtype) for target in targets)
        return jax.pure_callback(launch, shapes, *targets, *arrays)

    monkeypatch.setattr(call, "start", start)
    monkeypatch.setattr(call, "update", update)
    with gpus.compiling_for(gpus.by_number(86)) as kind:
        yield kind


def _unwritten(out) -> np.ndarray:
    """Returns an array of bytes 255, NaN in every float type."""
    return np.frombuffer(bytearray(b"\xff" * (out.size * out.dtype.itemsize)), out.dtype).reshape(out.shape)
