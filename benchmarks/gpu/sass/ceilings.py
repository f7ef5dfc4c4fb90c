"""What whole FP8 products could reach at most: their last wave of tiles, and what binds a step of the main loop.

One arithmetic for both sides: ours with the tile that `plan.py` chooses, DeepGEMM's with the one that its heuristic
chooses (`others.json`). Ceilings are shares of the tensor core's rate. Groups have 0.7 to 1.3 times the rows that a
shape names, as in DeepGEMM's tests, and a ceiling is the mean over draws. Epilogues and launches are left out.
"""

import dataclasses
import math
import random
from collections.abc import Iterator, Sequence

from benchmarks.gpu.sass.counts import assumed
from pallas_kernels.gemm.plan import WIDE_TILE_M, plan_contiguous, plan_dense
from pallas_kernels.grouped import aligned_rows
from pallas_kernels.mosaic import NUM_SMS

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


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Tiles of a block, and what a cluster of two shares: neighbors along M the weights, along N the activations."""

    rows: int
    columns: int
    cluster_m: int = 1
    cluster_n: int = 1

    def __str__(self) -> str:
        shared = ", weights" if self.cluster_m > 1 else ", activations" if self.cluster_n > 1 else ""
        return f"{self.rows}x{self.columns}{shared}"

    def step_cycles(self, x_readers: int, w_readers: int, shared_memory: bool) -> float:
        """Returns the least cycles of a step of 128 of K, whose operands so many blocks share."""
        products = 4 * math.ceil(self.rows / 64)
        x, w = self.rows * (128 + 4), self.columns * 128
        operands = products * (64 + self.columns) * 32
        port = (operands + x + w) / assumed("shared memory") if shared_memory else 0
        return max(products * self.columns / 2, port, (x / x_readers + w / w_readers) / assumed("L2 to multiprocessor"))


def our_tiling(shape: Shape) -> Tiling:
    """Returns what we take. What DeepGEMM computes in its masked form is a contiguous product with room for twice."""
    total = shape.groups * shape.rows
    if shape.kind == "dense":
        plan = plan_dense(total, shape.n, shape.k, 1)
        return Tiling(plan.tile_m, plan.tile_n, plan.cluster_m, plan.cluster_n)
    room = total if shape.kind == "contiguous" else aligned_rows(2 * total, shape.groups, WIDE_TILE_M)
    plan = plan_contiguous(room, WIDE_TILE_M, shape.n, shape.k, 1)
    return Tiling(plan.tile_m, plan.tile_n, plan.cluster)


def ceiling(shape: Shape, tiling: Tiling, *, ours: bool, shared_memory: bool = True) -> float:
    """Returns the share of the tensor core's rate, as a mean over draws."""
    useful, taken = 0.0, 0.0
    for counts in shape.draws():
        steps = _steps(shape, tiling, counts, ours)
        blocks = sum(blocks for blocks, _, _ in steps)
        mean = sum(b * tiling.step_cycles(x, w, shared_memory) for b, x, w in steps) / blocks
        useful += sum(counts) * shape.n / _VALUES_PER_CYCLE
        taken += math.ceil(blocks / NUM_SMS) * NUM_SMS * mean
    return useful / taken


def _steps(shape: Shape, tiling: Tiling, counts: Sequence[int], ours: bool) -> list[tuple[int, int, int]]:
    """Returns (blocks, readers of their activations, readers of their weights) of a product's tiles."""
    columns = math.ceil(shape.n / tiling.columns)
    even = columns + columns % 2
    tiles = [group for group, rows in enumerate(counts) for _ in range(math.ceil(rows / tiling.rows))]
    if tiling.cluster_n > 1:
        return [(len(tiles) * even, 2, 1)]
    if tiling.cluster_m == 1:
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
    for shape, theirs in ((Shape(*row[:5]), Tiling(*row[5:])) for row in others):
        sides = ((our_tiling(shape), True), (theirs, False))
        found = [[ceiling(shape, t, ours=ours, shared_memory=port) for t, ours in sides] for port in (True, False)]
        (ours, other), (ours_without, other_without) = found
        ratios = f"{ours / other:.2f}", f"{ours_without / other_without:.2f}"
        yield (shape.name, *(str(t) for t, _ in sides), f"{ours:.0%}", f"{other:.0%}", *ratios)
