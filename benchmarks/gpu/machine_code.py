"""Reads the main loops of the kernels from their machine code, and says in a model what binds them. No GPU is needed.

    JAX_PLATFORMS=cpu python -m benchmarks.gpu.machine_code [--only 'decode|dense|window']

Compiles each kernel at production shapes for sm_90a, disassembles it (ptxas and nvdisasm of the `aot` extra) and
reports for each main loop: instructions, registers, spills, bounds by resource, and cycles from a small model whose
assumptions stand at the top; cycles are those of round robin and of first come first served. Beside them stand stored
figures of FlashMLA, DeepGEMM and FlashAttention-3, made the same way (`sass/others.json` says from what).

Nothing here is a measured time. docs/performance/machine_code.md says what the figures mean.
"""

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks.gpu.children import program_of
from benchmarks.gpu.sass import ceilings, counts, disassembly, kernels, listed, loops, model
from benchmarks.record import Cell, Report, arguments, run
from pallas_kernels import aot

RESOURCES = ("tensor core", "shared memory", "issue", "exp2", "L2", "memory")
OTHERS = json.loads((Path(__file__).parent / "sass" / "others.json").read_text())


@dataclasses.dataclass(frozen=True)
class Reading:
    """What was read from one kernel.

    Attributes:
      kernel: which.
      spill_bytes: as ptxas reports them.
      registers: of the warpgroups after they traded, as "240/24".
      paths: the instructions of a pass, of each kind of computing warpgroup.
      cycles: by link, under round robin and under first come first served.
    """

    kernel: kernels.Kernel
    spill_bytes: int
    registers: str
    paths: Sequence[loops.Code]
    cycles: dict[str, tuple[model.Modelled, ...]]

    def bounds(self) -> dict[str, float]:
        """Returns the cycles that a pass takes at least, by resource."""
        loads, roles, found = self.kernel.protocol.loads, self.kernel.protocol.roles, Counter[str]()
        for path in self.paths * (len(roles) // len(self.paths)):
            found += counts.resources(path)
        fetched = sum(load.fetched for load in loads)
        if any(role.fetches for role in roles):
            fetched += sum(counts.global_bytes(i) for path in self.paths for i in path if counts.is_global(i))
        found["shared memory"] += sum(load.bytes for load in loads) / counts.assumed("shared memory")
        found["L2"] = fetched / counts.assumed("L2 to multiprocessor")
        found["memory"] = self.kernel.memory_bytes / counts.assumed("memory of an H200")
        return {name: found[name] for name in RESOURCES if found[name]}


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
            fn, shapes = program_of(kernel.case)
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


def interpret(kernel: kernels.Kernel, compiled: Sequence[aot.KernelResources]) -> Reading:
    """Reads the main loops of a kernel from the kernels of a compiled program.

    Raises:
      ToolMissingError: ptxas or nvdisasm is missing.
      ModelError: the loops do not fit the kernel's protocol.
    """
    resources = next((found for found in compiled if found.name == kernel.symbol), None)
    if resources is None:
        raise model.ModelError(f"no {kernel.symbol} among {[found.name for found in compiled]}")
    function = disassembly.assemble(resources.ptx)
    paths = loops.main_loops(function)
    if any(role.fetches for role in kernel.protocol.roles):
        paths.append(loops.feeding_loop(function))
    cycles = {}
    for name in kernel.links:
        both = (dataclasses.replace(kernels.LINKS[name], round_robin=turns) for turns in (True, False))
        cycles[name] = tuple(model.simulate(paths, kernel.protocol, link) for link in both)
    traded = [int(i.args.split(",")[-1], 16) for i in function.instructions if i.op.startswith("USETMAXREG")]
    registers = "/".join(map(str, sorted(traded, reverse=True)))
    return Reading(kernel, resources.spill_bytes, registers, paths, cycles)


def tabulate(report: Report, readings: Sequence[Reading]) -> None:
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


def _lines(reading: Reading) -> Iterator[list[Cell]]:
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


def _waiting(reading: Reading) -> Iterator[list[Cell]]:
    for name, (turns, _) in reading.cycles.items():
        causes = [
            ", ".join(f"{cause} {cycles:,.0f}" for cause, cycles in waiting.most_common(4) if cycles >= 10)
            for waiting in turns.waiting
        ]
        yield [reading.kernel.name, name, *causes, *[""] * (3 - len(causes))]


if __name__ == "__main__":
    run(main)
