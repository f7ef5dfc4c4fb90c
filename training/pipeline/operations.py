"""What a pipeline rank does with a micro-batch: forward, backward, or one half of the backward. No jax."""

import dataclasses
import enum


class Kind(enum.Enum):
    """One part of an operation; the value is its name in a written order."""

    FORWARD = "F"
    BACKWARD = "B"
    """Input gradient and weight gradient together."""
    INPUT = "Bi"
    """The input gradient alone. The weight gradient waits in the rank's queue."""
    WEIGHT = "W"
    """The weight gradient that has waited longest."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One kind of work on one micro-batch, counted within its direction."""

    kind: Kind
    direction: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.direction}.{self.micro_batch}"


Operation = tuple[Part, ...]
"""What a rank does in one go: one part, or a forward and a backward of another micro-batch that overlap."""
Order = tuple[Operation, ...]
"""All operations of one rank in one step, first to last."""


def text(operation: Operation) -> str:
    """Returns an operation as it is written: `F0.3`, `Bi1.0`, `W1.0`, `F0.3&B1.1`."""
    return "&".join(map(str, operation))
