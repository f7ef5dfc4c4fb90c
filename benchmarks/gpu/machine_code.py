"""Reads the main loops of the kernels from their machine code, and says in a model what binds them. No GPU is needed.

    JAX_PLATFORMS=cpu python -m benchmarks.gpu.machine_code [--only 'decode|dense|window'] [--multiprocessors 78]

Compiles each kernel at production shapes for sm_90a, disassembles it (ptxas and nvdisasm of the `aot` extra) and
reports for each main loop: instructions by class, stall counts, registers, shared memory, arrivals, bounds by resource,
and cycles from a small model whose assumptions stand at the top. Beside them stand stored figures of FlashMLA, DeepGEMM
and FlashAttention-3, made the same way (`sass/others.json` says from what).

Nothing here is a measured time. docs/performance/machine_code.md says what the figures mean.
"""

import dataclasses
import functools
import json
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.gpu import triton_kernels
from benchmarks.gpu.sass import ceilings, counts, disassembly, kernels, listed, loops, model
from benchmarks.record import Cell, Report, arguments, run
from pallas_kernels import aot
from pallas_kernels.mosaic import NUM_SMS
from pallas_kernels.multiprocessors import Multiprocessors, taking

RESOURCES = ("tensor core", "shared memory", "issue", "exp2", "L2", "memory")
OTHERS = json.loads((Path(__file__).parent / "sass" / "others.json").read_text())


@dataclasses.dataclass(frozen=True)
class Reading:
    """What was read from one kernel.

    Attributes:
      kernel: which.
      resources: as ptxas reports them.
      registers: of the warpgroups after they traded, as "240/24".
      roles: the work of a pass, of each kind of computing warpgroup.
      cycles: by link, under round robin and under first come first served.
    """

    kernel: kernels.Kernel
    resources: aot.KernelResources
    registers: str
    roles: tuple[counts.Work, ...]
    cycles: dict[str, tuple[model.Modelled, model.Modelled]]

    @property
    def both(self) -> counts.Work:
        """The work of the warpgroups that the model runs: two that compute, and one that feeds them if it computes."""
        roles = self.roles * len(self.kernel.protocol.roles) if len(self.roles) == 1 else self.roles
        return functools.reduce(operator.add, roles)

    def bounds(self) -> dict[str, float]:
        """Returns the cycles that a pass takes at least, by resource."""
        loads, both = self.kernel.protocol.loads, self.both
        written, fetched = sum(load.bytes for load in loads), sum(load.fetched for load in loads)
        if any(role.fetches for role in self.kernel.protocol.roles):
            fetched += both.global_bytes
        found = {
            "tensor core": both.tensor_cycles,
            "shared memory": (both.operand_bytes + both.shared_bytes + written) / model.assumed("shared memory"),
            "issue": both.instructions,
            "exp2": both.classes.get("exp2", 0) * model.assumed("exp2 per warp"),
            "L2": fetched / model.assumed("L2 to multiprocessor"),
            "memory": self.kernel.memory_bytes / kernels.memory_rate(),
        }
        return {name: cycles for name, cycles in found.items() if cycles}


def main(report: Report) -> int:
    args = arguments(__doc__, only="", multiprocessors=NUM_SMS)
    by_name, triton = {kernel.name: kernel for kernel in kernels.kernels()}, triton_kernels.cases()
    every = [*by_name, *listed.names(triton)]
    names = [name for name in every if any(each in name for each in args.only.split("|"))]
    if not names:
        print(f"no kernel is called {args.only!r}: {every}", file=sys.stderr)
        return 2
    with taking(Multiprocessors(args.multiprocessors)):
        try:
            if chosen := [_said(read(by_name[name])) for name in names if name in by_name]:
                tabulate(report, chosen)
            if others := [name for name in names if name in triton]:
                report.table(listed.TITLE, listed.HEAD, listed.rows(triton, others, OTHERS))
        except (aot.AotUnavailableError, disassembly.ToolMissingError) as error:
            print(error, file=sys.stderr)
            return 2
    return 0


def read(kernel: kernels.Kernel) -> Reading:
    """Compiles a kernel and reads its main loops.

    Raises:
      AotUnavailableError, ToolMissingError: something of the `aot` extra is missing.
      ModelError: the loops do not fit the kernel's protocol.
    """
    fn, arguments = kernel.program()
    return interpret(kernel, aot.kernel_resources(fn, *arguments))


def interpret(kernel: kernels.Kernel, compiled: Sequence[aot.KernelResources]) -> Reading:
    """Reads the main loops of a kernel from a program that has been compiled; errors as in `read`."""
    resources = next((found for found in compiled if found.name == kernel.symbol), None)
    if resources is None:
        raise model.ModelError(f"no {kernel.symbol} among {[found.name for found in compiled]}")
    function = disassembly.assemble(resources.ptx)
    paths = loops.main_loops(function)
    if any(role.fetches for role in kernel.protocol.roles):
        paths.append(loops.feeding_loop(function))

    def run(link: str, round_robin: bool) -> model.Modelled:
        return model.simulate(paths, kernel.protocol, kernels.link(link, round_robin=round_robin))

    cycles = {link: (run(link, True), run(link, False)) for link in kernel.links}
    return Reading(kernel, resources, _registers(function), tuple(map(counts.work, paths)), cycles)


def _registers(function: disassembly.Function) -> str:
    traded = [int(i.args.split(",")[-1], 16) for i in function.instructions if i.op.startswith("USETMAXREG")]
    return "/".join(map(str, sorted(traded, reverse=True)))


def _said(reading: Reading) -> Reading:
    print(f"read {reading.kernel.name}", file=sys.stderr, flush=True)
    return reading


def tabulate(report: Report, readings: Sequence[Reading]) -> None:
    """Reports what the model assumes, what the loops hold, and what they take in the model."""

    def rows(of: Callable[[Reading], Iterator[Sequence[Cell]]]) -> Iterator[Sequence[Cell]]:
        return (row for reading in readings for row in of(reading))

    assumed = ((name, f"{a.value:g}", a.unit, a.where_from) for name, a in model.ASSUMPTIONS.items())
    report.detail("What the model assumes", ["assumption", "value", "unit", "where from"], assumed)
    columns = ["kernel", "a pass", "instructions", "stall counts", "registers", "spilled bytes", "TMA arrivals"]
    report.detail("Main loops", columns, rows(_loop_rows))
    _class_table(report, readings)
    columns = ["kernel", *RESOURCES, "link", "cycles", "tensor use", "theirs / ours"]
    report.table("Bounds and modelled cycles of a pass", columns, rows(_cycle_rows))
    columns = ["kernel", "link", "warpgroup 0", "warpgroup 1", "warpgroup 2, where it dequantizes"]
    report.detail("What each warpgroup waits for, in cycles of a pass (round robin)", columns, rows(_waiting_rows))
    if any(reading.kernel.passes == kernels.PRODUCT_PASS for reading in readings):
        report.table("Ceilings of FP8 products, as shares of the tensor core's rate", ceilings.HEAD,
                     ceilings.rows(OTHERS["tiles"]))  # fmt: skip
    sources = ((name, source) for name, source in OTHERS["sources"].items())
    report.detail(f"Whose the stored figures are. {OTHERS['about']}", ["name", "source"], sources)


def _loop_rows(reading: Reading) -> Iterator[tuple]:
    kernel, numbers = reading.kernel, reading.resources
    yield (
        kernel.name,
        kernel.passes,
        " + ".join(str(work.instructions) for work in reading.roles),
        " + ".join(str(work.stalls) for work in reading.roles),
        reading.registers,
        numbers.spill_bytes,
        len({load.full for load in kernel.protocol.loads}),
    )
    if kernel.other is not None:
        loop = OTHERS["loops"][kernel.other]
        yield (
            f"*{kernel.other}*",
            loop["pass"],
            " + ".join(map(str, loop["instructions"])),
            " + ".join(map(str, loop["stalls"] or ())),
            loop["registers"] or "",
            loop["spill_bytes"],
            loop["arrivals"] or "",
        )


def _class_table(report: Report, readings: Sequence[Reading]) -> None:
    rows = [(reading, number, work) for reading in readings for number, work in enumerate(reading.roles)]
    names = [name for name, _ in counts.CLASSES] + ["other"]
    used = [name for name in names if any(work.classes.get(name) for _, _, work in rows)]
    lines = (
        (f"{reading.kernel.name}, {number}", *(work.classes.get(name, 0) for name in used))
        for reading, number, work in rows
    )
    report.detail("Instructions by class, per warp and pass", ["kernel, warpgroup", *used], lines)


def _cycle_rows(reading: Reading) -> Iterator[tuple]:
    kernel, bounds = reading.kernel, reading.bounds()
    binding = max(bounds, key=bounds.__getitem__)
    cells = [_bound(bounds.get(name), name == binding) for name in RESOURCES]
    other = OTHERS["loops"][kernel.other] if kernel.other is not None else {"cycles": {}, "bounds": {}}
    for name, runs in reading.cycles.items():
        theirs = other["cycles"].get(name)
        yield (
            kernel.name,
            *cells,
            name,
            " / ".join(f"{run.cycles:,.0f}" for run in runs),
            " / ".join(f"{run.utilisation:.0%}" for run in runs),
            _ratio(reading, runs, other, theirs),
        )
    for name, theirs in other["cycles"].items():
        tensor = other["bounds"]["tensor core"]
        yield (
            f"*{kernel.other}*",
            *(_bound(other["bounds"].get(resource), False) for resource in RESOURCES),
            name,
            " / ".join(f"{cycles:,}" for cycles in theirs),
            " / ".join(f"{tensor / cycles:.0%}" for cycles in theirs),
            "",
        )


def _ratio(reading: Reading, runs, other: dict, theirs: list[float] | None) -> str:
    """Returns their cycles for the same work over ours, round robin and first come: above 1 ours is faster.

    The work is products; where reading weights is the limit (`reads_as_much`) a pass is as much work as a pass.
    """
    if theirs is None:
        return ""
    share = 1 if other.get("reads_as_much") else reading.both.tensor_cycles / other["bounds"]["tensor core"]
    return " / ".join(f"{cycles * share / run.cycles:.2f}" for cycles, run in zip(theirs, runs, strict=True))


def _bound(cycles: float | None, binds: bool) -> str:
    if cycles is None:
        return ""
    return f"**{cycles:,.0f}**" if binds else f"{cycles:,.0f}"


def _waiting_rows(reading: Reading) -> Iterator[tuple]:
    for name, (turns, _) in reading.cycles.items():
        causes = [_longest(waiting) for waiting in turns.waiting]
        yield (reading.kernel.name, name, *causes, *[""] * (3 - len(causes)))


def _longest(waiting: dict[str, float]) -> str:
    causes = sorted(waiting.items(), key=lambda item: -item[1])
    return ", ".join(f"{cause} {cycles:,.0f}" for cause, cycles in causes[:4] if cycles >= 10)


if __name__ == "__main__":
    run(main)
