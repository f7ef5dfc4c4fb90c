"""Which transport carries tokens to their experts: the candidates, what they put on the wire, and the choice.

The choice is made once per compiled program, from its shapes, by a stated cost model: bytes over the slower of the two
kinds of link, plus a latency for each message a rank sends. Link speeds default to those DeepSeek published for H800
(DeepEP: 160 GB/s NVLink, 50 GB/s a NIC, one NIC a GPU), so only their ratio matters to the choice.
"""

import dataclasses
import enum
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sharding.collectives import Overlap, finish
from sharding.exchange import (
    Experts,
    Hop,
    Rows,
    expected_capacity,
    expected_rows,
    finish_exchange,
    further_capacity,
    start_exchange,
    start_gather,
)
from sharding.ragged import finish_ragged, start_ragged
from sharding.words import WORD_BYTES


class Kind(enum.Enum):
    """`RING`: all-gather and reduce-scatter. `ALL_TO_ALL`: one hop to ranks. `HIERARCHICAL`: to nodes, then inside.

    `RAGGED`: one hop with exact sizes, on request only (`sharding.ragged`).
    """

    RING = "ring"
    ALL_TO_ALL = "all_to_all"
    HIERARCHICAL = "hierarchical"
    RAGGED = "ragged"


MAX_HOPS = 2
"""Of any transport: the length of its vector of rounds."""
MAX_RAGGED_BYTES = 2 << 30
"""Buffers of a ragged exchange on one rank, for the worst case that all ranks send all tokens to it."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """The ranks that share the experts: `nodes` of `gpus` each, on mesh axes `axes`: the node axis, then the others."""

    nodes: int
    gpus: int
    axes: tuple[str, ...] = ("node", "gpu")

    @property
    def ranks(self) -> int:
        """Devices in all."""
        return self.nodes * self.gpus


@dataclasses.dataclass(frozen=True)
class Network:
    """Speeds in bytes a second for each GPU, one way, and the time a rank needs for each message it sends, seconds."""

    node_link: float = 160e9
    cross_link: float = 50e9
    message: float = 1e-6


@dataclasses.dataclass(frozen=True)
class Load:
    """One MoE layer's tokens on one rank: T tokens, K experts each, bytes of a row on dispatch and on combine."""

    tokens: int
    experts_per_token: int
    dispatch_bytes: int
    combine_bytes: int

    def row_bytes(self, columns: int) -> int:
        """A row there and back where only `columns` of its K ids and weights are sent."""
        return self.dispatch_bytes + self.combine_bytes - _ID_AND_WEIGHT * (self.experts_per_token - columns)


_ID_AND_WEIGHT = 8


def load_of(tokens: int, experts_per_token: int, hidden_size: int, *, fp8_dispatch: bool, itemsize: int = 2) -> Load:
    """Rows as they travel: FP8 with a float32 scale a 128 channels, or activations; ids and weights; sums come back.

    Activations and sums take `itemsize` bytes a channel, 2 for bf16.
    """
    activations = hidden_size + 4 * -(-hidden_size // 128) if fp8_dispatch else itemsize * hidden_size
    return Load(tokens, experts_per_token, activations + _ID_AND_WEIGHT * experts_per_token, itemsize * hidden_size)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What one rank sends, dispatch and combine together.

    `device_bytes` leave the GPU, `node_bytes` of them leave the node; `messages` counts peers addressed.
    """

    device_bytes: int = 0
    node_bytes: int = 0
    messages: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    def __mul__(self, times: int) -> "Traffic":
        return Traffic(*(times * value for value in dataclasses.astuple(self)))

    def seconds(self, network: Network) -> float:
        """Time on the wire by the cost model; links inside and across nodes work at once."""
        inside = (self.device_bytes - self.node_bytes) / network.node_link
        return max(inside, self.node_bytes / network.cross_link) + self.messages * network.message


@dataclasses.dataclass(frozen=True)
class Transport:
    """A chosen transport for one program; `span` experts live on each rank. Hashable: a jitted step can close on it.

    Its contract has two halves, DeepEP's hook: `finish(start(rows, experts), experts)`, with anything in between. What
    is computed there hides the combine where `overlap` is HOOKS and the halves are called in program order.
    """

    kind: Kind
    machine: Machine
    span: int
    hops: tuple[Hop, ...]
    overlap: Overlap = Overlap.NONE

    def __call__(self, rows: Rows, experts: Experts) -> tuple[jax.Array, jax.Array]:
        """Both halves at once, with the rounds of all MAX_HOPS hops, 0 for those there are not."""
        y, rounds = self.finish(self.start(rows, experts), experts)
        return y, pad_rounds(rounds)

    def start(self, rows: Rows, experts: Experts) -> Any:
        """Sends the rows, computes their experts where they live, and starts the way back; a handle for `finish`."""
        if self.kind is Kind.RING:
            return start_gather(rows, self.machine.axes, self.span, experts, self.overlap)
        if self.kind is Kind.RAGGED:
            tokens = rows.ids.shape[0]
            return start_ragged(rows, Hop(self.machine.axes, self.machine.ranks, self.span, tokens, tokens), experts)
        return start_exchange(rows, self.hops, experts)

    def finish(self, handle: Any, experts: Experts) -> tuple[jax.Array, jax.Array | None]:
        """Weighted sums [T, D] of the routed experts of this rank's rows, and the rounds [hops], None without hops.

        They are not zeros: a constant made where program order is enforced crashes XLA (jax 0.12.0.1).
        """
        if self.kind is Kind.RING:
            return finish(handle, self.overlap), None
        if self.kind is Kind.RAGGED:
            return finish_ragged(handle), None
        return finish_exchange(handle, self.hops, experts)[:2]

    def round_traffic(self, load: Load, *, further: bool) -> tuple[Traffic, ...]:
        """Of each hop's first round, or of a further one; a row brings a word of `Queued.longest` for each hop."""
        K = load.experts_per_token
        columns = [K, *(min(K, hop.span) for hop in self.hops)]  # of ids, before each hop
        rows = [load.row_bytes(columns[h]) + WORD_BYTES * (h + 1) for h in range(len(self.hops))]
        return tuple(
            _hop_traffic(hop, self.machine, (hop.more if further else hop.capacity) * row)
            for hop, row in zip(self.hops, rows, strict=True)
        )

    def traffic(self, load: Load) -> Traffic:
        """Of a layer whose hops take one round each; for `RAGGED` what even routing is expected to send."""
        row, machine = load.row_bytes(load.experts_per_token), self.machine
        others, outside = machine.ranks - 1, machine.ranks - machine.gpus
        if self.kind is Kind.RING:
            return Traffic(others * load.tokens * row, outside * load.tokens * row, 2 * others)
        if self.kind is Kind.RAGGED:
            per_peer = row * expected_rows(load.tokens, machine.ranks, load.experts_per_token)
            return Traffic(round(others * per_peer), round(outside * per_peer), 2 * others)
        return functools.reduce(operator.add, self.round_traffic(load, further=False))


@dataclasses.dataclass(frozen=True)
class StepTraffic:
    """What a device sends in all MoE layers of one step, as counted rounds give it.

    `first`: where every hop takes the `first_rounds` it cannot do without. `extra[h]`: of each further round of hop h.
    """

    first: Traffic
    first_rounds: tuple[int, ...]
    extra: tuple[Traffic, ...]

    def total(self, rounds: Sequence[int], steps: int = 1) -> Traffic:
        """Of `steps` steps that took `rounds` [MAX_HOPS] together, as `StepOutput.rounds` counts them."""
        further = self.further_rounds(rounds, steps)
        return functools.reduce(operator.add, map(operator.mul, self.extra, further), self.first * steps)

    def further_rounds(self, rounds: Sequence[int], steps: int = 1) -> list[int]:
        """Of `rounds` [MAX_HOPS] in `steps` steps, those beyond the first ones, by hop."""
        return [taken - steps * first for taken, first in zip(rounds, self.first_rounds, strict=True)]


def step_traffic(transport: Transport, load: Load, layers: int) -> StepTraffic:
    """Of `layers` passes through an MoE layer: each of the model's once for every micro-batch of `load`."""
    further = transport.round_traffic(load, further=True)
    extra = (*further, *(Traffic() for _ in range(MAX_HOPS - len(further))))
    first_rounds = tuple(layers * (hop < len(further)) for hop in range(MAX_HOPS))
    return StepTraffic(transport.traffic(load) * layers, first_rounds, extra)


def pad_rounds(rounds: jax.Array | None, *leading: int) -> jax.Array:
    """The rounds of a transport's hops [*leading, hops] as [*leading, MAX_HOPS], 0 for those it does not have."""
    if rounds is None:
        return jnp.zeros((*leading, MAX_HOPS), jnp.int32)
    return jnp.pad(rounds, [(0, 0)] * (rounds.ndim - 1) + [(0, MAX_HOPS - rounds.shape[-1])])


def _hop_traffic(hop: Hop, machine: Machine, per_peer: int) -> Traffic:
    outside = {machine.axes: hop.peers - machine.gpus, machine.axes[:1]: hop.peers - 1}.get(hop.axes, 0)
    return Traffic((hop.peers - 1) * per_peer, outside * per_peer, 2 * (hop.peers - 1))


def build(kind: Kind, machine: Machine, experts: int, load: Load, overlap: Overlap = Overlap.NONE) -> Transport:
    """A transport of `kind` for `experts` physical experts.

    Raises ValueError when the ranks do not divide the experts, for `HIERARCHICAL` on one node, and where the buffers of
    `RAGGED` would take more than `MAX_RAGGED_BYTES`.
    """
    if experts % machine.ranks:
        raise ValueError(
            f"{experts} physical experts do not divide over {machine.ranks} ranks: "
            f"add redundant experts to reach {-(-experts // machine.ranks) * machine.ranks}"
        )
    span = experts // machine.ranks
    T, K = load.tokens, load.experts_per_token

    def hop(axes: tuple[str, ...], peers: int, span: int, tokens: int, choices: int) -> Hop:
        """`tokens` rows a rank may go to each of `peers`, as if it were one of `choices` among which experts lie."""
        capacity = expected_capacity(tokens, choices, K, machine.ranks * peers)
        return Hop(axes, peers, span, capacity, further_capacity(capacity), overlap)

    hops: tuple[Hop, ...] = ()
    if kind is Kind.ALL_TO_ALL:
        hops = (hop(machine.axes, machine.ranks, span, T, machine.ranks),)
    elif kind is Kind.HIERARCHICAL:
        if machine.nodes == 1:
            raise ValueError("the hierarchical transport needs 2 nodes or more, here is 1: use all_to_all or auto")
        hops = (
            hop(machine.axes[:1], machine.nodes, span * machine.gpus, T, machine.nodes),
            hop(machine.axes[1:], machine.gpus, span, T * machine.nodes, machine.ranks),
        )
    elif kind is Kind.RAGGED:
        _check_ragged(machine, load)
    return Transport(kind, machine, span, hops, overlap)


def _check_ragged(machine: Machine, load: Load) -> None:
    worst = machine.ranks * load.tokens * load.row_bytes(load.experts_per_token)
    if worst > MAX_RAGGED_BYTES:
        raise ValueError(
            f"the ragged transport's buffers must hold {load.tokens} tokens from each of {machine.ranks} ranks, "
            f"{worst / 2**30:.1f} GiB of at most {MAX_RAGGED_BYTES >> 30}: lower max_num_batched_tokens or "
            "max_num_seqs, or use another expert_transport"
        )


def kind_of(name: str) -> Kind | None:
    """The kind a user asked for, None for "auto". Raises ValueError for another name."""
    names = ["auto", *(kind.value for kind in Kind)]
    if name not in names:
        raise ValueError(f"expert_transport: {name!r} is not one of {', '.join(names)}")
    return None if name == "auto" else Kind(name)


def choose(
    machine: Machine, experts: int, load: Load, overlap: Overlap = Overlap.NONE, network: Network | None = None
) -> Transport:
    """The cheapest transport for this load by the cost model; never `RAGGED`, whose speed the model does not know."""
    kinds = [Kind.RING, Kind.ALL_TO_ALL, *([Kind.HIERARCHICAL] if machine.nodes > 1 else [])]
    candidates = [build(kind, machine, experts, load, overlap) for kind in kinds]
    return min(candidates, key=lambda t: t.traffic(load).seconds(network or Network()))
