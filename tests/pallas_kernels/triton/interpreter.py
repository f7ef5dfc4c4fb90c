"""Runs Triton kernels in Triton's interpreter, in a separate process: triton reads the setting on import.

The interpreter needs tensors. `Array` wraps a numpy array as one, so torch is not needed. It multiplies the bits of
bfloat16 as integers, so numpy computes the products here. Run as a program, this file is the process: it reads launches
from standard input and writes results to standard output.
"""

import importlib
import os
import pickle
import subprocess
import sys
import threading
import traceback

import ml_dtypes
import numpy as np

_WAIT = 10  # seconds, for the process to exit


class Array:
    """A numpy array with the part of a tensor's interface that the interpreter uses."""

    def __init__(self, values: np.ndarray):
        self.values = values
        self.dtype = values.dtype.name

    def data_ptr(self) -> int:
        return self.values.ctypes.data

    def untyped_storage(self) -> "Array":
        return self

    def cpu(self) -> "Array":
        return self

    def new_empty(self, *_, **__) -> "Array":
        return Array(self.values)

    def set_(self, *_) -> None:
        """Does nothing: the array is its own storage."""

    def copy_(self, *_) -> None:
        """Does nothing: the kernel has written to the array."""

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.values.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.values.itemsize for step in self.values.strides)


class Interpreter:
    """A process that interprets kernels, one launch at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.pallas_kernels.triton.interpreter"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self._lock = threading.Lock()  # a program on a CPU launches kernels from several threads

    def run(self, kernel: str, arrays: list[np.ndarray], grid: tuple[int, ...], arguments: dict) -> list[np.ndarray]:
        """Returns the arrays after the kernel. Raises RuntimeError with its traceback if it fails."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._lock:
            pickle.dump((kernel, arrays, grid, arguments), self._process.stdin)
            self._process.stdin.flush()
            results = pickle.load(self._process.stdout)
        if isinstance(results, str):
            raise RuntimeError(results)
        return results

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(timeout=_WAIT)


def _correct_arithmetic() -> None:
    """Replaces the interpreter's products, and its float conversions, which truncate where a GPU rounds."""
    import triton.language as tl
    from triton.runtime import interpreter

    types = {
        tl.bfloat16: ml_dtypes.bfloat16,
        tl.float16: np.float16,
        tl.float32: np.float32,
        tl.float8e4nv: ml_dtypes.float8_e4m3fn,
    }

    def product(self, a, b, d, *_):
        a, b = (x.data.view(types[x.dtype.scalar]).astype(np.float32) for x in (a, b))
        return interpreter.TensorHandle(a @ b + d.data, d.dtype.scalar)

    def convert(values, given, wanted, _):
        return values.view(types[given]).astype(types[wanted])

    interpreter.InterpreterBuilder.create_dot = product
    interpreter._convert_float = convert


def _serve() -> None:
    _correct_arithmetic()
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # all other output goes to standard error
    while True:
        try:
            kernel, arrays, grid, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            _interpret(kernel, arrays, grid, arguments)
            answer = arrays
        except Exception:
            answer = traceback.format_exc()
        pickle.dump(answer, results)
        results.flush()


def _interpret(kernel: str, arrays: list[np.ndarray], grid: tuple[int, ...], arguments: dict) -> None:
    """Runs the kernel on the arrays, which are its parameters with the names of pointers."""
    module, name = kernel.split(".")
    function = getattr(importlib.import_module(f"pallas_kernels.triton.kernels.{module}"), name)  # imports no jax
    pointers = [name for name in function.arg_names if name.endswith("_ptr")]
    with np.errstate(all="ignore"):
        function[grid](**dict(zip(pointers, map(Array, arrays), strict=True)), **arguments)


if __name__ == "__main__":
    _serve()
