"""Rates of GPUs: peaks of data sheets, and the fractions of them that published kernels reach. Imports no jax.

Used by the planner, the scheduler's cost of a request, and the selection of attention's form and a step's schedule.
"""

import re
from typing import NamedTuple


class Peaks(NamedTuple):
    """A GPU's peak rates per second: bytes of its memory, operations of dense products, bytes to others of its node."""

    hbm: float
    bf16: float
    fp8: float
    """Equal to float16 if tensor cores do not multiply e4m3, which kernels then widen."""
    link: float
    """To all others together, in one direction; four fifths of the data sheet's rate."""


PEAKS = {
    "A100": Peaks(2.04e12, 312e12, 312e12, 240e9),
    "L40S": Peaks(0.864e12, 362e12, 733e12, 25.6e9),
    "H20": Peaks(4.0e12, 148e12, 296e12, 360e9),
    "H100": Peaks(3.35e12, 989e12, 1979e12, 360e9),
    "H800": Peaks(3.35e12, 989e12, 1979e12, 160e9),
    "H200": Peaks(4.8e12, 989e12, 1979e12, 360e9),
    "B200": Peaks(8.0e12, 2250e12, 4500e12, 720e9),
}
"""NVIDIA's data sheets, SXM where there are several, without sparsity.

DeepEP's README states 160 GB/s as the limit of an H800's NVLink, whose data sheet says 200; others are scaled by it.
"""
NIC = 50e9
"""Bytes per second of a network card of 400 Gbit/s, in one direction; a GPU is assumed to have one."""

# Fractions of a peak, from published measurements on an H800. Those of prefill were reached on 108 of its 132
# multiprocessors (`PREFILL_MULTIPROCESSORS`), the others on all.
PREFILL_MULTIPROCESSORS = 108 / 132
DENSE_BANDWIDTH = 2.4 / 3.35
DENSE_FLOPS = 900 / 1979
GROUPED_BANDWIDTH = 2.6 / 3.35
GROUPED_FLOPS = 1000 / 1979
PREFILL_FLOPS = 993 / 1979
DECODE_CORE_FLOPS = 580 / 989
PREFILL_CORE_FLOPS = 535 / 989
LISTED_CORE_FLOPS = DECODE_CORE_FLOPS * (4096 / 5588) / (4352 / 5456)
"""DeepSeek-V4's attention to listed rows of bfloat16, from its machine code in a model, no measurement.

The rate of decode attention, times the ratio of how busy the loops of both kernels keep the tensor core.

Source: docs/performance/machine_code.md, the rows of listed rows and of decode with 128 heads (link "700, 40").
"""
LISTED_FP8_CORE_FLOPS = DECODE_CORE_FLOPS * (4096 / 6945) / (4352 / 5456)
"""The same of FP8 rows."""
PREFILL_OVERHEAD = 1.25
"""Time of prefill relative to its products: norms, quantization, rotation and routing."""
LINK = 153 / 160
DISPATCH_NIC, COMBINE_NIC = 45 / 50, 40.5 / 50
"""What DeepEP's kernels reach on an H800 of NVLink, and of the network card on dispatch and on combine."""
MASKING = 3378 / 2810
"""Ratio of cycles of the prefill kernel's loop with a bitmask and without: a model of machine code, no measurement.

Source: docs/performance/machine_code.md, the rows of prefill with chosen keys and of prefill.
"""
FP4_PRODUCTS = (768 / 192) / (714 / 128)
"""Ratio of cycles per column and row of products with FP8 experts and with FP4 ones, whose tiles have 128 columns.

Source: docs/performance/machine_code.md, the contiguous rows of 4,096 rows (link "700, 40") and of FP4 in tiles of 128.
"""
SELECTION = 1.83e9 / 1.35
"""Index scores per second from which one multiprocessor selects the top-k, estimated from the kernel's instructions.

The data sheet's peaks hold at 1.83 GHz (989e12 = 132 x 4,096 x 1.83e9). A score takes 1.35 cycles: 16 warps on 4
schedulers, each with 4 x 170 and 695 instructions for 4,096.
"""
LAUNCH_S = 3e-6
"""Seconds between two kernels."""


def peaks_of(device_kind: str) -> Peaks:
    """Returns the peaks of a GPU by its name in jax, such as "NVIDIA H100 80GB HBM3"; an H200's for an unknown one."""
    words = re.split(r"[\s-]+", device_kind)
    return next((peaks for name, peaks in PEAKS.items() if name in words), PEAKS["H200"])
