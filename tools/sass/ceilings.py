"""What whole FP8 products could reach at most: their last wave of tiles, and what binds a step of the main loop.

One arithmetic for both sides: ours with the tile that `plan.py` chooses, DeepGEMM's with the one that its heuristic
chooses (`others.json`). Ceilings are shares of the tensor core's rate. Groups have 0.7 to 1.3 times the rows that a
shape names, as in DeepGEMM's tests, and a ceiling is the mean over draws. Epilogues and launches are left out.
"""

import dataclasses
import math
import random
from collections.abc import Iterator, Sequence

from pallas_kernels.gemm.plan import WIDE_TILE_M, TilePlan, plan_contiguous, plan_dense
from pallas_kernels.grouped import aligned_rows
from pallas_kernels.mosaic import NUM_SMS
from tools.sass.counts import assumed

HEAD = ("product", "our tile", "DeepGEMM's", "ours", "DeepGEMM's", "ratio", "ratio, shared memory not counted")
_DRAWS = 50
_VALUES_PER_CYCLE = 32
"""Values of a result for which the tensor cores multiply 128 of K in a cycle."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """A product: `kind` is dense, contiguous or masked; rows are those of a group."""

    kind: str
    groups: int
    rows: int
    n: int
    k: int

    @property
    def name(self) -> str:
        groups = f"{self.groups} of " if self.kind != "dense" else ""
        return f"{self.kind} {groups}{self.rows} x {self.n} x {self.k}"

    def draws(self) -> list[list[int]]:
        """Returns the rows of each group, draw by draw; those of a dense product are known."""
        if self.kind == "dense":
            return [[self.rows]]
        drawn = random.Random(0)
        return [[int(self.rows * drawn.uniform(0.7, 1.3)) for _ in range(self.groups)] for _ in range(_DRAWS)]


def our_plan(shape: Shape) -> TilePlan:
    """Returns what we take. What DeepGEMM computes in its masked form is a contiguous product with room for twice."""
    total = shape.groups * shape.rows
    if shape.kind == "dense":
        return plan_dense(total, shape.n, shape.k, 1)
    room = total if shape.kind == "contiguous" else aligned_rows(2 * total, shape.groups, WIDE_TILE_M)
    plan = plan_contiguous(room, WIDE_TILE_M, shape.n, shape.k, 1)
    return dataclasses.replace(plan, shares_weights=True)  # where both tiles of a cluster have one group


def _shown(plan: TilePlan) -> str:
    shared = ", weights" if plan.cluster_m > 1 else ", activations" if plan.cluster_n > 1 else ""
    return f"{plan.tile_m}x{plan.tile_n}{shared}"


def step_cycles(plan: TilePlan, x_readers: int, w_readers: int, shared_memory: bool) -> float:
    """Returns the least cycles of a step of 128 of K, whose operands so many blocks share."""
    products = 4 * math.ceil(plan.tile_m / 64)
    x, w = plan.tile_m * (128 + 4), plan.tile_n * 128
    operands = products * (64 + plan.tile_n) * 32
    port = (operands + x + w) / assumed("shared memory") if shared_memory else 0
    return max(products * plan.tile_n / 2, port, (x / x_readers + w / w_readers) / assumed("L2 to multiprocessor"))


def ceiling(shape: Shape, plan: TilePlan, *, ours: bool, shared_memory: bool = True) -> float:
    """Returns the share of the tensor core's rate, as a mean over draws."""
    useful, taken = 0.0, 0.0
    for counts in shape.draws():
        steps = _steps(shape, plan, counts, ours)
        blocks = sum(blocks for blocks, _, _ in steps)
        mean = sum(b * step_cycles(plan, x, w, shared_memory) for b, x, w in steps) / blocks
        useful += sum(counts) * shape.n / _VALUES_PER_CYCLE
        taken += math.ceil(blocks / NUM_SMS) * NUM_SMS * mean
    return useful / taken


def _steps(shape: Shape, plan: TilePlan, counts: Sequence[int], ours: bool) -> list[tuple[int, int, int]]:
    """Returns (blocks, readers of their activations, readers of their weights) of a product's tiles."""
    columns = math.ceil(shape.n / plan.tile_n)
    even = columns + columns % 2
    tiles = [group for group, rows in enumerate(counts) for _ in range(math.ceil(rows / plan.tile_m))]
    if plan.cluster_n > 1:
        return [(len(tiles) * even, 2, 1)]
    if plan.cluster_m == 1:
        return [(len(tiles) * columns, 1, 1)]
    if shape.kind == "masked" and not ours:  # pairs within a group
        alone = sum(tiles.count(group) % 2 for group in set(tiles))
    else:
        alone = sum(2 if first != second else 0 for first, second in zip(tiles[::2], tiles[1::2], strict=False))
        alone += len(tiles) % 2
    paired = (len(tiles) - alone) * (even if ours and shape.kind != "dense" else columns)
    # Where two row tiles have two groups ours share the activations, DeepGEMM's nothing.
    return [(paired, 1, 2), (alone * even, 2, 1) if ours else (alone * columns, 1, 1)]


def rows(others: Sequence[Sequence]) -> Iterator[tuple]:
    """Yields the rows of a table under `HEAD`.

    `others` are DeepGEMM's tiles for the shapes of many rows that it times: for few, memory and latency count.
    """
    for *product, tile_m, tile_n, cluster_m, cluster_n in others:
        shape = Shape(*product)
        theirs = TilePlan(True, tile_m, tile_n, cluster=max(cluster_m, cluster_n), shares_weights=cluster_m > 1)
        sides = ((our_plan(shape), True), (theirs, False))
        found = [
            [ceiling(shape, plan, ours=ours, shared_memory=port) for plan, ours in sides] for port in (True, False)
        ]
        (ours, other), (ours_without, other_without) = found
        ratios = f"{ours / other:.2f}", f"{ours_without / other_without:.2f}"
        yield (shape.name, *(_shown(plan) for plan, _ in sides), f"{ours:.0%}", f"{other:.0%}", *ratios)
