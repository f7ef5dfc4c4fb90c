"""Which transport carries tokens to their experts: the candidates, what they put on the wire, and the choice.

The choice is made once per compiled program, from its shapes, by a stated cost model: bytes over the slower of the two
kinds of link, plus a latency for each message a rank sends. Link speeds default to those DeepSeek published for H800
(DeepEP: 160 GB/s NVLink, 50 GB/s a NIC, one NIC a GPU), so only their ratio matters to the choice.
"""

import dataclasses
import enum
import functools

import jax
import jax.numpy as jnp

from sharding.collectives import Overlap
from sharding.exchange import Experts, Hop, Rows, exchange, expected_capacity, gather_all


class Kind(enum.Enum):
    """`RING`: all-gather and reduce-scatter. `ALL_TO_ALL`: one hop to ranks. `HIERARCHICAL`: to nodes, then inside."""

    RING = "ring"
    ALL_TO_ALL = "all_to_all"
    HIERARCHICAL = "hierarchical"


MAX_HOPS = 2
"""Of any transport: the length of its vector of rounds."""


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


def load_of(tokens: int, experts_per_token: int, hidden_size: int, *, fp8_dispatch: bool) -> Load:
    """Rows as they travel: FP8 with a float32 scale a 128 channels, or bf16; ids and weights; bf16 on the way back."""
    activations = hidden_size + 4 * -(-hidden_size // 128) if fp8_dispatch else 2 * hidden_size
    return Load(tokens, experts_per_token, activations + 8 * experts_per_token, 2 * hidden_size)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What one rank sends in one MoE layer, dispatch and combine in one round together.

    `device_bytes` leave the GPU, `node_bytes` of them leave the node; `messages` counts peers addressed.
    """

    device_bytes: int
    node_bytes: int
    messages: int

    def seconds(self, network: Network) -> float:
        """Time on the wire by the cost model; links inside and across nodes work at once."""
        inside = (self.device_bytes - self.node_bytes) / network.node_link
        return max(inside, self.node_bytes / network.cross_link) + self.messages * network.message


@dataclasses.dataclass(frozen=True)
class Transport:
    """A chosen transport for one program; `span` experts live on each rank. Hashable: a jitted step can close on it."""

    kind: Kind
    machine: Machine
    span: int
    hops: tuple[Hop, ...]

    def __call__(self, rows: Rows, experts: Experts) -> tuple[jax.Array, jax.Array]:
        """Weighted sums [T, D] of the routed experts of this rank's rows, and the rounds [MAX_HOPS] of each hop."""
        if self.kind is Kind.RING:
            return gather_all(rows, self.machine.axes, self.span, experts), no_rounds()
        y, rounds = exchange(rows, self.hops, experts)
        return y, pad_rounds(rounds)

    def traffic(self, load: Load) -> Traffic:
        """Bytes and messages of one round."""
        row, machine = load.dispatch_bytes + load.combine_bytes, self.machine
        if self.kind is Kind.RING:
            others = machine.ranks - 1
            outside = machine.ranks - machine.gpus
            return Traffic(others * load.tokens * row, outside * load.tokens * row, 2 * others)
        parts = [_hop_traffic(hop, machine, row) for hop in self.hops]
        return Traffic(*(sum(values) for values in zip(*map(dataclasses.astuple, parts), strict=True)))


def no_rounds() -> jax.Array:
    """The rounds of a transport without hops."""
    return jnp.zeros(MAX_HOPS, jnp.int32)


def pad_rounds(rounds: jax.Array) -> jax.Array:
    """The rounds of a transport's hops [hops] as [MAX_HOPS], 0 for those it does not have."""
    return jnp.pad(rounds, (0, MAX_HOPS - rounds.shape[0]))


def _hop_traffic(hop: Hop, machine: Machine, row: int) -> Traffic:
    outside = {machine.axes: hop.peers - machine.gpus, machine.axes[:1]: hop.peers - 1}.get(hop.axes, 0)
    per_peer = hop.capacity * row
    return Traffic((hop.peers - 1) * per_peer, outside * per_peer, 2 * (hop.peers - 1))


def build(kind: Kind, machine: Machine, experts: int, load: Load, overlap: Overlap = Overlap.NONE) -> Transport:
    """A transport of `kind` for `experts` physical experts; ValueError when the ranks do not divide them."""
    if experts % machine.ranks:
        raise ValueError(
            f"{experts} physical experts do not divide over {machine.ranks} ranks: "
            f"add redundant experts to reach {-(-experts // machine.ranks) * machine.ranks}"
        )
    span = experts // machine.ranks
    T, K = load.tokens, load.experts_per_token
    hop = functools.partial(Hop, overlap=overlap)
    hops: tuple[Hop, ...] = ()
    if kind is Kind.ALL_TO_ALL:
        hops = (hop(machine.axes, machine.ranks, span, expected_capacity(T, machine.ranks, K)),)
    elif kind is Kind.HIERARCHICAL:
        inside = expected_capacity(T * machine.nodes, machine.ranks, K)
        hops = (
            hop(machine.axes[:1], machine.nodes, span * machine.gpus, expected_capacity(T, machine.nodes, K)),
            hop(machine.axes[1:], machine.gpus, span, inside),
        )
    return Transport(kind, machine, span, hops)


def choose(
    machine: Machine, experts: int, load: Load, overlap: Overlap = Overlap.NONE, network: Network | None = None
) -> Transport:
    """The cheapest transport for this load by the cost model."""
    kinds = [kind for kind in Kind if machine.nodes > 1 or kind is not Kind.HIERARCHICAL]
    candidates = [build(kind, machine, experts, load, overlap) for kind in kinds]
    return min(candidates, key=lambda t: t.traffic(load).seconds(network or Network()))
