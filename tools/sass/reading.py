"""What the machine code of a kernel says: the instructions of its main loops, their bounds by resource, their cycles.

`OTHERS` has stored figures of FlashMLA, DeepGEMM and FlashAttention-3, made the same way; it says from what.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from pallas_kernels import aot
from tools.sass import counts, disassembly, loops
from tools.sass.kernels import LINKS, SassKernel
from tools.sass.model import ModelError, Modelled, simulate

RESOURCES = ("tensor core", "shared memory", "issue", "exp2", "L2", "memory")
OTHERS = json.loads((Path(__file__).parent / "others.json").read_text())


@dataclasses.dataclass(frozen=True)
class KernelReading:
    """What was read from one kernel.

    Attributes:
      kernel: which.
      spill_bytes: as ptxas reports them.
      registers: of the warpgroups after they traded, as "240/24".
      paths: the instructions of a pass, of each kind of computing warpgroup.
      cycles: by link, under round robin and under first come first served.
    """

    kernel: SassKernel
    spill_bytes: int
    registers: str
    paths: list[loops.Code]
    cycles: dict[str, tuple[Modelled, ...]]

    def bounds(self) -> dict[str, float]:
        """Returns the cycles that a pass takes at least, by resource."""
        loads, roles = self.kernel.protocol.loads, self.kernel.protocol.roles
        warpgroups = [counts.resources(path) for path in self.paths * (len(roles) // len(self.paths))]
        found = {name: sum(each[name] for each in warpgroups) for name in warpgroups[0]}
        fetched = sum(load.fetched for load in loads)
        if any(role.fetches for role in roles):
            fetched += sum(counts.global_bytes(i) for path in self.paths for i in path if counts.is_global(i))
        found["shared memory"] += sum(load.bytes for load in loads) / counts.assumed("shared memory")
        found["L2"] = fetched / counts.assumed("L2 to multiprocessor")
        found["memory"] = self.kernel.memory_bytes / counts.assumed("memory of an H200")
        return {name: found[name] for name in RESOURCES if found[name]}


def interpret(kernel: SassKernel, compiled: Sequence[aot.KernelResources]) -> KernelReading:
    """Reads the main loops of a kernel from the kernels of a compiled program.

    Raises:
      ToolMissingError: ptxas or nvdisasm is missing.
      ModelError: the loops do not fit the kernel's protocol.
    """
    resources = next((found for found in compiled if found.name == kernel.symbol), None)
    if resources is None:
        raise ModelError(f"no {kernel.symbol} among {[found.name for found in compiled]}")
    function = disassembly.assemble(resources.ptx)
    paths = loops.main_loops(function)
    if any(role.fetches for role in kernel.protocol.roles):
        paths.append(loops.feeding_loop(function))
    cycles = {}
    for name in kernel.links:
        both = (dataclasses.replace(LINKS[name], round_robin=turns) for turns in (True, False))
        cycles[name] = tuple(simulate(paths, kernel.protocol, link) for link in both)
    traded = [int(i.args.split(",")[-1], 16) for i in function.instructions if i.op.startswith("USETMAXREG")]
    registers = "/".join(map(str, sorted(traded, reverse=True)))
    return KernelReading(kernel, resources.spill_bytes, registers, paths, cycles)
