"""Measures XLA's ways to send rows to experts in one node, each in a process of its own.

    python -m tools.doctor.exchange_paths --list         the ways
    python -m tools.doctor.exchange_paths NAME           one of them

A way is a set of options of the compiler, for one program (`WAYS`); `nccl` is what serving takes. Rows have the sizes
of `tools.doctor.collectives`, and their sums must be exact. Collectives stay outside of command buffers: with them
inside, a training run of another project hung without an error after 838 steps (marin-community/marin#8277).
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from tools.doctor.collectives import ALL_GATHER, ALL_TO_ALL, RAGGED, REDUCE_SCATTER, Wires
from tools.doctor.rows import CaseResult, parse_name, run_cases

_KERNELS = "xla_gpu_experimental_use_collective_kernels"
_SYMMETRIC = "xla_gpu_experimental_enable_nccl_symmetric_buffers"
_DEVICE_KERNEL = "xla_gpu_experimental_ragged_all_to_all_use_device_kernel"
_ABSENT = "Unsupported collective"  # of a compiler that knows the option's value, but has no such kernel


@dataclasses.dataclass(frozen=True)
class Way:
    """What a program sends by, and the compiler's options for it."""

    kinds: tuple[str, ...]
    options: Mapping[str, Any]


WAYS = {
    "nccl": Way((ALL_TO_ALL, ALL_GATHER, REDUCE_SCATTER), {}),
    # One kernel of each device reads its peers' rows. jax 0.12.0.1 has no such all-to-all, and takes the others only
    # where a collective is synchronous.
    "one_shot": Way((ALL_TO_ALL,), {_KERNELS: "COLLECTIVE_KERNEL_ALL_TO_ALL"}),
    "one_shot_gather": Way((ALL_GATHER,), {_KERNELS: "COLLECTIVE_KERNEL_ALL_GATHER"}),
    "one_shot_scatter": Way((REDUCE_SCATTER,), {_KERNELS: "COLLECTIVE_KERNEL_REDUCE_SCATTER"}),
    # Buffers that NCCL may write in all devices; XLA copies rows into them and out of them.
    "symmetric": Way((ALL_TO_ALL, ALL_GATHER, REDUCE_SCATTER), {_SYMMETRIC: True}),
    "ragged": Way((RAGGED,), {}),
    # NCCL 2.29 or newer. Without symmetric buffers the device kernel is not taken.
    "ragged_device": Way((RAGGED,), {_DEVICE_KERNEL: True, _SYMMETRIC: True}),
}


def cases(name: str) -> dict[str, Callable[[], CaseResult | str]]:
    """Returns what `run_cases` takes."""
    way, wires = WAYS[name], Wires(False, WAYS[name].options)
    return {
        case: functools.partial(_measured, wires, case, kind, size)
        for kind in way.kinds
        for size_name, size in wires.sizes.items()
        for case in [f"{kind}, {size_name}"]
    }


def main(argv: list[str] | None = None) -> int:
    """Lists the ways, or checks one; returns the exit status of a check."""
    args = parse_name(argv, "exchange_paths", WAYS)
    import jax

    devices = jax.devices()
    if devices[0].platform == "cpu" or len(devices) == 1:
        print(f"these are ways between GPUs, but there is {len(devices)} x {devices[0].platform}", file=sys.stderr)
        return 2
    if args.list:
        print(*WAYS, sep="\n")
        return 0
    return run_cases(cases(args.name))


def _measured(wires: Wires, case: str, kind: str, size: int) -> CaseResult | str:
    """Returns the row of a case, or that this version of XLA has nothing to measure."""
    from sharding.mesh import DEVICES

    try:
        return wires.row(case, [(kind, DEVICES)], size)
    except Exception as error:  # of several types
        if _ABSENT not in str(error):
            raise
        return "this version of XLA has no such kernel"


if __name__ == "__main__":
    sys.exit(main())
