"""`load_params`: reads a checkpoint directory into a parameter tree."""

import functools
import gc
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Sharding

from dsv3.checkpoint.arrange import with_replicas, with_row_order
from dsv3.checkpoint.directory import read_directory
from dsv3.checkpoint.hugging_face import plan_hf
from dsv3.checkpoint.int4 import Int4Mode, converted, converted_shapes, is_int4
from dsv3.checkpoint.layout import leaf_path, leaves
from dsv3.checkpoint.load_plan import Fp8Mode, LoadPlan
from dsv3.checkpoint.naming import in_deepseek_form
from dsv3.checkpoint.quantize import plain_products, quantized, quantized_shapes
from dsv3.checkpoint.reader import leaf_shapes, read_leaves
from dsv3.checkpoint.stacked import is_stacked, plan_stacked
from dsv3.config.model import ModelConfig
from dsv3.model.params import Fp8Weight, Params, declare

DTYPES = tuple(np.dtype(t) for t in (np.float32, np.float16, ml_dtypes.bfloat16))

_log = logging.getLogger(__name__)


def load_params(
    directory: str | os.PathLike[str],
    cfg: ModelConfig,
    *,
    dtype: Any,
    fp8: Fp8Mode = "keep",
    int4: Int4Mode = "keep",
    shardings: Params | Sharding | None = None,
    phy2log: np.ndarray | None = None,
    tensor_parallel_size: int = 1,
    progress: bool = True,
    threads: int = 8,
    shapes: bool = False,
) -> Params:
    """Reads a checkpoint directory, Hugging Face or pre-stacked, into parameters on their devices.

    `dtype` is float32, bfloat16, float16, or None for the embedding's dtype in the checkpoint. All parameters have it,
    with three exceptions. The router's bias is float32. The router's weights are float32, unless the checkpoint holds
    them in `dtype` (`ParamSpec.dtype_in`). FP8 products become `Fp8Weight`s under `fp8` "keep"; "dequantize" multiplies
    them out; "quantize" keeps them and rounds the other products to FP8 too. kv_b_proj (`k_up`, `v_up`) is always
    dequantized, because absorbed attention runs in bfloat16. INT4 experts become `Int4Weight`s under `int4` "keep",
    `Fp8Weight`s under "fp8", and of `dtype` under "dequantize".

    `shardings` is one `jax.sharding.Sharding` for all leaves, or a tree like the parameters' with a `Sharding` per leaf
    (or an `Fp8Weight` of two, for data and scales). Each process reads only what its devices hold. None means the
    default device.

    `phy2log` [L, Er] int (`sharding.experts.eplb.ExpertMap`) names the expert of each replica. The decoder's
    routed experts then come out as `[L, Er, ...]` instead of `[L, E, ...]`, and so do those of the MTP modules where
    the map has layers for them too.
    `tensor_parallel_size` puts fused rows in the order of `tensor_parallel.row_order`, of which each device of a rank
    takes an equal part.

    With `shapes` only headers are read, and each array's place has its shape, dtype and sharding
    (`jax.ShapeDtypeStruct`).

    Host memory holds the arrays that stay on the host, one array (one device's share of it), and where values are
    converted at most 24 MiB of scratch per thread.

    Raises `CheckpointError`, which names file and tensor, if the checkpoint is not what `cfg` describes. Raises
    ValueError for options that do not fit the model.
    """
    if int4 not in get_args(Int4Mode):
        raise ValueError(f"int4 {int4!r} is not one of {', '.join(get_args(Int4Mode))}")
    where = _by_path(cfg, shardings)
    with _collector_paused():
        plan = plan_directory(Path(directory), cfg, dtype, fp8)
        if phy2log is not None:
            plan = with_replicas(plan, cfg, phy2log, where)
        if tensor_parallel_size > 1:
            plan = with_row_order(plan, cfg, tensor_parallel_size)
    if plan.skipped_mtp_layers:
        _log.info("%s: MTP modules from layer %d on are not loaded", directory, plan.skipped_mtp_layers[0])
    convert = _conversions(plan, cfg, fp8, int4, where)
    if shapes:
        found = zip(plan.leaves, leaf_shapes(plan, where), strict=True)
        values = [convert[path].shapes(leaf) if path in convert else leaf for path, leaf in found]
    else:
        made = {path: conversion.values for path, conversion in convert.items()}
        values = read_leaves(plan, where, progress=progress, threads=threads, convert=made)
    return jax.tree.unflatten(jax.tree.structure(declare(cfg)), values)


class _Conversion(NamedTuple):
    """What a parameter becomes once it has been read: its values, or the shapes of them."""

    values: Callable[[Any], Any]
    shapes: Callable[[Any], Any]


def _conversions(
    plan: LoadPlan, cfg: ModelConfig, fp8: Fp8Mode, int4: Int4Mode, where: Mapping[str, Any]
) -> dict[str, _Conversion]:
    """Returns the conversions of the leaves that are served in another form than they are read in."""
    how: dict[str, Any] = {"mode": int4, "dtype": plan.leaves["embed"][0].dtype}
    experts = _Conversion(functools.partial(converted, **how), functools.partial(converted_shapes, **how))
    conversions = {path: experts for path, spec in leaves(cfg).items() if is_int4(cfg, spec)}
    ue8m0 = cfg.fp8 is not None and cfg.fp8.scale_fmt == "ue8m0"
    for path in plain_products(plan, cfg) if fp8 == "quantize" else ():
        how = {"ue8m0": ue8m0, "sharding": where.get(path)}
        conversions[path] = _Conversion(functools.partial(quantized, **how), functools.partial(quantized_shapes, **how))
    return conversions


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pauses the garbage collector while a load is planned.

    Planning makes millions of small objects and no cycles, and the collector would walk all of them again and again
    (`benchmarks.checkpoint_host` measures what that costs for DeepSeek-V3).
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def plan_directory(directory: Path, cfg: ModelConfig, dtype: Any, fp8: Fp8Mode) -> LoadPlan:
    """Plans the load of a directory of either form; `dtype` and `fp8` as in `load_params`.

    Raises `CheckpointError` if the directory does not hold `cfg`, ValueError for an unknown `dtype` or `fp8`.
    """
    dtype = None if dtype is None else np.dtype(dtype)
    if dtype not in (None, *DTYPES):
        raise ValueError(f"dtype {dtype} is not one of {', '.join(map(str, DTYPES))}")
    if fp8 not in get_args(Fp8Mode):
        raise ValueError(f"fp8 {fp8!r} is not one of {', '.join(get_args(Fp8Mode))}")
    if is_stacked(directory):
        return plan_stacked(directory, cfg, dtype, fp8)
    return plan_hf(directory, in_deepseek_form(directory, read_directory(directory)), cfg, dtype, fp8)


def _by_path(cfg: ModelConfig, shardings: Params | Sharding | None) -> dict[str, Any]:
    if shardings is None:
        return {}
    if isinstance(shardings, Sharding):
        return dict.fromkeys(leaves(cfg), shardings)
    flat, _ = jax.tree_util.tree_flatten_with_path(shardings, is_leaf=lambda x: isinstance(x, Fp8Weight))
    by_path = {leaf_path(keys): value for keys, value in flat}
    if differing := by_path.keys() ^ leaves(cfg).keys():
        raise ValueError(f"shardings belong to another model; they differ in {', '.join(sorted(differing))}")
    return by_path
