"""Kernels without their bodies, in programs that are read and never run.

A plan reads the program around our Mosaic kernels. Python takes 6 of 10 processor seconds to trace and lower their
bodies in a decode step of DeepSeek-V3. The choice is part of the keys of jax's caches, so no such kernel reaches a
program that runs.
"""

import contextlib
from collections.abc import Callable, Iterator

import jax

_are_left_out = jax.make_user_context(False)


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """Makes kernels that are traced in the block do nothing, if they give their results as outputs."""
    with _are_left_out(True):
        yield


def traced(body: Callable[..., None]) -> Callable[..., None]:
    """Returns the body that a kernel is traced with: `body`, or one of its name that does nothing, in `left_out`.

    Not for kernels that write into a `jax.Ref`: jax sees from the body that they do.
    """
    if not _are_left_out.value:
        return body

    def nothing(*refs, **scratch) -> None:
        pass

    nothing.__name__ = getattr(body, "__name__", nothing.__name__)
    return nothing
