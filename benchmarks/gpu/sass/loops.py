"""Main loops of a kernel: basic blocks, natural loops, and the path through one that is taken nearly always.

A kernel's main loops are its innermost loops with tensor-core instructions, one for each kind of computing warpgroup.
The usual path leaves out what is rare: masked pages, values that must be cleared, further tries at a barrier. It is
found as the path with the most tensor-core instructions, among these with the most arrivals at barriers, and among
these the shortest.
"""

import dataclasses
import re

from benchmarks.gpu.sass.disassembly import Function, Instruction

_ENDS = ("BRA", "EXIT", "RET", "BRX", "JMP", "KILL")
_CONDITION_IN_ARGS = re.compile(r"!?U?P\d")


@dataclasses.dataclass
class _Block:
    index: int
    code: tuple[Instruction, ...]
    successors: list[int]


def main_loops(function: Function) -> list[tuple[Instruction, ...]]:
    """Returns the usual path through each main loop, in the order of the code."""
    blocks = _blocks(function)
    order = _reverse_postorder(blocks)
    loops = _natural_loops(blocks, order)
    with_products = {head: body for head, body in loops.items() if _products(blocks, body)}
    inner = [
        head
        for head, body in with_products.items()
        if not any(other != head and other in body for other in with_products)
    ]
    return [_usual_path(blocks, order, head, loops, _cost) for head in sorted(inner)]


def feeding_loop(function: Function) -> tuple[Instruction, ...]:
    """Returns the usual path of the loop that writes shared memory for the products of others.

    It is the loop without products that arrives most often at barriers. Its usual path fetches least, since queries
    are fetched once in many passes, and waits most, since all places but the first have been in use.
    """
    blocks = _blocks(function)
    order = _reverse_postorder(blocks)
    loops = _natural_loops(blocks, order)
    others = {head: body for head, body in loops.items() if not _products(blocks, body)}
    inner = [
        head
        for head, body in others.items()
        if not any(o != head and o in body and _arrives(blocks, others[o]) for o in others)
    ]
    head = max(inner, key=lambda head: _arrives(blocks, loops[head]))

    def cost(block: _Block) -> tuple[int, int, int]:
        copies, waits = (sum(map(kind, block.code)) for kind in (is_copy, is_wait))
        tries_again = any(instruction.op.startswith("NANOSLEEP") for instruction in block.code)
        return copies, 0 if tries_again else -waits, len(block.code)

    return _usual_path(blocks, order, head, loops, cost)


def is_copy(instruction: Instruction) -> bool:
    """Whether this is a TMA copy to shared memory."""
    return instruction.op.startswith("UTMALDG")


def is_product(instruction: Instruction) -> bool:
    """Whether this is a matrix product of a warpgroup (Mosaic) or a warp (Triton)."""
    return "GMMA" in instruction.op or instruction.op.startswith("HMMA")


def is_arrival(instruction: Instruction) -> bool:
    """Whether this is an arrival at an mbarrier."""
    return instruction.op.startswith("SYNCS.ARRIVE")


def is_wait(instruction: Instruction) -> bool:
    """Whether this asks an mbarrier for the end of a phase."""
    return instruction.op.startswith("SYNCS") and "TRYWAIT" in instruction.op


def _products(blocks: list[_Block], body: set[int]) -> bool:
    return any(is_product(instruction) for index in body for instruction in blocks[index].code)


def _blocks(function: Function) -> list[_Block]:
    code, count = function.instructions, len(function.instructions)
    ends = {i + 1 for i, instruction in enumerate(code) if instruction.op.split(".")[0] in _ENDS}
    starts = sorted(start for start in {0, *function.labels.values(), *ends} if start < count)
    number = {start: index for index, start in enumerate(starts)}
    blocks = []
    for index, (start, stop) in enumerate(zip(starts, [*starts[1:], count], strict=True)):
        last, successors = code[stop - 1], []
        base = last.op.split(".")[0]
        if base == "BRA" and last.target is not None:
            successors.append(number[function.labels[last.target]])
        always = base in _ENDS and last.predicate is None and not _CONDITION_IN_ARGS.match(last.args)
        if not always and stop in number and number[stop] not in successors:
            successors.append(number[stop])
        blocks.append(_Block(index, code[start:stop], successors))
    return blocks


def _reverse_postorder(blocks: list[_Block]) -> list[int]:
    seen, order, stack = {0}, [], [(0, iter(blocks[0].successors))]
    while stack:
        index, rest = stack[-1]
        following = next((s for s in rest if s not in seen), None)
        if following is None:
            order.append(index)
            stack.pop()
        else:
            seen.add(following)
            stack.append((following, iter(blocks[following].successors)))
    return order[::-1]


def _natural_loops(blocks: list[_Block], order: list[int]) -> dict[int, set[int]]:
    """Returns the blocks of each loop by its head: those that reach a branch back to it without passing it."""
    predecessors: dict[int, list[int]] = {index: [] for index in order}
    for index in order:
        for successor in blocks[index].successors:
            predecessors[successor].append(index)
    dominators = _dominators(order, predecessors)
    loops: dict[int, set[int]] = {}
    for index in order:
        for head in blocks[index].successors:
            if head in dominators[index]:
                body, stack = loops.setdefault(head, {head}), [index]
                while stack:
                    block = stack.pop()
                    if block not in body:
                        body.add(block)
                        stack.extend(predecessors[block])
    return loops


def _dominators(order: list[int], predecessors: dict[int, list[int]]) -> dict[int, frozenset[int]]:
    everything = frozenset(order)
    dominators = dict.fromkeys(order, everything) | {order[0]: frozenset({order[0]})}
    changed = True
    while changed:
        changed = False
        for index in order[1:]:
            of_all = frozenset.intersection(*(dominators[p] for p in predecessors[index])) | {index}
            if of_all != dominators[index]:
                dominators[index], changed = of_all, True
    return dominators


def _arrives(blocks: list[_Block], body: set[int]) -> int:
    return sum(is_arrival(instruction) for index in body for instruction in blocks[index].code)


def _usual_path(blocks: list[_Block], order: list[int], head: int, loops: dict[int, set[int]], cost_of) -> tuple:
    body, place = loops[head], {index: number for number, index in enumerate(order)}
    best: dict[int, tuple[tuple[int, int, int], tuple[int, ...]]] = {head: (cost_of(blocks[head]), (head,))}
    ends = []
    for index in sorted(body, key=place.__getitem__):
        cost, path = best[index]
        for successor in blocks[index].successors:
            if successor == head:
                ends.append((cost, path))
            elif successor in body and place[successor] > place[index]:  # not back to the head of an inner loop
                first, second, length = cost_of(blocks[successor])
                total = (cost[0] + first, cost[1] + second, cost[2] + length)
                if successor not in best or total < best[successor][0]:
                    best[successor] = (total, (*path, successor))
    return tuple(instruction for index in min(ends)[1] for instruction in blocks[index].code)


def _cost(block: _Block) -> tuple[int, int, int]:
    products, arrivals = (sum(map(kind, block.code)) for kind in (is_product, is_arrival))
    return -products, -arrivals, len(block.code)
