"""What lives on the devices of this process, as workers of jobs see it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv3.engine.device.layout import Layout
from dsv3.engine.device.programs import Programs


class Devices:
    """Parameters, page pools and decode state of all ranks, and the programs over them.

    `handed` holds what a job leaves for a later one of the same step.
    """

    def __init__(self, layout: Layout, params: Any, programs: Programs) -> None:
        self.layout, self.params, self.programs = layout, params, programs
        self.pages, self.state = self.zeros(layout.pages), self.zeros(layout.state)
        self.handed: dict[str, Any] = {}

    def put(self, array: np.ndarray) -> Any:
        """Returns host data of this process's ranks `[ranks here, ...]` as an argument of a program over all ranks."""
        layout = self.layout
        if not layout.spans_processes:
            return array
        shape = (layout.cfg.num_ranks, *array.shape[1:])
        return jax.make_array_from_process_local_data(layout.rank_sharding, array, shape)

    def zeros(self, shapes: Any) -> Any:
        """Returns arrays of zeros."""
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), shapes)
