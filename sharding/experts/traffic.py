"""The cost model of dispatch and combine: bytes and messages.

A transport is selected once per compiled program, from its shapes: bytes over the slower of the two kinds of link, plus
a latency for each message that a device sends. Link speeds are those that DeepSeek
published for H800 (DeepEP: 160 GB/s NVLink, 50 GB/s per NIC, one NIC per GPU). Only their ratio affects the selection.
"""

import dataclasses

from sharding.mesh import Machine
from sharding.words import packed_bytes

_NODE_LINK, _CROSS_LINK = 160e9, 50e9  # bytes per second and GPU, one way
_MESSAGE_SECONDS = 1e-6  # for each message that a device sends
_ID_AND_WEIGHT = 8  # bytes of an int32 id and a float32 weight


@dataclasses.dataclass(frozen=True)
class LayerRows:
    """The token rows that one device sends in one MoE layer: T tokens, K experts per token, bytes per row each way.

    With `int8_sums`, transports with hops combine int8 sums and scales, `packed_bytes` per row.
    """

    tokens: int
    experts_per_token: int
    dispatch_bytes: int
    combine_bytes: int
    int8_sums: bool = False
    packed_bytes: int = 0

    @classmethod
    def from_widths(
        cls,
        tokens: int,
        experts_per_token: int,
        hidden_size: int,
        *,
        fp8_dispatch: bool,
        itemsize: int = 2,
        int8_sums: bool = False,
    ) -> "LayerRows":
        """Returns the row sizes: dispatched FP8 with a float32 scale per 128 channels, or activations, with ids and
        weights, and combined sums. Activations and sums take `itemsize` bytes per channel, 2 for bf16.
        """
        activations = hidden_size + 4 * -(-hidden_size // 128) if fp8_dispatch else itemsize * hidden_size
        dispatch = activations + _ID_AND_WEIGHT * experts_per_token
        packed = packed_bytes(hidden_size)
        return cls(tokens, experts_per_token, dispatch, itemsize * hidden_size, int8_sums, packed)

    def row_bytes(self, columns: int, *, by_hop: bool = False) -> int:
        """Returns the bytes of a row, dispatch and combine, with `columns` of its K ids and weights.

        `by_hop`: the transport has hops, so that `int8_sums` applies.
        """
        back = self.packed_bytes if by_hop and self.int8_sums else self.combine_bytes
        return self.dispatch_bytes + back - _ID_AND_WEIGHT * (self.experts_per_token - columns)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The traffic of one device, dispatch and combine together.

    `device_bytes` leave the device, `node_bytes` of them leave the node; `messages` counts the peers addressed.
    """

    device_bytes: int = 0
    node_bytes: int = 0
    messages: int = 0

    @classmethod
    def from_peers(cls, peers: int, outside: int, bytes_per_peer: float) -> "Traffic":
        """Returns the traffic of `bytes_per_peer` to each of `peers` others, `outside` of them in other nodes."""
        return cls(round(peers * bytes_per_peer), round(outside * bytes_per_peer), 2 * peers)

    @classmethod
    def to_all(cls, machine: Machine, bytes_per_peer: float) -> "Traffic":
        """Returns the traffic of `bytes_per_peer` to every other device of `machine`."""
        return cls.from_peers(machine.devices - 1, machine.devices - machine.gpus, bytes_per_peer)

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    def __mul__(self, times: int) -> "Traffic":
        return Traffic(*(times * value for value in dataclasses.astuple(self)))

    @property
    def seconds(self) -> float:
        """The time on the wire by the cost model; links inside and across nodes work at once."""
        inside = (self.device_bytes - self.node_bytes) / _NODE_LINK
        return max(inside, self.node_bytes / _CROSS_LINK) + self.messages * _MESSAGE_SECONDS
