"""Numbers the gangs of an instance, so that a process of one that is over can harm no later one; imports no jax."""

import hashlib
import hmac

import msgspec


class Generation(msgspec.Struct, frozen=True):
    """One gang: the processes that start together and end together.

    `number` counts from 0 the gangs of a first front, and `front` is a random name of that front: another front, of a
    server that was started again, counts anew.
    """

    number: int = 0
    front: str = ""

    def __str__(self) -> str:
        return f"generation {self.number}"

    def is_over_for(self, last: "Generation | None") -> bool:
        """Returns whether a process that was in generation `last` must have nothing to do with this one any more."""
        return last is not None and last.front == self.front and last.number >= self.number

    def secret(self, key: bytes) -> bytes:
        """Returns the secret of this gang alone, made from the key of the instance.

        jax's coordinator asks for certificates made from it. So a process that was late to leave an earlier gang cannot
        say there that it is process 1 of this one.
        """
        return hmac.digest(key, f"generation {self.number} of {self.front}".encode(), hashlib.sha256)


FIRST = Generation()
"""The generation of processes that nobody numbers."""
