"""The weights of a running engine on this process's devices: replaced leaf by leaf, kept in host memory, or dropped.

A leaf is deleted before its successor reaches the devices, so they never hold two copies of the model. The programs
take parameters as arguments of fixed shapes, types and shardings: nothing is compiled again. Experts lie where the
engine has moved them to; their placement is no part of the weights.
"""

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from dsv3.checkpoint.identity import file_states
from dsv3.checkpoint.layout import leaf_path, leaves
from dsv3.checkpoint.load import form_of, plan_params
from dsv3.checkpoint.quantize import quantize_stack
from dsv3.checkpoint.reader import aligned_empty
from dsv3.checkpoint.safetensors_file import raise_findings, unusable_array
from dsv3.config.model import ModelConfig
from dsv3.engine.components import EngineComponents
from dsv3.engine.device.devices import Devices
from dsv3.model.params import Fp4Weight, Fp8Weight, Int4Weight, Params, ParamSpec
from dsv3.model.tensor_parallel import row_order
from sharding.experts.placement import Placement, expert_map_of
from sharding.mesh import rank_size

Leaves = Mapping[str, Any]
"""Leaves of parameters by path, such as "moe.moe.gate_up": each an array, or a record of two."""
Replacement = Callable[[Callable[[str], None]], Iterator[tuple[str, Any]]]
"""Yields path and new value of each leaf; calls its argument with a path before the devices get that leaf."""

_PAIRS = (Fp8Weight, Int4Weight, Fp4Weight)
_SPREAD, _PLACEMENT = "params.", "placement."  # prefixes of leaves, where experts are spread


class _PlannedUpdate(NamedTuple):
    """A replacement, and what it was planned for: a source, its files, the expert of each replica."""

    source: Any
    files: tuple[tuple[int, ...], ...]
    experts: np.ndarray | None
    replacement: Replacement

    def suits(self, source: Any, files: tuple[tuple[int, ...], ...], experts: np.ndarray | None) -> bool:
        """Returns whether it was planned for these."""
        is_same = self.source is source or (isinstance(source, str | os.PathLike) and self.source == source)
        in_place = self.experts is None or experts is None or np.array_equal(self.experts, experts)
        return is_same and self.files == files and in_place


class ServedWeights:
    """The parameters that the programs of `devices` take."""

    def __init__(self, components: EngineComponents, devices: Devices) -> None:
        self._devices, self._cfg, self._reading = devices, components.model_cfg, components.reading
        self._experts, self._mesh = components.functions.experts, components.mesh
        self._planned: _PlannedUpdate | None = None
        self._on_host: dict[str, list[dict[Any, np.ndarray]]] = {}

    def plan(self, source: Any) -> Callable[[], None]:
        """Returns what plans the next `replace`: it changes nothing, and may run on another thread while steps run.

        It does nothing where it has planned for this source, and neither files nor the places of experts have changed.

        `source` is the path of a checkpoint directory, a mapping of arrays by the names of a checkpoint's tensors, or
        `Params` in the layout of training (`dsv3.model.params.declare`). What is returned raises ValueError, which
        names every leaf that is missing or unsuitable, and TypeError for another source.
        """
        experts = self._expert_of_replica()  # not on another thread: a step that moves experts donates their placement
        return functools.partial(self._plan, source, experts)

    def _plan(self, source: Any, experts: np.ndarray | None) -> None:
        files = file_states(Path(source)) if isinstance(source, str | os.PathLike) else ()
        if self._planned is not None and self._planned.suits(source, files, experts):
            return
        self._planned = None
        self._planned = _PlannedUpdate(source, files, experts, self._replacement(source, experts))

    def _replacement(self, source: Any, experts: np.ndarray | None) -> Replacement:
        if self._reading is None:
            raise ValueError("this engine was not built from a checkpoint directory, so its weights cannot be updated")
        served, shards = self._served, rank_size(self._mesh)
        own = {id(array) for array in jax.tree.leaves(self._devices.params)}
        if any(id(array) in own for array in jax.tree.leaves(source)):
            raise ValueError("source: it has arrays of this engine itself, which the update deletes; copy them first")
        if isinstance(source, Params):
            if self._mesh.is_multi_process:
                raise ValueError("a tree needs an engine of one process; write a checkpoint directory instead")
            return plan_tree(dict(_flatten(source)), served, self._cfg, self._reading.dtype, experts, shards)
        if not isinstance(source, str | os.PathLike | Mapping):
            raise TypeError(f"source: {type(source).__name__} is neither a directory, nor Params, nor a mapping")
        if isinstance(source, Mapping) and self._mesh.is_multi_process:
            raise ValueError("a mapping needs an engine of one process; write a checkpoint directory instead")
        planned = plan_params(
            source if isinstance(source, Mapping) else Path(source),
            self._cfg,
            served,
            dtype=self._reading.dtype,
            fp8="keep" if self._reading.fp8 == "quantize" else self._reading.fp8,
            int4=self._reading.int4,
            fp4=self._reading.fp4,
            phy2log=experts,
            tensor_parallel_size=shards,
        )
        threads = self._reading.threads
        return lambda before: planned.read(progress=False, threads=threads, before=before)

    def replace(self, on_progress: Callable[[], None]) -> None:
        """Replaces all leaves as planned; `on_progress` is called after each.

        After an exception some leaves are gone, and the next call must succeed before a program is launched.
        """
        assert self._planned is not None  # `plan` has succeeded
        replacement, self._planned = self._planned.replacement, None
        current = self._leaves(self._devices.params)
        self._on_host = {}

        def free(path: str) -> None:
            for array in jax.tree.leaves(current[path]):
                array.delete()

        try:
            for path, value in replacement(free):
                current[path] = jax.block_until_ready(value)
                on_progress()
        finally:
            self._put(current)

    def drop(self) -> None:
        """Deletes the parameters of the devices."""
        for leaf in self._leaves(self._devices.params).values():
            for array in jax.tree.leaves(leaf):
                array.delete()

    def move_to_host(self) -> None:
        """Copies the parameters to host memory, leaf by leaf, and deletes them on the devices."""
        for path, leaf in self._leaves(self._devices.params).items():
            arrays = jax.tree.leaves(leaf)
            self._on_host[path] = [_fetch_shards(array) for array in arrays]
            for array in arrays:
                array.delete()

    def move_to_devices(self) -> None:
        """Copies the parameters back that `move_to_host` has copied; does nothing where there are none."""
        current, served = self._leaves(self._devices.params), self._served
        for path in list(self._on_host):
            shapes, structure = jax.tree.flatten(served[path])
            arrays = list(map(_put_shards, self._on_host.pop(path), shapes))
            current[path] = jax.block_until_ready(jax.tree.unflatten(structure, arrays))
        self._put(current)

    @property
    def _served(self) -> dict[str, Any]:
        """Shapes, types and shardings of the leaves."""
        return self._leaves(self._devices.layout.params)

    def _leaves(self, tree: Any) -> dict[str, Any]:
        found = ((path.removeprefix(_SPREAD), leaf) for path, leaf in _flatten(tree))
        return {path: leaf for path, leaf in found if not path.startswith(_PLACEMENT)}

    def _put(self, current: Leaves) -> None:
        tree = self._devices.params
        values = [current.get(path.removeprefix(_SPREAD), leaf) for path, leaf in _flatten(tree)]
        self._devices.params = jax.tree.unflatten(jax.tree.structure(tree, is_leaf=_is_pair), values)

    def _expert_of_replica(self) -> np.ndarray | None:
        """Returns the expert of each replica, `[L, Er]`, as they lie now; None where each device has all experts."""
        if self._experts is None:
            return None
        _, placement = self._experts.take(self._devices.params)
        return expert_map_of(Placement(*map(np.asarray, placement)), self._experts.num_replicas).phy2log


def plan_tree(
    given: Leaves,
    served: Leaves,
    cfg: ModelConfig,
    dtype: Any,
    phy2log: np.ndarray | None,
    tensor_parallel_size: int,
) -> Replacement:
    """Plans to copy the leaves `given`, in the layout of training, in place of those `served`; changes nothing.

    A leaf is cast to the type that is served; where that is FP8, to `dtype`, and quantized. Integers stay so. A leaf
    that is quantized already, as it is served, is taken as it is. Layers that make drafts are ignored where none are
    served. Raises `CheckpointError`, which names every leaf that is missing, unknown or unsuitable.
    """
    specs = leaves(cfg)
    wrong = {path: why for path in served if path in given and (why := _misfit(specs[path], given[path], served[path]))}
    unknown = [path for path in given if path not in served and not path.startswith("mtp.")]
    raise_findings(
        "the tree",
        {
            "missing leaves": [path for path in served if path not in given],
            "unknown leaves": unknown,
            "unsuitable leaves": [f"{path} {why}" for path, why in wrong.items()],
        },
    )
    ue8m0 = cfg.fp8 is not None and cfg.fp8.scale_fmt == "ue8m0"
    first_draft = cfg.num_moe_layers

    def replace(before: Callable[[str], None]) -> Iterator[tuple[str, Any]]:
        for path, leaf in served.items():
            spec, rows = specs[path], row_order(specs[path], cfg, tensor_parallel_size)
            experts = None
            if phy2log is not None and "experts" in spec.axes:
                experts = phy2log[first_draft:] if path.startswith("mtp.") else phy2log[:first_draft]
            before(path)
            yield path, _arrive(given[path], leaf, rows, experts, dtype, ue8m0=ue8m0)

    return replace


def _misfit(spec: ParamSpec, given: Any, served: Any) -> str:
    """Returns why a leaf cannot become the one that is served, "" if it can."""
    if why := next(filter(None, map(unusable_array, jax.tree.leaves(given))), ""):
        return why
    if _is_pair(given):
        unlike = not isinstance(served, type(given)) or given.data.dtype != served.data.dtype
        unlike = unlike or given.data.shape != spec.shape or not isinstance(given, Fp8Weight)
        return f"is {form_of(given)}, but {form_of(served)} is served" if unlike else ""
    if tuple(given.shape) != spec.shape:
        return f"is {form_of(given)}, expected {list(spec.shape)}"
    if isinstance(served, Int4Weight | Fp4Weight):
        return f"is {form_of(given)}, but experts of four bits are served, which only a checkpoint directory has"
    wanted, kind = (np.dtype(np.float32) if _is_pair(served) else np.dtype(served.dtype)), jnp.integer
    integral = bool(jnp.issubdtype(wanted, kind))
    suits = jnp.issubdtype(given.dtype, kind if integral else jnp.floating) and np.dtype(given.dtype).itemsize > 1
    return "" if suits else f"is {form_of(given)}, expected {'integers' if integral else 'floating-point numbers'}"


def _arrive(
    given: Any, served: Any, rows: np.ndarray | None, experts: np.ndarray | None, dtype: Any, *, ue8m0: bool
) -> Any:
    """Returns a new leaf of the form, and with the shardings, of the one that is served; quantized from `dtype`."""
    if _is_pair(given):
        scale_rows = None if rows is None else rows[::128] // 128
        parts = ((given.data, served.data, rows), (given.scale, served.scale, scale_rows))
        return Fp8Weight(*(_copy(array, like, order, experts, like.dtype) for array, like, order in parts))
    if not isinstance(served, Fp8Weight):
        return _copy(given, served, rows, experts, served.dtype)
    plain = _copy(given, served.data, rows, experts, dtype)
    made = quantize_stack(plain, ue8m0=ue8m0, sharding=Fp8Weight(served.data.sharding, served.scale.sharding))
    plain.delete()
    return made


def _copy(given: Any, like: Any, rows: np.ndarray | None, experts: np.ndarray | None, dtype: Any) -> jax.Array:
    """Returns a copy of type `dtype` on the devices of `like`, which shares no memory with `given`."""
    where = like.sharding
    # The result may share memory with `given`, even with may_alias=False: only the program below copies for certain.
    arrived = jax.device_put(given, _sharding_for(where, given.shape))
    index = experts if experts is not None else rows
    indices = () if index is None else (jnp.asarray(index),)
    return _arranging(where, np.dtype(dtype), experts is not None)(arrived, *indices)


@functools.lru_cache(maxsize=1024)
def _arranging(where: Sharding, dtype: np.dtype, by_layer: bool) -> Callable[..., jax.Array]:
    """Returns the program that copies a leaf in a type, with rows in order, or experts, which differ by layer."""

    def arrange(leaf: jax.Array, index: jax.Array | None = None) -> jax.Array:
        is_fp8 = leaf.dtype == dtype and dtype.itemsize == 1
        if is_fp8:  # on a CPU XLA gathers FP8 without the sign of zeros
            leaf = jax.lax.bitcast_convert_type(leaf, jnp.uint8)
        if index is not None:
            leaf = leaf[jnp.arange(leaf.shape[0])[:, None], index] if by_layer else leaf[:, index]
        return jax.lax.bitcast_convert_type(leaf, dtype) if is_fp8 else jnp.array(leaf, dtype, copy=True)

    return jax.jit(arrange, out_shardings=where)


def _sharding_for(where: Sharding, shape: tuple[int, ...]) -> Sharding:
    """Returns a sharding on the same devices that an array of another shape can have."""
    try:
        where.shard_shape(shape)
    except ValueError:
        assert isinstance(where, NamedSharding)
        return NamedSharding(where.mesh, PartitionSpec())
    return where


def _fetch_shards(array: jax.Array) -> dict[Any, np.ndarray]:
    """Returns the parts of an array that this process's devices have, each once, in host memory."""
    parts: dict[Any, np.ndarray] = {}
    for shard in array.addressable_shards:
        if (key := _place_of(shard.index)) not in parts:
            parts[key] = aligned_empty(shard.data.shape, np.dtype(array.dtype))
            parts[key][...] = shard.data
    return parts


def _put_shards(parts: Mapping[Any, np.ndarray], like: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns the array of `parts` with the sharding of `like`."""
    where = like.sharding.addressable_devices_indices_map(like.shape)
    arrays = [jax.device_put(parts[_place_of(index)], device) for device, index in where.items()]
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, arrays, dtype=like.dtype)


def _place_of(index: tuple[slice, ...]) -> tuple[tuple[Any, Any], ...]:
    return tuple((part.start, part.stop) for part in index)


def _is_pair(leaf: Any) -> bool:
    return isinstance(leaf, _PAIRS)


def _flatten(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yields path and leaf, where a quantized weight is one leaf."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_pair)
    return ((leaf_path(keys), leaf) for keys, leaf in flat)
