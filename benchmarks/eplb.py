"""Balancing experts: decisions at DeepSeek-V3's size.

    python -m benchmarks.eplb

58 layers of 256 experts are placed in 288 replicas. A line has, for each published deployment, the time of a
decision, how even it makes a lognormal load, and how many replicas keep their expert when the load drifts a little
(20 % per decision), with `keep_in_place` and without.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np

from benchmarks.record import Cell, Report, arguments, elapsed, run, spread
from sharding.experts.eplb import balancedness, keep_in_place, rebalance_experts

ROUNDS = 21
LAYERS, EXPERTS, REPLICAS, GROUPS = 58, 256, 288, 8


def main(report: Report) -> None:
    arguments(__doc__)
    columns = ["deployment", "a decision (ms)", "keeping in place (ms)", "balancedness", "replicas that stay (%)",
               "without keeping (%)"]  # fmt: skip
    report.table("Decisions", columns, decisions(np.random.default_rng(0)))


def decisions(rng: np.random.Generator) -> Iterator[list[Cell]]:
    """Yields a line per published deployment."""
    weight = rng.lognormal(size=(LAYERS, EXPERTS))
    drifted = weight * rng.lognormal(sigma=0.2, size=weight.shape)
    for name, nodes, gpus in (("prefill, 4 nodes, hierarchical", 4, 32), ("decode, 18 nodes, global", 18, 144)):
        result = rebalance_experts(weight, REPLICAS, GROUPS, nodes, gpus)
        new = rebalance_experts(drifted, REPLICAS, GROUPS, nodes, gpus)
        kept = keep_in_place(new, result, GROUPS, nodes, gpus)
        calls = (
            partial(rebalance_experts, weight, REPLICAS, GROUPS, nodes, gpus),
            partial(keep_in_place, new, result, GROUPS, nodes, gpus),
        )
        times = ([1e3 * elapsed(call) for _ in range(ROUNDS)] for call in calls)
        even = balancedness(weight, result, gpus).mean()
        stay = [100 * float((each.phy2log == result.phy2log).mean()) for each in (kept, new)]
        yield [name, *(spread(each, 1) for each in times), even, *stay]


if __name__ == "__main__":
    run(main)
