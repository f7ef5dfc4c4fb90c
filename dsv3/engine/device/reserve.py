"""How many multiprocessors an instance leaves to transfers: one number for its kernels, NCCL and `launch.plan`.

In an overlapped step (`dsv3.model.schedules`) transfers run beside kernels. NCCL's are kernels themselves, one thread
block per channel, and each of ours fills a multiprocessor. So ours leave as many multiprocessors as NCCL may have
channels, and communicators whose transfers are under way at once divide these. All programs of an instance have the
same numbers: they share NCCL's communicators, which keep what the first program that runs says.

Prefill gets what DeepSeek's does: 24 of 132 (its profile: 108 compute). Decode over 144 GPUs sends 70 MB per layer in
an estimated 1.35 ms, 52 GB/s. A channel is taken to carry 15 GB/s, so 8 are twice that. Nothing of it has been
measured.
"""

import dataclasses
from collections.abc import Callable

from dsv3.config.engine import EngineConfig, ForwardProgram
from pallas_kernels.multiprocessors import Multiprocessors

PREFILL = 24
"""Multiprocessors that an instance leaves to transfers if it has overlapped prefill steps."""

DECODE = 8
"""The same of an instance whose decode steps alone overlap."""


@dataclasses.dataclass(frozen=True)
class Reserve:
    """Which programs of an instance leave multiprocessors to transfers, and the multiprocessors of these programs.

    `overlapped` has kind and size of each; transfers of at most `communicators` are under way at once in one.
    """

    beside_transfers: Multiprocessors
    overlapped: frozenset[tuple[str, int]]
    communicators: int

    @property
    def channels(self) -> int:
        """NCCL's channels of each communicator; 0, which leaves them to NCCL, if nothing is left to transfers."""
        reserved = self.beside_transfers.reserved
        return max(1, reserved // self.communicators) if reserved else 0

    def of(self, kind: str, size: int) -> Multiprocessors:
        """Returns the multiprocessors that the kernels of a program take, and leave to transfers."""
        own = self.beside_transfers
        return own if (kind, size) in self.overlapped else dataclasses.replace(own, reserved=0)


def reserve(cfg: EngineConfig, overlaps: Callable[[ForwardProgram], int] | None, count: int) -> Reserve:
    """Returns the reserve of an instance on devices of `count` multiprocessors.

    `overlaps` is that of `dsv3.engine.functions.StepFunctions`. Raises ValueError where `cfg` leaves kernels no
    multiprocessor.
    """
    found = [(p, 0 if overlaps is None else overlaps(p)) for p in cfg.forward_programs]
    overlapped = frozenset((p.kind, p.size) for p, communicators in found if communicators)
    wanted = cfg.reserved_multiprocessors
    if wanted is None:
        wanted = PREFILL if any(kind == "prefill" for kind, _ in overlapped) else DECODE
    most = max((communicators for _, communicators in found), default=0)
    return Reserve(Multiprocessors(count, wanted if overlapped else 0), overlapped, most)
