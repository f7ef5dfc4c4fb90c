"""Kernels that a decode step of DeepSeek-V4-Flash launches on 4 H200, by stage and by what they are. Nothing is timed.

    JAX_PLATFORMS=cpu python -m benchmarks.launches [--save FILE]

It compiles the engine's program for FP8 experts and 64 requests per GPU, without a GPU. It needs the extras `aot` and
`triton`. `--save` writes the compiled program's text.
"""

import dataclasses
import re
from collections import Counter
from pathlib import Path

from benchmarks.record import Report, arguments, run
from configs.deepseek_v4 import DEEPSEEK_V4_FLASH
from configs.deployments import V4_FLASH_4XH200
from pallas_kernels import bodies
from tools.plan import hlo
from tools.plan.programs import compile_step, lay_out

_SCOPES = ("compressor", "indexer", "output", "attend")  # parts of attention, beside the stages of a plan


def main(report: Report) -> None:
    file, text = arguments(__doc__, save=Path).save, compiled_step()
    if file is not None:
        file.write_text(text)
    layers, found = DEEPSEEK_V4_FLASH.num_hidden_layers, list(hlo.launches(hlo.parse(text)))
    total = sum(times for _, times in found)
    stages, kinds = Counter[str](), Counter[tuple[str, str]]()
    for instruction, times in found:
        stages[stage(instruction)] += times
        kinds[stage(instruction), kind(instruction)] += times
    report.table("Kernels of a step", ["kernels", "per layer"], [[total, total / layers]])
    columns = ["stage", "kernels", "per layer"]
    report.table("By stage", columns, ([name, n, n / layers] for name, n in stages.most_common()))
    columns = ["stage", "kernel", "kernels", "per layer"]
    report.detail("By kernel", columns, ([*name, n, n / layers] for name, n in kinds.most_common()))


def compiled_step() -> str:
    """Returns the text of the compiled program."""
    planned = lay_out(DEEPSEEK_V4_FLASH, dataclasses.replace(V4_FLASH_4XH200, fp4="fp8"))
    with bodies.left_out():
        (compiled,) = compile_step(planned, "decode")
    return compiled.text


def stage(instruction: hlo.Instruction) -> str:
    """Returns the innermost named part of a layer around an instruction."""
    names = (*hlo.LABELS, *_SCOPES)
    return next((scope for scope in reversed(instruction.scopes) if scope in names), "other")


def kind(instruction: hlo.Instruction) -> str:
    """Returns the name of a kernel of our own, Triton's by its result, or XLA's operation with its name and jax's."""
    scopes = (*instruction.scopes, "")
    if instruction.opcode == "custom-call":
        named = scopes[-3] if scopes[-2] == "mpmd_map" else scopes[-2]
        return f"{named} {instruction.shape[:40]}" if named == "triton_kernel_call" else named
    return f"{re.sub(r'[.\d]+$', '', instruction.name)} ({scopes[-2]})"


if __name__ == "__main__":
    run(main)
