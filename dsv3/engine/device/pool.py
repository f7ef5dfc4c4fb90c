"""jax's memory pool on a GPU: its fraction, set before jax starts, the card's total, and memory outside of the pool."""

import os
from collections.abc import Sequence

import jax
from jax._src import xla_bridge  # jax has no public way to ask whether its backends have started

from dsv3.engine.memory import OUTSIDE, DeviceMemory
from dsv3.processes.child import run_limited

SLACK = 0.02
"""Fraction of a GPU's memory that the pool has beyond the engine's plan, for fragmentation: 1.7 GB of an H100."""
_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_DEFAULT = 0.75  # jax's own where neither is set
_ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"
_QUERY = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
_QUERY_S = 10.0


def set_memory_fraction(utilization: float) -> None:
    """Sets the fraction of a GPU's memory that jax's pool takes: `utilization`, and slack; call it before jax starts.

    It changes nothing where the environment sets another fraction, or jax has started.
    """
    if not any(os.environ.get(name) for name in _FRACTIONS) and not xla_bridge.backends_are_initialized():
        os.environ[_FRACTIONS[0]] = f"{min(utilization + SLACK, 1 - OUTSIDE):.4f}"


def holds_gpu() -> bool:
    """Returns whether jax has started in this process, and has allocated GPU memory."""
    return xla_bridge.backends_are_initialized() and jax.default_backend() != "cpu"


def environment_with_memory_fraction(share: float) -> dict[str, str]:
    """Returns this process's environment for a child whose jax takes `share` of a GPU's memory."""
    return {name: value for name, value in os.environ.items() if name not in _FRACTIONS} | {_FRACTIONS[0]: f"{share}"}


def device_memory(device: jax.Device) -> DeviceMemory | None:
    """Returns the memory of a GPU, None for a CPU. Raises ValueError where jax does not report it."""
    if device.platform == "cpu":
        return None
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        raise ValueError(
            f"jax does not report the memory of {device.device_kind}, so the cache cannot be sized: "
            f"{_ALLOCATOR}={os.environ.get(_ALLOCATOR, '')} has no pool; unset it"
        )
    given = next((value for name in _FRACTIONS if (value := os.environ.get(name))), _DEFAULT)
    return DeviceMemory(int(stats["bytes_limit"] / float(given)), stats["bytes_limit"], stats.get("bytes_in_use", 0))


def memory_outside_pool(devices: Sequence[jax.Device]) -> int | None:
    """Returns the largest number of bytes used outside of jax's pool on any of `devices`.

    CUDA, kernels' code and NCCL's buffers are there, which jax's statistics do not count. None on a CPU, and where
    nvidia-smi does not answer in time.
    """
    if devices[0].platform == "cpu":
        return None
    numbers = [device.local_hardware_id for device in devices]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(number) for number in range(max(numbers) + 1)]
    try:
        ended = run_limited([*_QUERY, "--id=" + ",".join(names[number].strip() for number in numbers)], _QUERY_S)
        used = [int(line) * 2**20 for line in ended.output.split("\n") if line]
        pools = [(stats := device.memory_stats()).get("pool_bytes", stats["bytes_limit"]) for device in devices]
        return max(total - pool for total, pool in zip(used, pools, strict=True))
    except (OSError, ValueError):  # there is no nvidia-smi, or its output is not numbers
        return None
