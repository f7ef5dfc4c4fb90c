"""The transports by name."""

import enum


class TransportKind(enum.Enum):
    """A transport of token rows to expert replicas and back; the value is the option's value."""

    RING = "ring"
    """All-gather and reduce-scatter (`sharding.experts.transport`)."""
    ALL_TO_ALL = "all_to_all"
    """One hop, to devices (`sharding.experts.exchange`)."""
    HIERARCHICAL = "hierarchical"
    """Two hops: to nodes, then inside a node (`sharding.experts.exchange`)."""
    RAGGED = "ragged"
    """One hop with exact sizes, on request only (`sharding.experts.ragged`)."""
    NCCL_EP = "nccl_ep"
    """One hop by NVIDIA's library, on request only (`sharding.experts.library_hop`)."""

    @classmethod
    def from_name(cls, name: str) -> "TransportKind | None":
        """Returns the kind of an option value, None for "auto". Raises ValueError for an unknown name."""
        names = ["auto", *(kind.value for kind in cls)]
        if name not in names:
            raise ValueError(f"expert_transport: {name!r} is not one of {', '.join(names)}")
        return None if name == "auto" else cls(name)
