"""The first launches of all programs, on padding, before the first request.

The first launch of a program on a GPU loads its kernels, and makes the communicators that it needs; the second records
its graphs. A program that cannot run fails here, by its name, and no client meets it.
"""

import logging
import time
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from dsv3.engine.device.devices import Devices
from dsv3.engine.device.pool import beside_pool
from dsv3.engine.device.programs import Key, ProgramSpec
from dsv3.engine.memory import GB

_log = logging.getLogger(__name__)
_LAUNCHES = 2
_LIMIT_S = 300.0  # as long as the front waits for a step; making the communicators of 144 GPUs is part of the first
_REMIND_S = 30.0


def needed(platform: str) -> bool:
    """Returns whether a launch on devices of `platform` is slower for the first time; a CPU has nothing to load."""
    return platform != "cpu"


def launch_all(devices: Devices, keys: Iterable[Key]) -> None:
    """Launches each program twice, and waits for it; every process of an instance does so in the same order.

    What the padding of `ProgramSpec` says no launch writes to pages, and their decode state is one of their own, which
    goes with them. Raises RuntimeError, with the name of the program, for one that fails or does not end.
    """
    layout, started = devices.layout, time.monotonic()
    shapes = jax.tree.leaves((layout.params, layout.pages, layout.state))
    arrays = jax.tree.leaves((devices.params, devices.pages, devices.zeros(layout.state)))
    live = dict(zip(map(id, shapes), arrays, strict=True))
    keys, before = list(keys), beside_pool(layout.mesh.local_devices)
    for key in keys:
        try:
            _launch(devices, devices.programs.spec(key), live)
        except Exception as error:
            raise RuntimeError(f"the program {key} fails when it is launched for the first time: {error}") from error
    devices.params, devices.pages = _found((layout.params, layout.pages), live)
    _log.info("launched %d programs %d times in %.1f s", len(keys), _LAUNCHES, time.monotonic() - started)
    after = beside_pool(layout.mesh.local_devices)
    if before is not None and after is not None:
        text = "GPU memory beside jax's pool, of CUDA, NCCL and kernels: %.2f GB before these launches, %.2f GB after"
        _log.info(text, before / GB, after / GB)


def _launch(devices: Devices, spec: ProgramSpec, live: dict[int, Any]) -> None:
    """Launches a program, and takes what it gives for its donated arguments into `live`."""
    program, known = devices.programs.get(spec.key), dict(live)
    given: list[Any] = []
    for number, argument in enumerate(spec.arguments):
        shapes = jax.tree.leaves(argument)
        if any(id(shape) not in known for shape in shapes):
            filled = spec.padding.get(number, 0)
            fills = jax.tree.leaves(jax.tree.broadcast(filled(*given) if callable(filled) else filled, argument))
            known |= {id(shape): _put(devices, shape, fill) for shape, fill in zip(shapes, fills, strict=True)}
        given.append(_found(argument, known))
    donated = [id(shape) for number in spec.donated for shape in jax.tree.leaves(spec.arguments[number])]
    for _ in range(_LAUNCHES):
        results = jax.tree.leaves(program(*_found(spec.arguments, known)))
        _wait(results, spec.key)
        known |= zip(donated, results, strict=False)
    live |= {name: known[name] for name in donated if name in live}


def _found(shapes: Any, arrays: dict[int, Any]) -> Any:
    """Returns the arrays in the places of their shapes."""
    return jax.tree.map(lambda shape: arrays[id(shape)], shapes)


def _put(devices: Devices, shape: jax.ShapeDtypeStruct, fill: Any) -> Any:
    """Returns an argument of a program that is filled with what broadcasts to it."""
    layout = devices.layout
    if shape.sharding != layout.rank_sharding:
        return np.array(np.broadcast_to(fill, shape.shape), shape.dtype)  # the same in every process
    array = devices.put(np.array(np.broadcast_to(fill, (layout.num_local_ranks, *shape.shape[1:])), shape.dtype))
    return array if isinstance(array, jax.Array) else jax.device_put(array, shape.sharding)


def _wait(results: list[Any], key: Key) -> None:
    """Waits until the devices of this process are done. Raises RuntimeError where they fail, or do not end."""
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
