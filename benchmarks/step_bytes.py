"""How many bytes a compiled step writes beside its kernels: fusions, copies, gathers, by stage.

    JAX_PLATFORMS=cpu python -m benchmarks.step_bytes decode_ep144 prefill_ep32 [--largest=5]

Compiles the model's program of each deployment as `launch.plan` does, without a GPU, and reads its text. What a kernel
of ours or a collective writes does not count, nor what lives inside a fusion. An update in place counts with what it
writes. Bytes are those of one device and one step. Whatever is written was read before, and is read again, so each
counts about three times against the memory's bandwidth.
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from configs.deepseek_v3 import DEEPSEEK_V3
from configs.deployments import DEPLOYMENTS
from tools.plan import hlo
from tools.plan.hlo import collective_in, stage_label
from tools.plan.plan import phases
from tools.plan.programs import compile_run, lay_out, runs

_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call", "iota", "after-all"}
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # the operand that is written, in place


class Written(NamedTuple):
    """An instruction that writes: its stage, name, shape, and bytes per run and in a step."""

    stage: str
    name: str
    shape: str
    once: int
    step: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("deployments", nargs="+", choices=sorted(DEPLOYMENTS))
    parser.add_argument("--largest", type=int, default=5)
    args = parser.parse_args()
    for name in args.deployments:
        planned = lay_out(DEEPSEEK_V3, DEPLOYMENTS[name])
        for phase in phases(planned.deployment):
            compiled = compile_run(planned, phase, runs(planned, phase)[0])
            print(f"{name}, {phase}: temporaries {compiled.temporaries / 1e6:,.1f} MB")
            show(list(written(hlo.parse(compiled.text))), args.largest)


def show(found: list[Written], largest: int) -> None:
    """Prints the bytes by stage, and the instructions that write the most."""
    stages = Counter[str]()
    for each in found:
        stages[each.stage] += each.step
    for stage, total in stages.most_common():
        print(f"  {stage:<16}{total / 1e6:>12,.1f} MB")
    print(f"  {'all':<16}{sum(stages.values()) / 1e6:>12,.1f} MB")
    for each in sorted(found, key=lambda each: -each.step)[:largest]:
        shape = each.shape if len(each.shape) < 60 else f"{each.shape[:57]}..."
        print(
            f"    {each.stage:<14} {each.name:<40} {each.once / 1e6:>9,.2f} MB each {each.step / 1e6:>11,.1f}  {shape}"
        )


def written(module: hlo.Module) -> Iterator[Written]:
    """Yields what each instruction of a program writes, those in loops as often as they run."""
    yield from _walk(module, module[module.entry], 1)


def _walk(module: hlo.Module, computation: hlo.Computation, times: int) -> Iterator[Written]:
    for instruction in computation.instructions:
        if instruction.opcode in ("while", "call"):
            for name in instruction.called:
                yield from _walk(module, module[name], times * (instruction.trips or 1))
        elif _writes(module, instruction):
            once = _bytes(module, computation, instruction)
            stage = stage_label(instruction) or "other"
            yield Written(stage, instruction.name, instruction.shape, once, once * times)


def _writes(module: hlo.Module, instruction: hlo.Instruction) -> bool:
    kernel = instruction.opcode == "custom-call" and '"mosaic' in instruction.attributes
    halves = instruction.opcode.endswith("-done") or collective_in(module, instruction) is not None
    return not (kernel or halves or instruction.opcode in _FREE)


def _bytes(module: hlo.Module, computation: hlo.Computation, instruction: hlo.Instruction) -> int:
    """Returns what one run writes: the result, or of an update in place the new part."""
    if instruction.opcode in _UPDATES:
        return hlo.shape_bytes(computation.by_name[instruction.operands[_UPDATES[instruction.opcode]]].shape)
    if instruction.opcode != "fusion" or not instruction.called:
        return hlo.shape_bytes(instruction.shape)
    inside = module[instruction.called[0]]
    return _root_bytes(inside, inside.instructions[-1])


def _root_bytes(inside: hlo.Computation, root: hlo.Instruction) -> int:
    if root.opcode in ("tuple", "bitcast"):
        return sum(_root_bytes(inside, inside.by_name[name]) for name in root.operands)
    if root.opcode in _UPDATES:
        return hlo.shape_bytes(inside.by_name[root.operands[_UPDATES[root.opcode]]].shape)
    return hlo.shape_bytes(root.shape)


if __name__ == "__main__":
    main()
