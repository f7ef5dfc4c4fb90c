"""How much room the forward steps of a phase give each row, after buffers between devices were too small for one.

A step whose exchange overflows samples nothing, and the state on the devices stays as it was. So the next step is that
step again, and what was in flight behind it too. From then on a row gets twice the room: the next larger bucket where
there is one, and half as many rows in it where there is none. A single row always fits. Imports no jax.
"""

import dataclasses

CALM_STEPS = 64
"""So many steps in a row without an overflow halve the room again: trying in vain costs two of them."""


class NoRoom(RuntimeError):
    """A step of the fewest rows overflowed: buffers are smaller than a single row needs."""


@dataclasses.dataclass
class Room:
    """The room of a phase: each row gets `factor` times that of its bucket, a power of two up to `most`."""

    most: int
    factor: int = 1
    _calm: int = 0

    def note(self, factor: int, overflowed: bool) -> None:
        """Takes in the result of a step that was planned with `factor`; those of an earlier factor decide nothing.

        Raises NoRoom where even `most` was not enough.
        """
        if factor != self.factor:
            return
        if not overflowed:
            self._calm += 1
            if self._calm >= CALM_STEPS and self.factor > 1:
                self._set(self.factor // 2)
            return
        if factor >= self.most:
            raise NoRoom(
                f"a step with {factor} times the room per row still overflowed the buffers between the devices: "
                "sharding.experts.capacity gives them less than a single row needs"
            )
        self._set(2 * factor)

    def _set(self, factor: int) -> None:
        self.factor, self._calm = factor, 0
