"""What lives on the devices of this process, as workers of jobs see it."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dsv3.engine.device.layout import Layout
from dsv3.engine.device.programs import Programs


class Forward(NamedTuple):
    """What a forward job leaves for the sampler, and what is left of that for a drafter.

    Shapes are one rank's. A prefill leaves its `batch` (tokens, chunks) too, and `hidden` of all its tokens. `tokens`
    are what was sampled, once that is done. `masks` are there where a row is held to a grammar.
    """

    slots: Any  # [B] int32
    scores: Any = None  # [Xn, B, S, W / Xn] float32
    hidden: Any = None  # [B, S, D] or [T, D]; None where nothing drafts
    batch: tuple[Any, ...] = ()
    tokens: Any = None  # [B, S] int32
    masks: Any = None  # [B, S, words] uint32


class Devices:
    """Parameters, page pools and decode state of all ranks, and the programs over them.

    `handed` holds what a forward job leaves for later jobs of the same step, by the forward job's kind.
    """

    def __init__(self, layout: Layout, params: Any, programs: Programs) -> None:
        self.layout, self.params, self.programs = layout, params, programs
        self.handed: dict[str, Forward] = {}
        self._unused: dict[Any, jax.Array] = {}

    @functools.cached_property
    def pages(self) -> Any:
        """The page pools. They are made when they are first asked for: what compiles before has their room."""
        return self.zeros(self.layout.pages)

    @functools.cached_property
    def state(self) -> Any:
        """The decode state."""
        return self.zeros(self.layout.state)

    def allocate(self) -> None:
        """Makes page pools and decode state, if they are not there yet."""
        _ = self.pages, self.state

    def delete(self) -> None:
        """Gives the memory of all arrays back at once, whatever still refers to them; nothing runs here any more."""
        made = [self.__dict__.get(name) for name in ("pages", "state")]
        for array in jax.tree.leaves((self.params, made, list(self._unused.values()))):
            array.delete()
        self.params = self.pages = self.state = None
        self.handed, self._unused = {}, {}

    def put(self, array: np.ndarray) -> Any:
        """Returns host data of this process's ranks `[ranks here, ...]` as an argument of a program over all ranks."""
        layout = self.layout
        if not layout.spans_processes:
            return array
        shape = (layout.cfg.num_ranks, *array.shape[1:])
        return jax.make_array_from_process_local_data(layout.rank_sharding, array, shape)

    def put_some(self, parts: Mapping[int, np.ndarray], shape: tuple[int, ...], dtype: Any) -> Any:
        """Returns an array over all ranks of which only the ranks in `parts` matter; each part is of `shape`.

        The others' are zeros, which stay on their devices from call to call.
        """
        layout = self.layout
        shape = (layout.cfg.num_ranks, *shape)
        if layout.cfg.num_devices == 1:
            return parts[0][None]
        arrays = []
        for device, index in layout.rank_sharding.addressable_devices_indices_map(shape).items():
            mine = parts.get(index[0].start or 0) if index else None
            arrays.append(
                self._zeros_on(device, shape[1:], dtype) if mine is None else jax.device_put(mine[None], device)
            )
        return jax.make_array_from_single_device_arrays(shape, layout.rank_sharding, arrays)

    def of_ranks(self, array: jax.Array, ranks: Iterable[int]) -> list[jax.Array]:
        """Returns the parts `[1, ...]` of `ranks` of an array over all ranks, each from one device."""
        parts = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
        return [parts[rank] for rank in ranks]

    def _zeros_on(self, device: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        key = device, shape
        if key not in self._unused:
            self._unused[key] = jax.device_put(np.zeros((1, *shape), dtype), device)
        return self._unused[key]

    def zeros(self, shapes: Any) -> Any:
        """Returns arrays of zeros."""
        leaves, structure = jax.tree.flatten(shapes)
        return jax.tree.unflatten(structure, _making(tuple(leaves))())


@functools.lru_cache(maxsize=16)
def _making(shapes: tuple[jax.ShapeDtypeStruct, ...]) -> Callable[[], list[jax.Array]]:
    """Returns the program that makes arrays of zeros: one of all, as one of each takes 30 ms to compile."""
    places = [shape.sharding for shape in shapes]
    return jax.jit(lambda: [jnp.zeros(shape.shape, shape.dtype) for shape in shapes], out_shardings=places)
