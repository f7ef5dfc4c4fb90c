"""Time of one rebalancing decision at DeepSeek-V3's size: 58 layers of 256 experts in 288 slots.

python -m benchmarks.eplb
"""

import statistics
import time

import numpy as np

from sharding.eplb import balancedness, rebalance_experts

ROUNDS = 21


def main() -> None:
    weight = np.random.default_rng(0).lognormal(size=(58, 256))
    for name, nodes, gpus in (("prefill, 4 nodes, hierarchical", 4, 32), ("decode, 18 nodes, global", 18, 144)):
        seconds = []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            result = rebalance_experts(weight, 288, 8, nodes, gpus)
            seconds.append(time.perf_counter() - started)
        even = balancedness(weight, result, gpus).mean()
        print(f"{name}: median {1e3 * statistics.median(seconds):.1f} ms, balancedness {even:.3f} (lognormal load)")


if __name__ == "__main__":
    main()
