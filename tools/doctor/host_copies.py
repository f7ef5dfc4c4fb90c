"""Measures copies between host and devices, from pageable memory, which loading weights uses, and from pinned memory.

    python -m tools.doctor.host_copies

On a GPU jax copies pageable arrays through pinned buffers of its own. The second figure says what memory that is pinned
from the beginning (`memory_kind="pinned_host"`) would gain: a copy by the processor for each byte. All devices copy at
once, as in a load. Values must come back in every bit.
"""

import functools
import sys
import time

import numpy as np

from tools.doctor.rows import CaseResult, run_cases

_BYTES = 256 << 20
_TIMED = 3


def measure(pinned: bool, size: int) -> CaseResult:
    """Copies `size` bytes to each device and back: the best of three runs."""
    import jax
    from jax.sharding import SingleDeviceSharding

    devices = jax.devices()
    host = np.random.default_rng(0).integers(0, 256, (len(devices), size), np.uint8)
    sources = list(host)
    if pinned:
        kinds = [SingleDeviceSharding(device, memory_kind="pinned_host") for device in devices]
        sources = jax.block_until_ready([*map(jax.device_put, host, kinds)])
    targets = [SingleDeviceSharding(device) for device in devices]
    there, back = [], []
    for _ in range(_TIMED):
        began = time.perf_counter()
        arrays = jax.block_until_ready([*map(jax.device_put, sources, targets)])
        there.append(time.perf_counter() - began)
        began = time.perf_counter()
        for array in arrays:
            array.copy_to_host_async()
        returned = [*map(np.asarray, arrays)]
        back.append(time.perf_counter() - began)
    wrong = [str(device) for device, sent, found in zip(devices, host, returned, strict=True) if (sent != found).any()]
    rates = {"GB/s to the devices": host.nbytes / min(there) / 1e9, "GB/s from them": host.nbytes / min(back) / 1e9}
    name = "pinned memory" if pinned else "pageable memory"
    return CaseResult(name, not wrong, f"other values came back from {', '.join(wrong)}" if wrong else "", rates)


def main() -> int:
    """Returns the exit status of the check."""
    import jax

    if jax.devices()[0].platform == "cpu":
        print("arrays of a CPU are in host memory, so nothing is copied", file=sys.stderr)
        return 2
    kinds = {"pageable memory": False, "pinned memory": True}
    return run_cases({name: functools.partial(measure, pinned, _BYTES) for name, pinned in kinds.items()})


if __name__ == "__main__":
    sys.exit(main())
