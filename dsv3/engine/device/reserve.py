"""How many multiprocessors an instance leaves to transfers: one number for its kernels, NCCL and `launch.plan`.

In an overlapped step (`dsv3.model.schedules`) transfers run beside kernels. NCCL's are kernels themselves, one thread
block per channel, and each of ours fills a multiprocessor. So ours leave as many multiprocessors as NCCL may have
channels. All programs of an instance have the same number: they share NCCL's communicators, which keep what the first
program that runs says.

Prefill gets what DeepSeek's does: 24 of 132 (its profile: 108 compute). A decode step sends 20 to 30 times less per
layer. 8 channels are taken to fill a NIC of 50 GB/s several times over. Nothing of this has been measured with NCCL.
"""

from collections.abc import Callable, Iterable

from dsv3.engine.config import ForwardProgram

PREFILL = 24
"""Multiprocessors that an instance leaves to transfers if it has overlapped prefill steps."""

DECODE = 8
"""The same of an instance whose decode steps alone overlap."""


def reserved(
    programs: Iterable[ForwardProgram], overlaps: Callable[[ForwardProgram], bool] | None, wanted: int | None
) -> int:
    """Returns the multiprocessors that an instance with these programs leaves to transfers: 0 if nothing overlaps.

    `overlaps` tells which programs are overlapped; None: none is. `wanted` is what a user has asked for.
    """
    kinds = {program.kind for program in programs if overlaps is not None and overlaps(program)}
    if not kinds:
        return 0
    if wanted is not None:
        return wanted
    return PREFILL if "prefill" in kinds else DECODE
