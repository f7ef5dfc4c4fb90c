"""Main loops of a kernel: basic blocks, natural loops, and the path through one that is taken nearly always.

A kernel's main loops are its innermost loops with tensor-core instructions, one for each kind of computing warpgroup.
The usual path leaves out what is rare: masked pages, values that must be cleared, further tries at a barrier. It is
found as the path with the most tensor-core instructions, among these with the most arrivals at barriers, and among
these the shortest.
"""

import functools
import re
from collections.abc import Callable, Iterable, Mapping

from tools.sass.disassembly import SassFunction, SassInstruction

_ENDS = ("BRA", "EXIT", "RET", "BRX", "JMP", "KILL")
_CONDITION_IN_ARGS = re.compile(r"!?U?P\d")
type Code = tuple[SassInstruction, ...]
type Edges = Mapping[int, Iterable[int]]
type Way = tuple[float, float, float, tuple[int, ...]]
"""What a way through blocks costs, by the two figures of a cost and by its length; and the blocks."""


def is_copy(instruction: SassInstruction) -> bool:
    """Returns whether this is a TMA copy to shared memory."""
    return instruction.op.startswith("UTMALDG")


def is_product(instruction: SassInstruction) -> bool:
    """Returns whether this is a matrix product of a warpgroup (Mosaic) or a warp (Triton)."""
    return "GMMA" in instruction.op or instruction.op.startswith("HMMA")


def is_arrival(instruction: SassInstruction) -> bool:
    """Returns whether this is an arrival at an mbarrier."""
    return instruction.op.startswith("SYNCS.ARRIVE")


def is_wait(instruction: SassInstruction) -> bool:
    """Returns whether this asks an mbarrier for the end of a phase."""
    return instruction.op.startswith("SYNCS") and "TRYWAIT" in instruction.op


def main_loops(function: SassFunction) -> list[Code]:
    """Returns the usual path through each main loop, in the order of the code."""
    graph = _Graph(function)
    with_products = {head: body for head, body in graph.loops.items() if graph.count(body, is_product)}

    def cost(code: Code) -> tuple[int, int]:
        return -sum(map(is_product, code)), -sum(map(is_arrival, code))

    inner = [head for head in sorted(with_products) if not graph.loops[head] & (with_products.keys() - {head})]
    return [graph.usual_path(head, cost) for head in inner]


def feeding_loop(function: SassFunction) -> Code:
    """Returns the usual path of the loop that writes shared memory for the products of others.

    It is the loop without products that arrives most often at barriers. Its usual path fetches least, since queries
    are fetched once in many passes, and waits most, since all places but the first have been in use.
    """
    graph = _Graph(function)
    others = {head: body for head, body in graph.loops.items() if not graph.count(body, is_product)}
    arriving = {head for head, body in others.items() if graph.count(body, is_arrival)}
    inner = [head for head, body in others.items() if not body & (arriving - {head})]

    def cost(code: Code) -> tuple[int, int]:
        tries_again = any(instruction.op.startswith("NANOSLEEP") for instruction in code)
        return sum(map(is_copy, code)), 0 if tries_again else -sum(map(is_wait, code))

    return graph.usual_path(max(inner, key=lambda head: graph.count(others[head], is_arrival)), cost)


class _Graph:
    """Basic blocks by number in the order of the code, their successors, and the blocks of each loop by its head."""

    def __init__(self, function: SassFunction) -> None:
        code, count = function.instructions, len(function.instructions)
        ends = {i + 1 for i, instruction in enumerate(code) if instruction.op.split(".")[0] in _ENDS}
        starts = sorted(start for start in {0, *function.labels.values(), *ends} if start < count)
        number = {start: block for block, start in enumerate(starts)}
        self.blocks = [code[start:stop] for start, stop in zip(starts, [*starts[1:], count], strict=True)]
        self.successors: dict[int, list[int]] = {}
        for block, instructions in enumerate(self.blocks):
            last = instructions[-1]
            base = last.op.split(".")[0]
            found = [number[function.labels[last.target]]] if base == "BRA" and last.target is not None else []
            always = base in _ENDS and last.predicate is None and not _CONDITION_IN_ARGS.match(last.args)
            if not always and block + 1 < len(self.blocks) and block + 1 not in found:
                found.append(block + 1)
            self.successors[block] = found
        self._back_edges: set[tuple[int, int]] = set()
        self.loops = self._natural_loops()

    def _natural_loops(self) -> dict[int, set[int]]:
        """Finds the branches back to a block that each way to them passes, and what lies on the ways between."""
        loops: dict[int, set[int]] = {}
        reached = _reached(self.successors, 0)
        predecessors: dict[int, list[int]] = {block: [] for block in reached}
        for block in sorted(reached):
            for head in self.successors[block]:
                predecessors[head].append(block)
        for head, tails in predecessors.items():
            for tail in set(tails) - _reached(self.successors, 0, without=head):
                self._back_edges.add((tail, head))
                loops.setdefault(head, {head}).update(_reached(predecessors, tail, without=head))
        return loops

    def count(self, body: set[int], kind: Callable[[SassInstruction], bool]) -> int:
        """Counts the instructions of a kind in blocks."""
        return sum(kind(instruction) for block in body for instruction in self.blocks[block])

    def usual_path(self, head: int, cost: Callable[[Code], tuple[int, int]]) -> Code:
        """Returns the instructions of the cheapest way from a loop's head back to it; the length counts last."""

        @functools.cache
        def best(block: int) -> Way:
            ways: list[Way] = [(0.0, 0.0, 0.0, ())] if head in self.successors[block] else []
            ways += [
                best(s) for s in self.successors[block] if s in self.loops[head] and (block, s) not in self._back_edges
            ]
            first, second, length, path = min(ways, default=(float("inf"), 0.0, 0.0, ()))
            own, code = cost(self.blocks[block]), self.blocks[block]
            return first + own[0], second + own[1], length + len(code), (block, *path)

        return tuple(instruction for block in best(head)[-1] for instruction in self.blocks[block])


def _reached(edges: Edges, start: int, without: int | None = None) -> set[int]:
    """Returns the blocks that ways from `start` lead to, itself included, if they do not pass `without`."""
    found, stack = set[int](), [start]
    while stack:
        block = stack.pop()
        if block != without and block not in found:
            found.add(block)
            stack.extend(edges[block])
    return found
