"""Checks for deadlocks: in which order a compiled program launches its collectives, and how many are in flight at once.

Devices deadlock if they launch two collectives in different orders, or if collectives in flight need more channels than
are free. All devices run one program, so its text proves that they cannot, if:

- Each device runs each collective equally often: none is in a conditional, in a loop whose trip count depends on data,
  or in a computation that this reader does not reach.
- Each device is in exactly one group of each collective, so it and its peers use one communicator.
- Each start has one done, later in the same pass of the same computation, so nothing is in flight at its end.
- Each instruction reads only earlier ones, so the listed order is the order of launches.

On all devices of this executable the launches of a communicator are then a subsequence of `LaunchOrder.launches`.
Processes compile for themselves; compare the `launches` of their texts.
"""

import dataclasses

from tools.plan import hlo
from tools.plan.hlo import KINDS, collective_in

_OTHERS = ("send", "recv", "collective-broadcast")  # these block on peers too, but no program of ours has any
_RUN = ("call", "fusion", "async-start", "fusion-start")

Groups = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Launch:
    """One collective: its kind, device groups, shape, operation, and the trip counts of the loops around it."""

    kind: str
    groups: Groups
    shape: str
    op_name: str
    trips: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class LaunchOrder:
    """Collectives in the order of their launches, and the most collectives and communicators in flight at once.

    `channels` are NCCL's of these communicators together, 0 if unbounded. `faults` are sentences; none means that the
    order is the same on all devices and everything in flight is within its limits.
    """

    launches: tuple[Launch, ...]
    in_flight: int
    communicators: int
    channels: int
    faults: tuple[str, ...]


def launch_order(module: hlo.Module, max_in_flight: int = 1, channels: int = 0, reserved: int = 0) -> LaunchOrder:
    """Returns the launch order of a program that may have `max_in_flight` collectives in flight.

    Each communicator takes `channels` of the `reserved` multiprocessors that kernels leave free; 0 means unbounded.
    """
    reader = _LaunchReader(module)
    reader.read(module[module.entry], "", ())
    reader.check_unreached()
    taken, faults = channels * reader.communicators, list(dict.fromkeys(reader.faults))
    if reader.in_flight > max_in_flight:
        faults.append(f"{reader.in_flight} collectives are in flight at once, more than {max_in_flight}")
    if reserved and taken > reserved:
        communicators = f"{reader.communicators} communicators in flight at once take {channels} channels each"
        faults.append(f"{communicators}, more than the {reserved} multiprocessors reserved for them")
    return LaunchOrder(tuple(reader.launches), reader.in_flight, reader.communicators, taken, tuple(faults))


class _LaunchReader:
    """Walks through a program in the order of execution."""

    def __init__(self, module: hlo.Module) -> None:
        self._module = module
        self._reached: set[str] = set()
        self._started: dict[str, tuple[str, Groups] | None] = {}
        self.launches: list[Launch] = []
        self.faults: list[str] = []
        self.in_flight = self.communicators = 0

    def read(self, computation: hlo.Computation, condition: str, trips: tuple[int, ...]) -> None:
        """Reads a computation inside loops of `trips`; `condition` names what decides whether it runs, if anything."""
        self._reached.add(computation.name)
        before, known = set(self._started), set[str]()
        for instruction in computation.instructions:
            operands = [name for name in instruction.operands if name in computation.by_name]
            if undefined := [name for name in operands if name not in known]:
                self.faults.append(f"{instruction.name} reads {undefined[0]}, which comes later")
            known.add(instruction.name)
            if (core := collective_in(self._module, instruction)) is not None:
                self._launch(instruction, core, condition, trips)
            elif instruction.opcode.endswith("-done"):
                self._finish(computation, instruction)
            elif instruction.opcode in _OTHERS:
                self.faults.append(f"{instruction.name}: {instruction.opcode} is not supported")
            else:
                self._descend(instruction, condition, trips)
        for name in self._started.keys() - before:
            self.faults.append(f"{name} has no done in {computation.name}")
            del self._started[name]

    def check_unreached(self) -> None:
        """Records a fault for each collective in computations that were not read, such as a loop's condition."""
        for computation in self._module.computations.values():
            if computation.name not in self._reached:
                found = (i for i in computation.instructions if i.opcode.removesuffix("-start") in (*KINDS, *_OTHERS))
                self.faults += [f"{i.name} in {computation.name}: it is unknown how often it runs" for i in found]

    def _descend(self, instruction: hlo.Instruction, condition: str, trips: tuple[int, ...]) -> None:
        if instruction.opcode == "while":
            if instruction.trips is None:
                condition = f"in the loop {instruction.name}, whose trip count depends on data"
            trips = (*trips, instruction.trips or 0)
        elif instruction.opcode == "conditional":
            condition = f"under the condition {instruction.name}"
        elif instruction.opcode not in _RUN:
            return
        for name in instruction.called:
            self.read(self._module[name], condition, trips)

    def _launch(
        self, instruction: hlo.Instruction, core: hlo.Instruction, condition: str, trips: tuple[int, ...]
    ) -> None:
        kind, groups = core.opcode.removesuffix("-start"), hlo.replica_groups(core, self._module.num_partitions)
        if condition:
            self.faults.append(f"{instruction.name} runs {condition}: other devices may skip it")
        if fault := _group_fault(kind, groups, self._module.num_partitions):
            self.faults.append(f"{instruction.name}: {fault}")
        if core is not instruction:
            self._check_wrapped(instruction)
        self.launches.append(Launch(kind, groups, core.shape, instruction.op_name, trips))
        self._started[instruction.name] = _communicator(kind, groups)
        self.in_flight = max(self.in_flight, len(self._started))
        self.communicators = max(self.communicators, len(set(self._started.values()) - {None}))
        if not instruction.opcode.endswith("-start"):
            del self._started[instruction.name]

    def _check_wrapped(self, instruction: hlo.Instruction) -> None:
        self._reached |= set(instruction.called)
        inner = [i for name in instruction.called for i in self._module[name].instructions]
        if sum(i.opcode in KINDS for i in inner) > 1:
            self.faults.append(f"{instruction.name} launches several collectives at once")

    def _finish(self, computation: hlo.Computation, instruction: hlo.Instruction) -> None:
        started = next((name for name in instruction.operands if name in self._started), None)
        if started is not None:
            del self._started[started]
            return
        starts = (computation.by_name.get(name) for name in instruction.operands)
        others = any(start is not None and collective_in(self._module, start) is None for start in starts)
        if not others:
            self.faults.append(f"{instruction.name} waits for no collective in flight")


def _communicator(kind: str, groups: Groups) -> tuple[str, Groups] | None:
    """Returns a key of a collective's communicator; None if no device has a peer.

    XLA creates one per group of devices, and one of all devices for permutations, which are sends and receives.
    """
    if kind == "collective-permute":
        return kind, ()
    return ("", tuple(sorted(groups))) if any(len(group) > 1 for group in groups) else None


def _group_fault(kind: str, groups: Groups, devices: int) -> str:
    """Returns an error text unless every device is in one group, or sends and receives at most once; else ""."""
    if kind == "collective-permute":
        for side, which in enumerate(("sends", "receives")):
            ends = [pair[side] for pair in groups]
            if twice := {device for device in ends if ends.count(device) > 1}:
                return f"device {min(twice)} {which} twice"
        return ""
    members = [device for group in groups for device in group]
    if twice := {device for device in members if members.count(device) > 1}:
        return f"device {min(twice)} is in several of its groups"
    if missing := set(range(devices)) - set(members):
        return f"device {min(missing)} is in none of its groups"
    return ""
