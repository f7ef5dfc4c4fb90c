"""How many multiprocessors the persistent kernels take: those of the GPU, less what transfers need beside them.

A persistent kernel starts as many thread blocks as it takes multiprocessors, each of which fills one, and walks over
its work. NCCL's transfers are kernels too. Where one is under way that no kernel has left room for, the last blocks of
a kernel wait until the first ones are done, and it takes twice its time.

The number belongs to a program, and is set while that is traced. It is part of the keys of jax's caches.
"""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax

from pallas_kernels import gpus

_traced = jax.make_user_context(None)


@dataclasses.dataclass(frozen=True)
class Multiprocessors:
    """The multiprocessors of a GPU, `reserved` of which kernels leave to transfers.

    Raises ValueError where no multiprocessor is left.
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
        """What kernels take."""
        return self.count - self.reserved

    @property
    def share(self) -> float:
        """The share of the GPU that kernels take."""
        return self.taken / self.count


def traced() -> Multiprocessors:
    """Returns the multiprocessors that kernels are traced for: as `taking` says, else all of the default device."""
    return _traced.value or Multiprocessors(gpus.multiprocessors(gpus.default_device()))


@contextlib.contextmanager
def taking(multiprocessors: Multiprocessors) -> Iterator[None]:
    """Makes kernels that are traced in the block take these."""
    with _traced(multiprocessors):
        yield
