"""Arrays on the devices of this process, as jobs use them; and the first launches of all programs.

The first launch of a program on a GPU loads its kernels and makes the communicators that it needs; the second records
its CUDA graphs. So each program is launched on padding before the first request. One that cannot run fails here, by its
name, and not in a request.
"""

import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dsv3.engine.device.layout import Layout
from dsv3.engine.device.pool import memory_outside_pool
from dsv3.engine.device.programs import Key, Programs, ProgramSpec
from dsv3.engine.memory import GB

_log = logging.getLogger(__name__)
_LAUNCHES = 2
_LIMIT_S = 300.0  # as long as API servers wait for a step; the first launch makes the communicators of 144 GPUs
_REMIND_S = 30.0


class Forward(NamedTuple):
    """What a forward program leaves for the sampler, and the sampler for a drafter.

    Shapes are one rank's. A prefill leaves its `batch` (tokens, chunks) too, and `hidden` of its tokens, for their
    log-probabilities; where the model drafts, `draft_input` is what drafts are made of (`Layout.draft_input`).
    `tokens` are the sampled ones, None before sampling. `routed_experts` are on their way to the host, where a request
    wants them.
    """

    slots: Any  # [B] int32
    scores: Any = None  # [Xn, B, S, W / Xn] float32
    hidden: Any = None  # [T, D] of a prefill
    draft_input: Any = None  # [B, S, width] or [T, width]; None where the model does not draft
    batch: tuple[Any, ...] = ()
    tokens: Any = None  # [B, S] int32
    routed_experts: Any = None  # [T, L, K] of a prefill, [B, S, L, K] of a decode batch, uint8 or uint16


class Devices:
    """Parameters, page pools and decode state of all ranks, and the programs over them.

    `decoded` and `prefilled` are what decode and prefill leave within a step: for a sampler that waits for bitmasks,
    and for a drafter. `adjust` is the state of requests with logit adjustments, None before the first of them.
    """

    def __init__(self, layout: Layout, params: Any, programs: Programs) -> None:
        self.layout, self.params, self.programs = layout, params, programs
        self.decoded: Forward | None = None
        self.prefilled: Forward | None = None
        self.adjust: Any = None
        self._unused: dict[Any, jax.Array] = {}

    @functools.cached_property
    def pages(self) -> Any:
        """The page pools, allocated at their first use: what compiles before can use their memory."""
        return self.zeros(self.layout.pages)

    @functools.cached_property
    def state(self) -> Any:
        """The decode state."""
        return self.zeros(self.layout.state)

    def allocate(self) -> None:
        """Allocates page pools and decode state, if they are not yet."""
        _ = self.pages, self.state

    def delete(self) -> None:
        """Frees the memory of all arrays at once, whatever still refers to them; nothing can run here afterwards."""
        self.free_cache()
        for array in jax.tree.leaves(self.params):
            array.delete()
        self.params = self.pages = self.state = None

    def free_cache(self) -> None:
        """Frees page pools and decode state; `allocate` makes them again, empty."""
        made = [self.__dict__.pop(name, None) for name in ("pages", "state")]
        for array in jax.tree.leaves((made, self.adjust, list(self._unused.values()))):
            array.delete()
        self.adjust = self.decoded = self.prefilled = None
        self._unused = {}

    def put(self, array: np.ndarray) -> Any:
        """Returns host data of this process's ranks `[ranks here, ...]` as an argument of a program over all ranks."""
        layout = self.layout
        if not layout.spans_processes:
            return array
        shape = (layout.cfg.num_ranks, *array.shape[1:])
        return jax.make_array_from_process_local_data(layout.rank_sharding, array, shape)

    def put_ranks(self, parts: Mapping[int, np.ndarray], shape: tuple[int, ...], dtype: Any) -> Any:
        """Returns an array over all ranks with `parts` by rank, each of `shape`, and zeros for the other ranks.

        The zeros stay on their devices from call to call.
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

    def rank_shards(self, array: jax.Array, ranks: Iterable[int]) -> list[jax.Array]:
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
        return jax.tree.unflatten(structure, _zeros_program(tuple(leaves))())


@functools.lru_cache(maxsize=16)
def _zeros_program(shapes: tuple[jax.ShapeDtypeStruct, ...]) -> Callable[[], list[jax.Array]]:
    """Returns the program that makes arrays of zeros: one for all, since each takes 30 ms to compile."""
    where = [shape.sharding for shape in shapes]
    return jax.jit(lambda: [jnp.zeros(shape.shape, shape.dtype) for shape in shapes], out_shardings=where)


def first_launch_is_slower(platform: str) -> bool:
    """Returns whether programs are launched on padding before the first request; a CPU has nothing to load."""
    return platform != "cpu"


def launch_all(devices: Devices, keys: Iterable[Key]) -> None:
    """Launches each program twice and waits for it; every process of an instance does so in the same order.

    With the padding of `ProgramSpec` no launch writes to pages; the decode state is a temporary one. Raises
    RuntimeError, with the name of the program, for one that fails or does not end.
    """
    layout, started = devices.layout, time.monotonic()
    shapes = jax.tree.leaves((layout.params, layout.pages, layout.state))
    arrays = jax.tree.leaves((devices.params, devices.pages, devices.zeros(layout.state)))
    live = dict(zip(map(id, shapes), arrays, strict=True))
    keys, before = list(keys), memory_outside_pool(layout.mesh.local_devices)
    for key in keys:
        try:
            _launch(devices, devices.programs.spec(key), live)
        except Exception as error:
            raise RuntimeError(f"the program {key} fails when it is launched for the first time: {error}") from error
    devices.params, devices.pages = _arrays_for((layout.params, layout.pages), live)
    _log.info("launched %d programs %d times in %.1f s", len(keys), _LAUNCHES, time.monotonic() - started)
    after = memory_outside_pool(layout.mesh.local_devices)
    if before is not None and after is not None:
        text = "GPU memory outside jax's pool (CUDA, NCCL, kernels): %.2f GB before these launches, %.2f GB after"
        _log.info(text, before / GB, after / GB)


def _launch(devices: Devices, spec: ProgramSpec, live: dict[int, Any]) -> None:
    """Launches a program, and puts its results for donated arguments into `live`."""
    program, known = devices.programs.get(spec.key), dict(live)
    given: list[Any] = []
    for number, argument in enumerate(spec.arguments):
        shapes = jax.tree.leaves(argument)
        if any(id(shape) not in known for shape in shapes):
            filled = spec.padding.get(number, 0)
            fills = jax.tree.leaves(jax.tree.broadcast(filled(*given) if callable(filled) else filled, argument))
            known |= {id(shape): _put(devices, shape, fill) for shape, fill in zip(shapes, fills, strict=True)}
        given.append(_arrays_for(argument, known))
    donated = [id(shape) for number in spec.donated for shape in jax.tree.leaves(spec.arguments[number])]
    for _ in range(_LAUNCHES):
        results = jax.tree.leaves(program(*_arrays_for(spec.arguments, known)))
        _wait(results, spec.key)
        known |= zip(donated, results, strict=False)
    live |= {name: known[name] for name in donated if name in live}


def _arrays_for(shapes: Any, arrays: dict[int, Any]) -> Any:
    return jax.tree.map(lambda shape: arrays[id(shape)], shapes)


def _put(devices: Devices, shape: jax.ShapeDtypeStruct, fill: Any) -> Any:
    """Returns an argument of a program, filled with a value that broadcasts to it."""
    layout = devices.layout
    if shape.sharding != layout.rank_sharding:
        return np.array(np.broadcast_to(fill, shape.shape), shape.dtype)  # the same in every process
    array = devices.put(np.array(np.broadcast_to(fill, (layout.num_local_ranks, *shape.shape[1:])), shape.dtype))
    return array if isinstance(array, jax.Array) else jax.device_put(array, shape.sharding)


def _wait(results: list[Any], key: Key) -> None:
    """Waits until the devices of this process are done. Raises RuntimeError where they fail, or time out."""
    started = remind = time.monotonic()
    while not all(array.is_ready() for array in results):
        now = time.monotonic()
        if now - started > _LIMIT_S:
            raise RuntimeError(f"it has not ended after {_LIMIT_S:g} s")
        if now - remind > _REMIND_S:
            _log.info("the program %s has been running for %.0f s", key, now - started)
            remind = now
        time.sleep(1e-4)
    jax.block_until_ready(results)
