"""Checks the collectives of this machine's devices as the experts use them, against what numpy computes.

    python -m tools.doctor.collectives --list               the kinds
    python -m tools.doctor.collectives NAME [--quick]       one of them; on a CPU with 8 devices of its own

Devices stand in the mesh that several hosts would make: two nodes of ranks of two devices, where they divide. So there
is a communicator for each group of axes that serving sends along. A program runs its rounds in a loop, like layers,
each with other values, and sums up what it gets; that sum must be exact.
"""

import functools
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tools.doctor.install import count_gpus
from tools.doctor.rows import CaseResult, parse_name, run_cases

ALL_TO_ALL, ALL_GATHER, REDUCE_SCATTER, IN_FLIGHT = KINDS = ("all_to_all", "all_gather", "reduce_scatter", "in_flight")
RAGGED = "ragged_all_to_all"
"""The same as an all-to-all, with sizes that the device knows and the compiler does not: here all are equal."""
_CPU_DEVICES = 8
_COLUMNS = 1024
_LARGEST_VALUE = 8
_SIZES = {"decode": 2 << 20, "prefill": 64 << 20}
"""Bytes of a device's part: rows of DeepSeek-V3 for 32 and for 1,024 tokens to 8 experts each."""
_SMALL_SIZES = {"decode": 32 << 10, "prefill": 256 << 10}
_ROUNDS, _FEW_ROUNDS = 200, 20
_COPY_BYTES, _SMALL_COPY_BYTES = 1 << 30, 16 << 20
_COPIES = 20
Axes = tuple[str, ...]


def machine_mesh(devices: Sequence[Any]) -> Any:
    """Returns the devices as nodes of ranks, where they divide: two nodes, and two devices per rank."""
    from sharding.mesh import rank_mesh

    count = len(devices)
    nodes = 2 if count % 4 == 0 else 1
    tensor = 2 if (count // nodes) % 2 == 0 and count // nodes > 2 else 1
    return rank_mesh(devices, nodes, tensor)


def groups(mesh: Any) -> dict[str, Axes]:
    """Returns the axes that serving sends along, by name; none with one device, and none twice."""
    from sharding.mesh import DEVICES, NODE, OF_NODE, OF_RANK

    found: dict[str, Axes] = {}
    for axes in (DEVICES, (NODE,), OF_NODE, OF_RANK):
        real = tuple(axis for axis in axes if mesh.shape[axis] > 1)
        if real and real not in [tuple(axis for axis in known if mesh.shape[axis] > 1) for known in found.values()]:
            found["all" if axes == DEVICES else " and ".join(real)] = axes
    return found


def peers(mesh: Any, axes: Axes) -> int:
    """Returns how many devices send to each other along `axes`."""
    return math.prod(mesh.shape[axis] for axis in axes)


def looped(mesh: Any, transfers: Sequence[tuple[str, Axes]], rounds: int, overlap: Any) -> Callable[..., Any]:
    """Returns the program of `rounds` rounds of `transfers` (kind, axes), all of a round under way at once.

    It takes an array `[devices, rows, columns]` for each, and returns for each the sum of the results of all rounds.
    """
    import jax

    from sharding.collectives import (
        in_program_order,
        start_all_gather,
        start_all_to_all,
        start_reduce_scatter,
    )
    from sharding.mesh import DEVICES

    starts = {
        ALL_TO_ALL: start_all_to_all,
        ALL_GATHER: start_all_gather,
        REDUCE_SCATTER: start_reduce_scatter,
        RAGGED: _start_ragged,
    }

    # Units of their own, as those of `sharding.experts.hop`: where order is enforced XLA takes no loose constants.
    @jax.jit
    def filled(base: Any, number: Any) -> Any:
        return tuple(x + number.astype(x.dtype) for x in base)

    @jax.jit
    def added(sums: Any, results: Any) -> Any:
        return tuple(map(lambda total, result: total + result, sums, results))

    def body(carry: Any, number: Any) -> Any:
        base, sums = carry
        sent = filled(base, number)
        under_way = [starts[kind](x, axes, overlap) for (kind, axes), x in zip(transfers, sent, strict=True)]
        return (base, added(sums, tuple(transfer.finish() for transfer in under_way))), None

    def of_device(*base: Any) -> Any:
        base = tuple(x[0] for x in base)
        sums = tuple(
            jax.numpy.zeros((_result_rows(kind, len(x), peers(mesh, axes)), x.shape[1]), x.dtype)
            for (kind, axes), x in zip(transfers, base, strict=True)
        )
        numbers = jax.numpy.arange(rounds, dtype=np.int32)
        (_, sums), _ = jax.lax.scan(in_program_order(body, overlap), (base, sums), numbers)
        return tuple(x[None] for x in sums)

    spec = jax.sharding.PartitionSpec(DEVICES)
    specs = (spec,) * len(transfers)
    return jax.shard_map(of_device, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)


def _start_ragged(x: Any, axes: Axes, overlap: Any) -> Any:
    """Sends as `start_all_to_all` does, by a ragged all-to-all, which is synchronous."""
    import jax

    from sharding.collectives import finished
    from sharding.experts.ragged import Slices, to_peers

    @jax.jit
    def slices() -> Slices:
        count = jax.lax.axis_size(axes)
        each = jax.numpy.full(count, len(x) // count, np.int32)
        mine, theirs = jax.numpy.cumsum(each) - each, each * jax.lax.axis_index(axes)
        return Slices(mine, each, mine, each, theirs, theirs)

    return finished(to_peers(x, slices(), axes, len(x)))


def _result_rows(kind: str, rows: int, count: int) -> int:
    return {ALL_GATHER: rows * count, REDUCE_SCATTER: rows // count}.get(kind, rows)


def expected(mesh: Any, kind: str, axes: Axes, base: np.ndarray, rounds: int) -> np.ndarray:
    """Returns what a transfer's sums are, in numpy: that of device d is row d."""
    shape = tuple(mesh.shape.values())
    positions = np.arange(len(base)).reshape(shape)
    along = [list(mesh.shape).index(axis) for axis in axes]
    members = np.moveaxis(positions, along, range(len(along))).reshape(peers(mesh, axes), -1).T
    # Round r sends base + r, so a sum of r over the rounds is on top of the first round's result times their number.
    scale, offset = rounds, rounds * (rounds - 1) // 2
    found: dict[int, np.ndarray] = {}
    for group in members:
        parts = base[group]
        blocks = parts.reshape(len(group), len(group), -1, base.shape[-1]) if kind != ALL_GATHER else None
        for place, device in enumerate(group):
            if blocks is None:
                result, summed = parts.reshape(-1, base.shape[-1]), 1
            elif kind in (ALL_TO_ALL, RAGGED):
                result, summed = blocks[:, place].reshape(-1, base.shape[-1]), 1
            else:
                result, summed = blocks[:, place].sum(0), len(group)
            found[device] = result * base.dtype.type(scale) + base.dtype.type(summed * offset)
    return np.stack([found[device] for device in range(len(base))])


def sent_bytes(kind: str, part: int, count: int) -> float:
    """Returns what a device sends to its peers in a round, of a part of so many bytes."""
    return part * (count - 1) if kind == ALL_GATHER else part * (count - 1) / count


class Wires:
    """The devices of this process and how programs are compiled for them.

    They are compiled as serving's are; with compiler `options` of the caller's, each collective is synchronous.
    """

    def __init__(self, quick: bool, options: Mapping[str, Any] | None = None) -> None:
        import jax

        from sharding.collectives import Overlap, compiler_options, launch_in_order, limits_of, resolve_overlap

        devices = jax.devices()
        self.platform, self.mesh = devices[0].platform, machine_mesh(devices)
        self.small = quick or self.platform == "cpu"
        self.rounds = _FEW_ROUNDS if self.platform == "cpu" else _ROUNDS
        self.overlap = resolve_overlap(self.platform) if options is None else Overlap.NONE
        own = compiler_options(self.platform)
        self.options = {**(own or {}), **(options or {})} or None
        # A CPU has one under way at a time, and runs the program that has as many as a GPU.
        self.most = limits_of(own or compiler_options("gpu"))[0]
        launch_in_order(self.platform)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Bytes of a device's part, by the kind of step whose rows they are."""
        return _SMALL_SIZES if self.small else _SIZES

    @functools.cached_property
    def copied(self) -> float:
        """Bytes per second that a device copies, each counted once."""
        import jax

        count = (_SMALL_COPY_BYTES if self.small else _COPY_BYTES) // 4
        copies = jax.jit(lambda x: jax.lax.fori_loop(0, _COPIES, lambda _, x: x + 1, x), donate_argnums=0)
        x = jax.block_until_ready(copies(jax.numpy.zeros(count, np.float32)))
        began = time.perf_counter()
        jax.block_until_ready(copies(x))
        return _COPIES * 4 * count / (time.perf_counter() - began)

    def row(self, case: str, transfers: Sequence[tuple[str, Axes]], size: int) -> CaseResult:
        """Runs a program twice, checks both results, and times the second."""
        import jax

        from sharding.mesh import DEVICES

        mesh, count = self.mesh, self.mesh.size
        rows = max(1, size // 4 // _COLUMNS // count) * count  # divides over all peers
        rng = np.random.default_rng(0)
        base = []
        for kind, axes in transfers:
            part = rows // peers(mesh, axes) if kind == ALL_GATHER else rows
            dtype = np.float32 if kind == REDUCE_SCATTER else np.uint32
            base.append(rng.integers(0, _LARGEST_VALUE, (count, part, _COLUMNS)).astype(dtype))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(DEVICES))
        arrays = [jax.device_put(x, sharding) for x in base]
        program = jax.jit(looped(mesh, transfers, self.rounds, self.overlap)).lower(*arrays).compile(self.options)
        first = jax.block_until_ready(program(*arrays))
        began = time.perf_counter()
        second = jax.block_until_ready(program(*arrays))
        seconds = (time.perf_counter() - began) / self.rounds
        faults = []
        for number, ((kind, axes), x) in enumerate(zip(transfers, base, strict=True)):
            wanted = expected(mesh, kind, axes, x, self.rounds)
            for run, found in (("first", first), ("second", second)):
                wrong = np.asarray(found[number]) != wanted
                if wrong.any():
                    devices = ", ".join(map(str, np.flatnonzero(wrong.any((1, 2)))))
                    faults.append(
                        f"{kind} along {' and '.join(axes)} gives wrong values in the {run} of two runs of "
                        f"{self.rounds} rounds: {int(wrong.sum())} of {wrong.size}, on devices {devices}"
                    )
        sent = sum(
            sent_bytes(kind, x[0].nbytes, peers(mesh, axes)) for (kind, axes), x in zip(transfers, base, strict=True)
        )
        figures = {"us per round": seconds * 1e6, "MB sent per round": sent / 1e6, "GB/s": sent / seconds / 1e9}
        figures |= {"share of the copy's rate": sent / seconds / self.copied}
        return CaseResult(case, not faults, "; ".join(faults), figures)

    def cases(self, kind: str) -> dict[str, Callable[[], CaseResult | str]]:
        """Returns what `run_cases` takes."""
        found: dict[str, Callable[[], CaseResult | str]] = {}
        for name, size in self.sizes.items():
            if kind == IN_FLIGHT:
                hops = list(groups(self.mesh).values())
                hops = hops[1:3] or hops  # to nodes and in a node, or the one that there is
                transfers = [(ALL_TO_ALL, hops[i % len(hops)]) for i in range(self.most)]
                case = f"{self.most} at once, {name}"
                found[case] = functools.partial(self.row, case, transfers, size)
                continue
            for group, axes in groups(self.mesh).items():
                case = f"{group}: {peers(self.mesh, axes)} devices, {name}"
                found[case] = functools.partial(self.row, case, [(kind, axes)], size)
        return found


def main(argv: list[str] | None = None) -> int:
    """Lists the kinds, or checks one; returns the exit status of a check."""
    args = parse_name(argv, "collectives", KINDS, quick="small sizes")
    import jax

    count = len(jax.devices())
    if count == 1:
        print("there is one device, so nothing is sent", file=sys.stderr)
        return 2
    if args.list:
        print(*KINDS, sep="\n")
        return 0
    return run_cases(Wires(args.quick).cases(args.name))


if __name__ == "__main__":
    if not count_gpus() or os.environ.get("JAX_PLATFORMS") == "cpu":
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={_CPU_DEVICES}".strip()
    sys.exit(main())
