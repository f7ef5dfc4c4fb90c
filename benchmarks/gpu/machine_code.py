"""Reads the main loops of the kernels from their machine code, and says in a model what binds them. No GPU is needed.

    JAX_PLATFORMS=cpu python -m benchmarks.gpu.machine_code [--only 'decode|dense|window']

Compiles each kernel at production shapes for sm_90a, disassembles it (ptxas and nvdisasm of the `aot` extra) and
reports for each main loop: instructions, registers, spills, bounds by resource, and cycles from a small model whose
assumptions stand at the top; cycles are those of round robin and of first come first served. Beside them stand stored
figures of FlashMLA, DeepGEMM and FlashAttention-3, made the same way (`tools/sass/others.json` says from what).

Nothing here is a measured time. docs/performance/machine_code.md says what the figures mean.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence

from benchmarks.record import Cell, Report, arguments, run
from pallas_kernels import aot
from tools.sass import ceilings, counts, disassembly, kernels, listed
from tools.sass.reading import OTHERS, RESOURCES, KernelReading, interpret


def main(report: Report) -> int:
    given = arguments(__doc__, only="").only
    every, only = [*kernels.kernels()], given.split("|")
    chosen = [kernel for kernel in every if any(each in kernel.name for each in only)]
    triton = {name: case for name, case in listed.cases().items() if any(each in name for each in only)}
    if not chosen and not triton:
        names = [*(kernel.name for kernel in every), *listed.cases()]
        print(f"no kernel is called {given!r}: {names}", file=sys.stderr)
        return 2
    try:
        readings = []
        for kernel in chosen:
            fn, shapes = kernels.program_of(kernel.case)
            readings.append(interpret(kernel, aot.kernel_resources(fn, *shapes)))
            print(f"read {kernel.name}", file=sys.stderr, flush=True)
        if readings:
            tabulate(report, readings)
        if triton:
            report.table(listed.TITLE, listed.HEAD, listed.rows(triton, OTHERS))
    except (aot.AotUnavailableError, disassembly.ToolMissingError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def tabulate(report: Report, readings: Sequence[KernelReading]) -> None:
    """Reports what the model assumes, what the loops hold, and what they take in the model."""
    assumed = ((name, f"{value:g}", unit, source) for name, (value, unit, source) in counts.ASSUMPTIONS.items())
    report.detail("What the model assumes", ["assumption", "value", "unit", "where from"], assumed)
    columns = ["kernel", "a pass", "instructions", "registers", "spilled bytes", *RESOURCES, "link", "cycles",
               "tensor use", "peer", "its cycles", "theirs / ours"]  # fmt: skip
    lines = (line for reading in readings for line in _lines(reading))
    report.table("Bounds and modelled cycles of a pass", columns, lines)
    columns = ["kernel", "link", "warpgroup 0", "warpgroup 1", "warpgroup 2, where it dequantizes"]
    lines = (line for reading in readings for line in _waiting(reading))
    report.detail("What each warpgroup waits for, in cycles of a pass (round robin)", columns, lines)
    if any(reading.kernel.passes == kernels.PRODUCT_PASS for reading in readings):
        report.table("Ceilings of FP8 products, as shares of the tensor core's rate", ceilings.HEAD,
                     ceilings.rows(OTHERS["tiles"]))  # fmt: skip
    report.detail(f"Whose the stored figures are. {OTHERS['about']}", ["name", "source"], OTHERS["sources"].items())


def _lines(reading: KernelReading) -> Iterator[list[Cell]]:
    """Yields a line per link; the bound that binds is bold.

    Cycles are those of round robin and of first come. A ratio is that of their cycles for the same work to ours: above
    1 ours is faster. The work is products; where reading weights is the limit (`reads_as_much`) a pass is as much work
    as a pass.
    """
    kernel, bounds = reading.kernel, reading.bounds()
    cells = {name: f"{cycles:,.0f}" for name, cycles in bounds.items()}
    binding = max(bounds, key=bounds.__getitem__)
    cells[binding] = f"**{cells[binding]}**"
    instructions = " + ".join(str(len(path)) for path in reading.paths)
    head: list[Cell] = [kernel.name, kernel.passes, instructions, reading.registers, reading.spill_bytes]
    head += [cells.get(name, "") for name in RESOURCES]
    other = OTHERS["loops"].get(kernel.other, {"cycles": {}})
    for name, runs in reading.cycles.items():
        ours = _pair("{:,.0f}", (run.cycles for run in runs))
        peer: list[Cell] = ["", "", ""]
        if theirs := other["cycles"].get(name):
            share = 1 if other.get("reads_as_much") else bounds["tensor core"] / other["bounds"]["tensor core"]
            ratios = (cycles * share / run.cycles for cycles, run in zip(theirs, runs, strict=True))
            peer = [kernel.other, _pair("{:,}", theirs), _pair("{:.2f}", ratios)]
        yield [*head, name, ours, _pair("{:.0%}", (run.tensor_cycles / run.cycles for run in runs)), *peer]


def _pair(form: str, values: Iterable[float]) -> str:
    return " / ".join(map(form.format, values))


def _waiting(reading: KernelReading) -> Iterator[list[Cell]]:
    for name, (turns, _) in reading.cycles.items():
        causes = [
            ", ".join(f"{cause} {cycles:,.0f}" for cause, cycles in waiting.most_common(4) if cycles >= 10)
            for waiting in turns.waiting
        ]
        yield [reading.kernel.name, name, *causes, *[""] * (3 - len(causes))]


if __name__ == "__main__":
    run(main)
