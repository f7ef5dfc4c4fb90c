"""What a compiled program sends: every collective with its bytes, how often it runs, and what hides it.

Everything is read from the text of the scheduled program. Bytes are those that leave one device in one step. An
all-to-all over g devices keeps 1/g of its buffer; rings send (g-1)/g of what they gather or scatter (twice for an
all-reduce). The program sends whole padded buffers, not only the rows that are filled.
"""

import dataclasses
import re
from collections.abc import Iterator

from tools.plan import hlo

KINDS = ("ragged-all-to-all", "all-to-all", "all-reduce", "all-gather", "reduce-scatter", "collective-permute")
_ROLES = ("dispatch", "combine")
LABELS = (
    "project",
    "router",
    "shared_expert",
    "experts",
    "dispatch",
    "combine",
    "head",
    "mlp",
    "attention",
    "eh_proj",
    "embed",
)
"""Names of `jax.named_scope` that tell the stages of a layer apart; the innermost one counts."""
_ELEMENTWISE_KERNELS = ("quantize", "mla_write")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program, seen from one device.

    `role` comes from `role_of`. Each run sends `node_bytes` to other devices of the node and `cross_bytes` to other
    nodes; `times` counts runs in a step. `started` and `done` are indices in the schedule of `computation` (equal
    where it is synchronous). `between` names the stages whose matrix products stand between the two: nothing else hides
    it.
    """

    name: str
    kind: str
    role: str
    micro_batch: int | None
    shape: str
    group_size: int
    node_bytes: int
    cross_bytes: int
    times: int
    computation: str
    started: int
    done: int
    between: tuple[str, ...]

    @property
    def is_hidden(self) -> bool:
        """Whether matrix work stands between start and done."""
        return bool(self.between)

    @property
    def step_bytes(self) -> int:
        """Bytes that leave the device in a step."""
        return self.times * (self.node_bytes + self.cross_bytes)


def collectives(module: hlo.Module, devices_per_node: int) -> tuple[Collective, ...]:
    """Returns every collective of a program, in the order it runs; devices are numbered node after node."""
    return tuple(_walk(module, module[module.entry], 1, devices_per_node))


def _walk(module: hlo.Module, computation: hlo.Computation, times: int, per_node: int) -> Iterator[Collective]:
    for index, instruction in enumerate(computation.instructions):
        if (core := core_of(module, instruction)) is not None:
            yield _collective(module, computation, index, core, times, per_node)
        elif instruction.opcode in ("while", "call", "conditional", "fusion", "async-start"):
            for name in instruction.called:
                yield from _walk(module, module[name], times * (instruction.trips or 1), per_node)


def core_of(module: hlo.Module, instruction: hlo.Instruction) -> hlo.Instruction | None:
    """Returns the collective that an instruction is or starts, bare or wrapped in a fusion; None for any other one."""
    if instruction.opcode.removesuffix("-start") in KINDS:
        return instruction
    if instruction.opcode not in ("fusion-start", "async-start", "fusion"):
        return None
    inner = (i for name in instruction.called for i in module[name].instructions)
    return next((i for i in inner if i.opcode in KINDS), None)


def _collective(
    module: hlo.Module,
    computation: hlo.Computation,
    index: int,
    core: hlo.Instruction,
    times: int,
    per_node: int,
) -> Collective:
    instruction = computation.instructions[index]
    kind = core.opcode.removesuffix("-start")
    group = hlo.replica_groups(core, module.num_partitions)[0]
    sent = _sent_bytes(kind, _operand_bytes(module, computation, instruction, core), len(group))
    others = len(group) - 1
    outside = sum(device // per_node != group[0] // per_node for device in group)
    cross = round(sent * outside / others) if others else 0
    done = done_of(computation, index)
    return Collective(
        name=instruction.name,
        kind=kind,
        role=role_of(instruction),
        micro_batch=instruction.micro_batch,
        shape=core.shape if core.opcode in KINDS else _result(core.shape),
        group_size=len(group),
        node_bytes=sent - cross,
        cross_bytes=cross,
        times=times,
        computation=computation.name,
        started=index,
        done=done,
        between=_between(module, computation, index, done),
    )


def _operand_bytes(
    module: hlo.Module, computation: hlo.Computation, instruction: hlo.Instruction, core: hlo.Instruction
) -> int:
    home = (
        computation
        if core is instruction
        else next(module[name] for name in instruction.called if core in module[name].instructions)
    )
    return sum(hlo.shape_bytes(home.by_name[name].shape) for name in core.operands)


def _sent_bytes(kind: str, operand: int, group: int) -> int:
    if kind == "all-gather":
        return operand * (group - 1)
    if kind == "collective-permute":
        return operand
    return (2 if kind == "all-reduce" else 1) * operand * (group - 1) // group


def done_of(computation: hlo.Computation, index: int) -> int:
    """Returns the index of the instruction that waits for the one at `index`; itself where it is synchronous."""
    instruction = computation.instructions[index]
    if not instruction.opcode.endswith("-start"):
        return index
    wanted = instruction.opcode.removesuffix("-start") + "-done"
    rest = enumerate(computation.instructions[index + 1 :], index + 1)
    found = (n for n, i in rest if i.opcode == wanted and instruction.name in i.operands)
    if (done := next(found, None)) is None:
        raise hlo.HloError(f"{instruction.name} is never waited for")
    return done


def _between(module: hlo.Module, computation: hlo.Computation, started: int, done: int) -> tuple[str, ...]:
    inside = computation.instructions[started + 1 : done]
    return tuple(dict.fromkeys(label_of(i) or "other" for i in inside if is_matrix_work(module, i)))


def is_matrix_work(module: hlo.Module, instruction: hlo.Instruction) -> bool:
    """Returns whether an instruction is a matrix product or an attention kernel, or a loop that runs one."""
    if instruction.opcode == "custom-call":
        is_kernel = any(target in instruction.attributes for target in ('"mosaic_gpu', '"__cublas', '"__triton'))
        return is_kernel and not any(word in instruction.op_name for word in _ELEMENTWISE_KERNELS)
    if instruction.opcode == "fusion":
        return any(i.opcode == "dot" for name in instruction.called for i in module[name].instructions)
    if instruction.opcode == "while" and instruction.trips is not None:
        return any(is_matrix_work(module, i) for name in instruction.called for i in module[name].instructions)
    return instruction.opcode in ("dot", "convolution")


def role_of(instruction: hlo.Instruction) -> str:
    """Returns the purpose of a collective: dispatch, combine, or the stage whose sum it completes."""
    roles = (scope for scope in reversed(instruction.scopes) if scope in _ROLES)
    return next(roles, label_of(instruction) or "other")


def label_of(instruction: hlo.Instruction) -> str | None:
    """Returns the stage of a layer that an instruction belongs to: the innermost of `LABELS` around it."""
    return next((scope for scope in reversed(instruction.scopes) if scope in LABELS), None)


def _result(shape: str) -> str:
    """Returns the result in the shape of a start, `((operands), results, ...)`."""
    arrays = re.findall(r"[a-z]\w*\[[\d,]*\]", shape)
    return arrays[-1] if arrays else shape
