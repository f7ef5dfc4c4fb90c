"""How much another order of a decode layer's stages could gain over several nodes: every order, played.

    python -m benchmarks.overlap_orders

Two micro-batches run half a layer apart. One half of a layer is then a merge of a run of one micro-batch's stages with
the rest of the other's; the second half swaps them. Each merge, with the shared expert anywhere after the dispatch, is
repeated until it is steady and compared with the order of `dsv3.model.schedules.overlapped`. Rules and durations are
those of `launch.plan decode_ep144`: one compute lane, one lane per kind of link, a start occupies its link, waiting
costs its time. They are estimates, and so is the answer.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence

from configs.deepseek_v3 import DEEPSEEK_V3
from configs.deployments import DECODE_EP144
from dsv3.engine.device.layout import DECODE_RESERVE
from pallas_kernels.multiprocessors import Multiprocessors
from sharding.experts.kind import Kind
from sharding.experts.traffic import LayerRows
from sharding.experts.transport import build
from sharding.mesh import Machine
from tools.plan import roofline
from tools.plan.deployment import PlannedBatch, kernel_rates

CHAIN = (
    "dispatch>", "dispatch<", "forward>", "forward<", "experts", "reduce>", "reduce<", "combine>", "combine<",
    "project", "core", "output",
)  # fmt: skip
"""A micro-batch's stages from its router on; > starts a transfer, < waits for it. The router is part of `output`."""
IN_NODE = ("forward", "reduce")
_PERIODS = 8

Stage = tuple[str, int]
"""Name and micro-batch."""
Durations = Mapping[str, float]

SERVED: tuple[Stage, ...] = (
    ("dispatch>", 0), ("shared", 0), ("project", 1), ("dispatch<", 0), ("forward>", 0), ("forward<", 0),
    ("experts", 0), ("reduce>", 0), ("reduce<", 0), ("combine>", 0), ("core", 1), ("output", 1),
    ("dispatch>", 1), ("shared", 1), ("combine<", 0), ("project", 0), ("dispatch<", 1), ("forward>", 1),
    ("forward<", 1), ("experts", 1), ("reduce>", 1), ("reduce<", 1), ("combine>", 1), ("core", 0), ("output", 0),
    ("combine<", 1),
)  # fmt: skip
"""A layer as `overlapped.run_decode` writes it."""


def main() -> None:
    durations = durations_of_decode()
    served = layer_seconds(SERVED, durations)
    count, best = 0, (float("inf"), SERVED)
    for order in orders():
        count, best = count + 1, min(best, (layer_seconds(order, durations), order))
    print(f"served order: {served * 1e6:,.0f} us per layer; best of {count:,}: {best[0] * 1e6:,.0f} us", end=" ")
    print(f"({1 - best[0] / served:.1%} less)")
    half = best[1][: len(best[1]) // 2]
    print(" ".join(f"{name}{number}" for name, number in half), "and the same with 0 and 1 swapped")


def durations_of_decode() -> dict[str, float]:
    """Seconds of each stage and transfer of half of DECODE_EP144's requests, as the plan has them.

    The plan divides the time of attention evenly over its four products; three of them are in the core.
    """
    model, deployment = DEEPSEEK_V3, DECODE_EP144
    tokens, replicas = deployment.decode_requests // 2, model.n_routed_experts + deployment.redundant_experts
    count = deployment.device.multiprocessors
    rates = kernel_rates(deployment.device, model, Multiprocessors(count, DECODE_RESERVE).share)
    batch = PlannedBatch(tokens, deployment.context_length, replicas // deployment.devices, 1)
    stages = roofline.decode_stages(model, rates, batch)
    rows = LayerRows.from_widths(tokens, model.num_experts_per_tok, model.hidden_size, fp8_dispatch=True)
    machine = Machine(deployment.nodes, deployment.gpus_per_node)
    across, inside = build(Kind.HIERARCHICAL, machine, replicas, rows).hops
    crossing, local = (across.peers - 1) * across.capacity, (inside.peers - 1) * inside.capacity  # rows
    return {
        "dispatch": crossing * rows.dispatch_bytes / rates.dispatch_link,
        "forward": local * rows.dispatch_bytes / rates.node_link,
        "experts": stages["experts"],
        "reduce": local * rows.combine_bytes / rates.node_link,
        "combine": crossing * rows.combine_bytes / rates.combine_link,
        "project": stages["project"],
        "core": stages["attention"] * 3 / 4,
        "output": stages["attention"] / 4 + stages["router"],
        "shared": stages["shared_expert"],
    }


def orders() -> Iterator[tuple[Stage, ...]]:
    """Every layer of two alike micro-batches that begins with the dispatch of 0."""
    for run in range(1, len(CHAIN) + 1):
        for places in itertools.combinations(range(1, len(CHAIN)), len(CHAIN) - run):
            of_one = dict(zip(places, CHAIN[run:], strict=True))
            of_zero = iter(CHAIN[:run])
            half = [(of_one[i], 1) if i in of_one else (next(of_zero), 0) for i in range(len(CHAIN))]
            for place in range(1, len(CHAIN) + 1):
                with_shared = [*half[:place], ("shared", 0), *half[place:]]
                yield (*with_shared, *((name, 1 - number) for name, number in with_shared))


def layer_seconds(order: Sequence[Stage], durations: Durations) -> float:
    """Seconds of a layer in the steady state of layers that follow each other in this order."""
    now, free, ready = 0.0, {True: 0.0, False: 0.0}, dict[Stage, float]()
    ends = []
    for _ in range(_PERIODS):
        for name, number in order:
            what = name.rstrip("<>")
            if name.endswith(">"):
                link = what in IN_NODE
                start = max(now, free[link])
                free[link] = ready[what, number] = max(start, now + roofline.TRANSFER_S) + durations[what]
            elif name.endswith("<"):
                if (what, number) in ready:  # the first layer waits for nothing that a layer before it sent
                    now = max(now, ready.pop((what, number))) + roofline.HOOK_S
            else:
                now += durations[what]
        ends.append(now)
    return (ends[-1] - ends[_PERIODS // 2]) / (_PERIODS - 1 - _PERIODS // 2)


if __name__ == "__main__":
    main()
