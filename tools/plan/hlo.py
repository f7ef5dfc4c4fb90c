"""Parses the text of a compiled, scheduled HLO module: its instructions in order, and the bytes of its collectives.

It parses what planning needs of `jax.stages.Compiled.as_text()`. XLA promises no stability, so unknown text raises
`HloError`.

Bytes of a collective are those that leave one device. An all-to-all over g devices keeps 1/g of its buffer; rings send
(g-1)/g of what they gather or scatter (twice for an all-reduce). Padded buffers are sent whole.
"""

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np

ITEM_BITS = {"pred": 8, "token": 0}


class HloError(ValueError):
    """HLO text in an unknown form."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction: `shape` as text, operands by name, the `attributes` after them, and jax's name stack."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    op_name: str

    @functools.cached_property
    def scopes(self) -> tuple[str, ...]:
        """Parts of the name stack, outermost first."""
        return tuple(self.op_name.split("/"))

    @functools.cached_property
    def micro_batch(self) -> int | None:
        """The number N of the scope `micro_batch_N` around the instruction."""
        match = re.search(r"\bmicro_batch_(\d+)\b", self.op_name)
        return int(match[1]) if match else None

    @functools.cached_property
    def called(self) -> tuple[str, ...]:
        """Computations that this instruction runs, except a loop's condition."""
        found = re.findall(r"\b(?:calls|body|to_apply)=%?([\w.-]+)", self.attributes)
        branches = re.search(r"branch_computations=\{([^}]*)\}", self.attributes)
        return (*found, *(re.findall(r"%?([\w.-]+)", branches[1]) if branches else ()))

    @functools.cached_property
    def trips(self) -> int | None:
        """A loop's trip count; None if it depends on data."""
        match = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', self.attributes)
        return int(match[1]) if match else None


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions in scheduled order."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}


@dataclasses.dataclass(frozen=True)
class Module:
    """Computations by name, and the name of the entry."""

    computations: Mapping[str, Computation]
    entry: str
    num_partitions: int

    def __getitem__(self, name: str) -> Computation:
        return self.computations[name]

    @functools.cached_property
    def host_waits(self) -> tuple[str, ...]:
        """Names of the instructions at which the host copies data from the device to decide what runs next.

        These are conditionals and loops of unknown trip count. Each drains the queue of launched kernels, which ends
        the schedule's overlap in all processes of a mesh.
        """
        found = (i for computation in self.computations.values() for i in computation.instructions)
        return tuple(i.name for i in found if i.opcode == "conditional" or (i.opcode == "while" and i.trips is None))


def parse(text: str) -> Module:
    """Parses a module. Raises HloError if it is not scheduled or a line has an unknown form."""
    header, _, body = text.partition("\n")
    if not header.startswith("HloModule") or "is_scheduled=true" not in header:
        raise HloError(f"not a scheduled HLO module: {header[:100]!r}")
    computations: dict[str, Computation] = {}
    entry = ""
    for is_entry, computation in _computations(body):
        computations[computation.name] = computation
        entry = computation.name if is_entry else entry
    if not entry:
        raise HloError("the module has no ENTRY computation")
    if replicas := re.search(r"replica_count=(?!1\b)\d+", header):
        raise HloError(f"not one program over all devices: {replicas[0]}")
    partitions = re.search(r"num_partitions=(\d+)", header)
    return Module(computations, entry, int(partitions[1]) if partitions else 1)


def _computations(text: str) -> Iterator[tuple[bool, Computation]]:
    name, is_entry, instructions = "", False, list[Instruction]()
    for line in text.splitlines():
        if line.startswith("}"):
            yield is_entry, Computation(name, tuple(instructions))
        elif (start := re.match(r"(ENTRY )?%?([\w.-]+) .*\{$", line)) and not line.startswith(" "):
            name, is_entry, instructions = start[2], bool(start[1]), []
        elif line.startswith("  "):
            instructions.append(_instruction(line))


_NAME = re.compile(r"\s*(?:ROOT )?%?([\w.-]+) = ")


def _instruction(line: str) -> Instruction:
    start = _NAME.match(line)
    if not start:
        raise HloError(f"not an instruction: {line[:100]!r}")
    shape_end = _end_of_shape(line, start.end())
    open_at = line.index("(", shape_end)
    close_at = _closing(line, open_at)
    operands = re.findall(r"%([\w.-]+)", line[open_at:close_at])
    rest = line[close_at + 1 :]
    return Instruction(
        name=start[1],
        shape=line[start.end() : shape_end],
        opcode=line[shape_end:open_at].strip(),
        operands=tuple(operands),
        attributes=rest.partition("backend_config=")[0] if _KERNEL in rest else rest,
        op_name=_between(rest, 'op_name="', '"'),
    )


_KERNEL = 'custom_call_target="mosaic'  # whose backend_config is 100 kB of program


def _between(text: str, before: str, after: str) -> str:
    start = text.find(before)
    return "" if start < 0 else text[start + len(before) :].partition(after)[0]


def _end_of_shape(line: str, start: int) -> int:
    return _closing(line, start) + 1 if line[start] == "(" else line.index(" ", start)


def _closing(line: str, start: int) -> int:
    """Returns the index of the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(line, start):
        depth += 1 if match[0] == "(" else -1
        if not depth:
            return match.start()
    raise HloError(f"unbalanced parentheses: {line[:100]!r}")


def replica_groups(instruction: Instruction, num_partitions: int) -> tuple[tuple[int, ...], ...]:
    """Returns the device groups of a collective, or the pairs (from, to) of a permutation."""
    text = instruction.attributes
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", text):
        return _mesh_groups(dict(re.findall(r"'(\w+)'=(\d+)", match[1])), re.findall(r"'(\w+)'", match[2]))
    if match := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}", text):
        return tuple(map(_numbers, re.findall(r"\d[\d,]*", match[1])))
    if match := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        sizes, order = _numbers(match[3]), _numbers(match[4]) if match[4] else None
        ids = np.arange(math.prod(sizes)).reshape(sizes).transpose(order)
        return tuple(map(tuple, ids.reshape(int(match[1]), int(match[2])).tolist()))
    if "replica_groups={}" in text:
        return (tuple(range(num_partitions)),)
    raise HloError(f"{instruction.name}: unknown form of replica groups: {text[:200]!r}")


def _mesh_groups(sizes: Mapping[str, str], grouped: list[str]) -> tuple[tuple[int, ...], ...]:
    """Returns the devices of a mesh, numbered along its axes, in groups along the `grouped` axes."""
    shape, axes = list(map(int, sizes.values())), [list(sizes).index(name) for name in grouped]
    ids = np.moveaxis(np.arange(math.prod(shape)).reshape(shape), axes, range(-len(axes), 0))
    groups = np.sort(ids.reshape(-1, math.prod(shape[axis] for axis in axes)))
    return tuple(map(tuple, groups.tolist()))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def shape_bytes(shape: str) -> int:
    """Returns the bytes of an array, or of all arrays of a tuple."""
    return sum(_array_bytes(dtype, dims) for dtype, dims in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", shape))


def _array_bytes(dtype: str, dims: str) -> int:
    items = math.prod(int(n) for n in dims.split(",") if n)
    return -(-items * item_bits(dtype) // 8)


def item_bits(dtype: str) -> int:
    """Returns the bits of one element: "bf16" has 16, "f8e4m3fn" 8."""
    if dtype in ITEM_BITS:
        return ITEM_BITS[dtype]
    match = re.match(r"[a-z]+(\d+)", dtype)
    if not match:
        raise HloError(f"unknown element type {dtype!r}")
    return int(match[1])


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
    "mixing",
)
"""Names of `jax.named_scope` of the stages of a layer; the innermost one applies."""
_ELEMENTWISE_KERNELS = ("quantize", "mla_write")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program, seen from one device.

    `role` is that of `collective_role`. Each run sends `node_bytes` to other devices of the node and `cross_bytes` to
    other nodes; `times` counts runs in a step. `started` and `done` are indices in the schedule of `computation`, equal
    if it is synchronous. `between` names the stages whose matrix products run between the two and hide it.
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
        """Whether matrix work runs between start and done."""
        return bool(self.between)

    @property
    def step_bytes(self) -> int:
        """Bytes that leave the device in a step."""
        return self.times * (self.node_bytes + self.cross_bytes)


def collectives(module: Module, devices_per_node: int) -> tuple[Collective, ...]:
    """Returns the collectives of a program in the order of execution; devices are numbered node after node."""
    return tuple(_walk(module, module[module.entry], 1, devices_per_node))


def _walk(module: Module, computation: Computation, times: int, per_node: int) -> Iterator[Collective]:
    for index, instruction in enumerate(computation.instructions):
        if (core := collective_in(module, instruction)) is not None:
            yield _collective(module, computation, index, core, times, per_node)
        elif instruction.opcode in ("while", "call", "conditional", "fusion", "async-start"):
            for name in instruction.called:
                yield from _walk(module, module[name], times * (instruction.trips or 1), per_node)


def collective_in(module: Module, instruction: Instruction) -> Instruction | None:
    """Returns the collective that an instruction is or starts, bare or in a fusion; None for other instructions."""
    if instruction.opcode.removesuffix("-start") in KINDS:
        return instruction
    if instruction.opcode not in ("fusion-start", "async-start", "fusion"):
        return None
    inner = (i for name in instruction.called for i in module[name].instructions)
    return next((i for i in inner if i.opcode in KINDS), None)


def _collective(
    module: Module,
    computation: Computation,
    index: int,
    core: Instruction,
    times: int,
    per_node: int,
) -> Collective:
    instruction = computation.instructions[index]
    kind = core.opcode.removesuffix("-start")
    group = replica_groups(core, module.num_partitions)[0]
    sent = _sent_bytes(kind, _operand_bytes(module, computation, instruction, core), len(group))
    others = len(group) - 1
    outside = sum(device // per_node != group[0] // per_node for device in group)
    cross = round(sent * outside / others) if others else 0
    done = done_index(computation, index)
    return Collective(
        name=instruction.name,
        kind=kind,
        role=collective_role(instruction),
        micro_batch=instruction.micro_batch,
        shape=core.shape if core.opcode in KINDS else _result(core.shape),
        group_size=len(group),
        node_bytes=sent - cross,
        cross_bytes=cross,
        times=times,
        computation=computation.name,
        started=index,
        done=done,
        between=_work_between(module, computation, index, done),
    )


def _operand_bytes(module: Module, computation: Computation, instruction: Instruction, core: Instruction) -> int:
    home = (
        computation
        if core is instruction
        else next(module[name] for name in instruction.called if core in module[name].instructions)
    )
    return sum(shape_bytes(home.by_name[name].shape) for name in core.operands)


def _sent_bytes(kind: str, operand: int, group: int) -> int:
    if kind == "all-gather":
        return operand * (group - 1)
    if kind == "collective-permute":
        return operand
    return (2 if kind == "all-reduce" else 1) * operand * (group - 1) // group


def done_index(computation: Computation, index: int) -> int:
    """Returns the index of the instruction that waits for the one at `index`; `index` if that is synchronous."""
    instruction = computation.instructions[index]
    if not instruction.opcode.endswith("-start"):
        return index
    wanted = instruction.opcode.removesuffix("-start") + "-done"
    rest = enumerate(computation.instructions[index + 1 :], index + 1)
    found = (n for n, i in rest if i.opcode == wanted and instruction.name in i.operands)
    if (done := next(found, None)) is None:
        raise HloError(f"{instruction.name} has no {wanted}")
    return done


def _work_between(module: Module, computation: Computation, started: int, done: int) -> tuple[str, ...]:
    inside = computation.instructions[started + 1 : done]
    return tuple(dict.fromkeys(stage_label(i) or "other" for i in inside if is_matrix_work(module, i)))


def is_matrix_work(module: Module, instruction: Instruction) -> bool:
    """Returns whether an instruction is a matrix product, an attention kernel, or a loop with one."""
    if instruction.opcode == "custom-call":
        is_kernel = any(target in instruction.attributes for target in ('"mosaic_gpu', '"__cublas', '"__triton'))
        return is_kernel and not any(word in instruction.op_name for word in _ELEMENTWISE_KERNELS)
    if instruction.opcode == "fusion":
        return any(i.opcode == "dot" for name in instruction.called for i in module[name].instructions)
    if instruction.opcode == "while" and instruction.trips is not None:
        return any(is_matrix_work(module, i) for name in instruction.called for i in module[name].instructions)
    return instruction.opcode in ("dot", "convolution")


_NO_KERNEL = (
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "opt-barrier",
    "partition-id",
)


def kernels(module: Module) -> dict[str, int]:
    """Returns how many kernels and collectives a program launches, by stage; of a conditional those of all branches."""
    counts = Counter[str]()
    for instruction, times in launches(module):
        counts[stage_label(instruction) or "other"] += times
    return dict(counts)


def launches(module: Module) -> Iterator[tuple[Instruction, int]]:
    """Yields the instructions of a program that launch a kernel or a collective, and how often; see `kernels`."""
    yield from _launches(module, module[module.entry], 1)


def _launches(module: Module, computation: Computation, times: int) -> Iterator[tuple[Instruction, int]]:
    for instruction in computation.instructions:
        opcode = instruction.opcode
        if opcode in ("while", "conditional", "call"):
            for name in instruction.called:
                yield from _launches(module, module[name], times * (instruction.trips or 1))
        elif opcode not in _NO_KERNEL and not opcode.endswith("-done"):
            yield instruction, times


def collective_role(instruction: Instruction) -> str:
    """Returns the purpose of a collective: dispatch, combine, or the stage that it is part of."""
    roles = (scope for scope in reversed(instruction.scopes) if scope in _ROLES)
    return next(roles, stage_label(instruction) or "other")


def stage_label(instruction: Instruction) -> str | None:
    """Returns the stage of a layer that an instruction belongs to: the innermost of `LABELS` around it."""
    return next((scope for scope in reversed(instruction.scopes) if scope in LABELS), None)


def _result(shape: str) -> str:
    """Returns the result in the shape of a start, `((operands), results, ...)`."""
    arrays = re.findall(r"[a-z]\w*\[[\d,]*\]", shape)
    return arrays[-1] if arrays else shape
