"""The order in which a compiled program launches its collectives, and how many are in flight at once.

Devices that meet two collectives in different orders wait for each other for ever, and so do collectives that find no
room beside each other. All devices run one program, so its text shows that they cannot:

- Each device reaches each collective equally often. None stands under a condition or in a loop whose passes only the
  data tell, nor where this reader does not get to.
- Each device is in one group of each collective, so it has one communicator for it, which its peers have too.
- What starts is done once, later in the same pass of the same computation. So nothing is in flight at its end.
- Each instruction reads what stands before it. So the listed order is the one in which the host launches.

The launches of a communicator are then a part of one sequence, `LaunchOrder.launches`, on all devices that run this
executable. It says nothing of others: processes compile for themselves, and `launches` of two texts can be compared.
"""

import dataclasses

from tools.plan import hlo
from tools.plan.hlo import KINDS, core_of

_OTHERS = ("send", "recv", "collective-broadcast")  # peers meet in these too, but no program of ours has any
_RUN = ("call", "fusion", "async-start", "fusion-start")

Groups = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Launch:
    """One collective: what it is, among whom, of which operation, and the trips of the loops around it."""

    kind: str
    groups: Groups
    shape: str
    op_name: str
    trips: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class LaunchOrder:
    """The collectives in the order of their launches, and the most of them, and of their communicators, in flight.

    `channels` are NCCL's of these communicators together, 0 where nothing bounds them. `faults` are sentences: empty
    where the order is the same on all devices, and all that is in flight fits its limits.
    """

    launches: tuple[Launch, ...]
    in_flight: int
    communicators: int
    channels: int
    faults: tuple[str, ...]


def launch_order(module: hlo.Module, most: int = 1, channels: int = 0, reserved: int = 0) -> LaunchOrder:
    """Reads a program that may have `most` collectives in flight.

    Each communicator takes `channels` multiprocessors, of the `reserved` ones that the program's kernels leave; 0 says
    that nothing bounds the one, or that kernels leave none.
    """
    reader = _Flow(module)
    reader.read(module[module.entry], "", ())
    reader.find_unreached()
    taken, faults = channels * reader.communicators, list(dict.fromkeys(reader.faults))
    if reader.in_flight > most:
        faults.append(f"{reader.in_flight} collectives are in flight at once, more than {most}")
    if reserved and taken > reserved:
        communicators = f"{reader.communicators} communicators in flight at once take {channels} channels each"
        faults.append(f"{communicators}, more than the {reserved} multiprocessors that are left to them")
    return LaunchOrder(tuple(reader.launches), reader.in_flight, reader.communicators, taken, tuple(faults))


class _Flow:
    """Walks through what a program runs, in its order."""

    def __init__(self, module: hlo.Module) -> None:
        self._module = module
        self._reached: set[str] = set()
        self._flying: dict[str, tuple[str, Groups] | None] = {}
        self.launches: list[Launch] = []
        self.faults: list[str] = []
        self.in_flight = self.communicators = 0

    def read(self, computation: hlo.Computation, doubt: str, trips: tuple[int, ...]) -> None:
        """Reads a computation, around which stand loops of `trips`; `doubt` says what decides whether it runs."""
        self._reached.add(computation.name)
        flying_before, known = set(self._flying), set[str]()
        for instruction in computation.instructions:
            if late := [name for name in instruction.operands if name in computation.by_name and name not in known]:
                self.faults.append(f"{instruction.name} reads {late[0]}, which stands behind it")
            known.add(instruction.name)
            if (core := core_of(self._module, instruction)) is not None:
                self._launch(instruction, core, doubt, trips)
            elif instruction.opcode.endswith("-done"):
                self._finish(computation, instruction)
            elif instruction.opcode in _OTHERS:
                self.faults.append(f"{instruction.name}: {instruction.opcode} is not understood")
            else:
                self._descend(instruction, doubt, trips)
        for name in self._flying.keys() - flying_before:
            self.faults.append(f"{name} is never waited for in {computation.name}")
            del self._flying[name]

    def find_unreached(self) -> None:
        """Notes collectives in computations that were not read, such as the condition of a loop."""
        for computation in self._module.computations.values():
            if computation.name not in self._reached:
                found = (i for i in computation.instructions if i.opcode.removesuffix("-start") in (*KINDS, *_OTHERS))
                self.faults += [f"{i.name} in {computation.name}: nothing says how often it runs" for i in found]

    def _descend(self, instruction: hlo.Instruction, doubt: str, trips: tuple[int, ...]) -> None:
        if instruction.opcode == "while":
            if instruction.trips is None:
                doubt = f"in the loop {instruction.name}, whose passes depend on data"
            trips = (*trips, instruction.trips or 0)
        elif instruction.opcode == "conditional":
            doubt = f"under the condition {instruction.name}"
        elif instruction.opcode not in _RUN:
            return
        for name in instruction.called:
            self.read(self._module[name], doubt, trips)

    def _launch(self, instruction: hlo.Instruction, core: hlo.Instruction, doubt: str, trips: tuple[int, ...]) -> None:
        kind, groups = core.opcode.removesuffix("-start"), hlo.replica_groups(core, self._module.num_partitions)
        if doubt:
            self.faults.append(f"{instruction.name} runs {doubt}: other devices may leave it out")
        if fault := _not_everybody_once(kind, groups, self._module.num_partitions):
            self.faults.append(f"{instruction.name}: {fault}")
        if core is not instruction:
            self._check_wrapped(instruction)
        self.launches.append(Launch(kind, groups, core.shape, instruction.op_name, trips))
        self._flying[instruction.name] = _communicator(kind, groups)
        self.in_flight = max(self.in_flight, len(self._flying))
        self.communicators = max(self.communicators, len(set(self._flying.values()) - {None}))
        if not instruction.opcode.endswith("-start"):
            del self._flying[instruction.name]

    def _check_wrapped(self, instruction: hlo.Instruction) -> None:
        self._reached |= set(instruction.called)
        inner = [i for name in instruction.called for i in self._module[name].instructions]
        if sum(i.opcode in KINDS for i in inner) > 1:
            self.faults.append(f"{instruction.name} launches several collectives in one")

    def _finish(self, computation: hlo.Computation, instruction: hlo.Instruction) -> None:
        started = next((name for name in instruction.operands if name in self._flying), None)
        if started is not None:
            del self._flying[started]
            return
        starts = (computation.by_name.get(name) for name in instruction.operands)
        others = any(start is not None and core_of(self._module, start) is None for start in starts)
        if not others:
            self.faults.append(f"{instruction.name} waits for nothing that is in flight")


def _communicator(kind: str, groups: Groups) -> tuple[str, Groups] | None:
    """Returns a key of the communicator of a collective; None where no device has a peer.

    XLA has one for each group of devices, and one of all devices for permutations, which are sends and receives.
    """
    if kind == "collective-permute":
        return kind, ()
    return ("", tuple(sorted(groups))) if any(len(group) > 1 for group in groups) else None


def _not_everybody_once(kind: str, groups: Groups, devices: int) -> str:
    """Returns what is wrong with groups in which not every device is once, or pairs that one is in twice."""
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
