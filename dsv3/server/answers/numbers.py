"""Numbers that all fronts of an instance count together: each has a row of its own, and anybody may read the sum.

The rows lie in an unnamed temporary file that the fronts inherit and map, so that a front that has ended leaves its
counts behind, and nothing is left of them when all have ended.
"""

import mmap
import os
import tempfile

import numpy as np


class SharedNumbers:
    """`size` float64 numbers for each of `fronts` fronts; `mine` is the row of number `front`.

    `descriptor` is the file of another front's numbers of the same shape; without one, the file is new.
    """

    def __init__(self, size: int, fronts: int = 1, front: int = 0, descriptor: int | None = None):
        num_bytes = max(1, fronts * size) * 8
        if descriptor is None:
            with tempfile.TemporaryFile() as file:
                file.truncate(num_bytes)
                self.descriptor = os.dup(file.fileno())
        else:
            self.descriptor = descriptor
        self._rows = np.frombuffer(mmap.mmap(self.descriptor, num_bytes), np.float64).reshape(fronts, size)
        self.mine = self._rows[front]

    def sum(self) -> np.ndarray:
        """Returns the sum of the rows, [size] float64."""
        return self._rows.sum(0)
