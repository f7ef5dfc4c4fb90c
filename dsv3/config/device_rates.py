"""What GPUs do per second: peaks of data sheets, and the shares of them that published kernels reach. Imports no jax.

The planner, the scheduler's cost of a request, and the choice between the forms of attention read these and no others.
"""

import re
from typing import NamedTuple


class Peaks(NamedTuple):
    """A GPU's peak rates per second: bytes of its memory, and operations of dense products."""

    hbm: float
    bf16: float
    fp8: float
    """That of float16 where tensor cores do not multiply e4m3: kernels widen it."""


PEAKS = {
    "A100": Peaks(2.04e12, 312e12, 312e12),
    "L40S": Peaks(0.864e12, 362e12, 733e12),
    "H20": Peaks(4.0e12, 148e12, 296e12),
    "H100": Peaks(3.35e12, 989e12, 1979e12),
    "H800": Peaks(3.35e12, 989e12, 1979e12),
    "H200": Peaks(4.8e12, 989e12, 1979e12),
    "B200": Peaks(8.0e12, 2250e12, 4500e12),
}
"""NVIDIA's data sheets, SXM where there are several, without sparsity."""

# Shares of a peak, from published measurements on an H800. Those of prefill were reached on 108 of its 132
# multiprocessors (`PREFILL_TAKEN`), the others on all.
PREFILL_TAKEN = 108 / 132
DENSE_BANDWIDTH = 2.4 / 3.35
DENSE_FLOPS = 900 / 1979
GROUPED_BANDWIDTH = 2.6 / 3.35
GROUPED_FLOPS = 1000 / 1979
PREFILL_FLOPS = 993 / 1979
DECODE_CORE_FLOPS = 580 / 989
PREFILL_CORE_FLOPS = 535 / 989
PREFILL_OVERHEAD = 1.25
"""What products of prefill take with norms, quantisation, rotation and routing."""
MASKING = 2938 / 2828
"""Cycles of a pass of the prefill kernel with bits and without (docs/performance/machine_code.md).

With bits the model does not wait for loads to registers.
"""
LAUNCH_S = 3e-6
"""Seconds between two kernels."""


def peaks_of(device_kind: str) -> Peaks:
    """Returns the peaks of a GPU by jax's name of it, such as "NVIDIA H100 80GB HBM3"; an H200's for an unknown one."""
    words = re.split(r"[\s-]+", device_kind)
    return next((peaks for name, peaks in PEAKS.items() if name in words), PEAKS["H200"])
