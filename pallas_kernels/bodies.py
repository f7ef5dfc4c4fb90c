"""Kernels without bodies, in programs that are analysed and never run.

A plan analyses the program around our kernels, Mosaic's and Triton's. Tracing and lowering the bodies of the first
takes 6 of 10 processor seconds in a decode step of DeepSeek-V3. The setting is part of the keys of jax's caches, so
such a kernel never runs.
"""

import contextlib
from collections.abc import Callable, Iterator

import jax

_are_left_out = jax.make_user_context(False)


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """Omits the bodies of kernels that are traced in the block, if they return their results as outputs."""
    with _are_left_out(True):
        yield


def are_left_out() -> bool:
    """Returns whether a kernel that is traced now has no body."""
    return _are_left_out.value


def traced(body: Callable[..., None]) -> Callable[..., None]:
    """Returns the body to trace a Mosaic kernel with: `body`, or an empty one of its name inside `left_out`.

    Not for kernels that write into a `jax.Ref`: jax infers that effect from the body.
    """
    if not are_left_out():
        return body

    def nothing(*refs, **scratch) -> None:
        pass

    nothing.__name__ = getattr(body, "__name__", nothing.__name__)
    return nothing
