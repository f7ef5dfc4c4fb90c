"""How many bytes of requests a front holds, from the first byte of a body until its answer is made."""

import contextlib
from collections.abc import Iterator

from dsv3.server.workers import BUSY, SMALL_BYTES, WorkersBusy

# Bodies of up to `SMALL_BYTES`, whatever the larger ones hold: 1,024 of the longest.
SMALL_BUDGET_BYTES = 64 * 2**20
# Eight of the largest bodies, or 300 prompts of 131,072 tokens.
LARGE_BUDGET_BYTES = 256 * 2**20


class Budget:
    """Bytes that the requests of all clients may hold together; small and large ones have a share each."""

    def __init__(self, small: int = SMALL_BUDGET_BYTES, large: int = LARGE_BUDGET_BYTES):
        self._free = [small, large]

    @contextlib.contextmanager
    def hold(self) -> Iterator["Holding"]:
        """Yields what one request holds, nothing yet; its bytes are given back at the end of the `with`."""
        holding = Holding(self._free)
        try:
            yield holding
        finally:
            holding.release()


class Holding:
    """What one request holds of a budget: it moves to the other share when it becomes large."""

    def __init__(self, free: list[int]):
        self.nbytes = 0
        self._free = free

    def grow(self, nbytes: int) -> None:
        """Takes some more bytes; raises WorkersBusy where there are none, and takes none then."""
        size = self.nbytes + nbytes
        before, after = self.nbytes > SMALL_BYTES, size > SMALL_BYTES
        taken = size if before != after else nbytes
        if taken > self._free[after]:
            raise WorkersBusy(BUSY)
        self._free[after] -= taken
        if before != after:
            self._free[before] += self.nbytes
        self.nbytes = size

    def release(self) -> None:
        """Gives all of it back."""
        self._free[self.nbytes > SMALL_BYTES] += self.nbytes
        self.nbytes = 0
