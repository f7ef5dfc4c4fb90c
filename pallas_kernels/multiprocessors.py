"""The multiprocessors of the persistent kernels: those of the GPU, less those reserved for concurrent transfers.

A persistent kernel starts one thread block per multiprocessor, each of which fills it, and loops over its work. NCCL's
transfers are kernels too. Without reserved multiprocessors, the last blocks of a kernel beside a transfer wait until
the first ones are done, which doubles its time.

The number is set while a program is traced. It is part of the keys of jax's caches.
"""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax

from pallas_kernels import gpus

_traced = jax.make_user_context(None)


@dataclasses.dataclass(frozen=True)
class Multiprocessors:
    """The multiprocessors of a GPU, `reserved` of which are for transfers.

    Raises ValueError if none is left for kernels.
    """

    count: int
    reserved: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.reserved < self.count:
            raise ValueError(
                f"{self.reserved} multiprocessors shall be left to transfers: at least 0, and fewer than the GPU's "
                f"{self.count}"
            )

    @property
    def taken(self) -> int:
        """The number that kernels use."""
        return self.count - self.reserved

    @property
    def share(self) -> float:
        """The fraction of the GPU that kernels use."""
        return self.taken / self.count


def traced() -> Multiprocessors:
    """Returns the multiprocessors that kernels are traced for: those of `taking`, else all of the default device."""
    return _traced.value or Multiprocessors(gpus.multiprocessors(gpus.default_device()))


@contextlib.contextmanager
def taking(multiprocessors: Multiprocessors) -> Iterator[None]:
    """Traces kernels in the block for these multiprocessors."""
    with _traced(multiprocessors):
        yield
