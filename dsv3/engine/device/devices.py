"""What lives on the devices of this process, as workers of jobs see it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dsv3.engine.device.layout import Layout
from dsv3.engine.device.programs import Programs


class Forward(NamedTuple):
    """What a forward job leaves for the sampler, and what is left of that for a drafter.

    Shapes are one rank's. A prefill leaves its `batch` (tokens, chunks) too, and `hidden` of all its tokens. `tokens`
    are what was sampled, once that is done.
    """

    slots: Any  # [B] int32
    logits: Any = None  # [B, S, W] float32
    hidden: Any = None  # [B, S, D] or [T, D]; None where nothing drafts
    batch: tuple[Any, ...] = ()
    tokens: Any = None  # [B, S] int32


class Devices:
    """Parameters, page pools and decode state of all ranks, and the programs over them.

    `handed` holds what a forward job leaves for later jobs of the same step, by the forward job's kind.
    """

    def __init__(self, layout: Layout, params: Any, programs: Programs) -> None:
        self.layout, self.params, self.programs = layout, params, programs
        self.pages, self.state = self.zeros(layout.pages), self.zeros(layout.state)
        self.handed: dict[str, Forward] = {}

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
