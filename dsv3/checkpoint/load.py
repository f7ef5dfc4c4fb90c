"""`load_params`: a directory in, a parameter tree out."""

import gc
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Sharding

from dsv3.checkpoint.arrange import in_shards, in_slots
from dsv3.checkpoint.directory import read_directory
from dsv3.checkpoint.layout import leaf_path, leaves
from dsv3.checkpoint.plan import Fp8Mode, Plan, plan_hf
from dsv3.checkpoint.reader import read_leaves
from dsv3.checkpoint.stacked import is_stacked, plan_stacked
from dsv3.config import ModelConfig
from dsv3.model.params import Fp8Weight, Params, declare

DTYPES = tuple(np.dtype(t) for t in (np.float32, np.float16, ml_dtypes.bfloat16))

_log = logging.getLogger(__name__)


def load_params(
    directory: str | os.PathLike[str],
    cfg: ModelConfig,
    *,
    dtype: Any,
    fp8: Fp8Mode = "keep",
    shardings: Params | Sharding | None = None,
    phy2log: np.ndarray | None = None,
    tensor_parallel_size: int = 1,
    progress: bool = True,
    threads: int = 8,
) -> Params:
    """Parameters of a checkpoint directory, Hugging Face or pre-stacked, stacked and on their devices.

    `dtype` (float32, bfloat16 or float16; None: the embedding's in the checkpoint) is that of all parameters but the
    router's and FP8 weights that stay FP8. The router's bias is float32, and so are its weights, unless the checkpoint
    holds them in `dtype` (`ParamSpec.dtype_in`). `fp8` "keep" leaves block-quantised products as `Fp8Weight`,
    "dequantize" multiplies them out; kv_b_proj (`k_up`, `v_up`) is always dequantised, because the absorbed attention
    core runs in bfloat16.

    `shardings` is a tree like the parameters' with a `jax.sharding.Sharding` at each leaf (or an `Fp8Weight` of two,
    else data and scales share one), or one for all; each process reads only what its devices hold. None: the default
    device.

    `phy2log` [MoE layers, R] int (`sharding.experts.eplb.ExpertMap`) names the logical expert of each of R physical
    slots: the routed experts of the decoder come out as `[L, R, ...]` in place of `[L, E, ...]`, copies included. MTP
    modules keep their logical experts. `tensor_parallel_size` puts fused rows in the order of
    `tensor_parallel.row_order`, of which each device of a rank takes an equal part.

    Host memory: the arrays that stay on the host, plus one array (one device's share of it), plus scratch of at most
    `threads` times 24 MiB where values are converted.

    Raises `CheckpointError` naming file and tensor where the checkpoint is not what `cfg` describes, ValueError for
    options that do not fit the model.
    """
    where = _by_path(cfg, shardings)
    with _collector_paused():
        plan = plan_directory(Path(directory), cfg, dtype, fp8)
        if phy2log is not None:
            plan = in_slots(plan, cfg, phy2log, where)
        if tensor_parallel_size > 1:
            plan = in_shards(plan, cfg, tensor_parallel_size)
    if plan.skipped_mtp_layers:
        _log.info("%s: MTP modules from layer %d on are not loaded", directory, plan.skipped_mtp_layers[0])
    values = read_leaves(plan, where, progress=progress, threads=threads)
    return jax.tree.unflatten(jax.tree.structure(declare(cfg)), values)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """For planning, which makes millions of small objects and no cycles: to look at them all again and again took the
    garbage collector 60 % of the time for DeepSeek-V3."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def plan_directory(directory: Path, cfg: ModelConfig, dtype: Any, fp8: Fp8Mode) -> Plan:
    """What to read from a directory of either form, and how it becomes the parameters of `cfg`."""
    dtype = None if dtype is None else np.dtype(dtype)
    if dtype not in (None, *DTYPES):
        raise ValueError(f"dtype {dtype} is not one of {', '.join(map(str, DTYPES))}")
    if fp8 not in get_args(Fp8Mode):
        raise ValueError(f"fp8 {fp8!r} is not one of {', '.join(get_args(Fp8Mode))}")
    if is_stacked(directory):
        return plan_stacked(directory, cfg, dtype, fp8)
    return plan_hf(directory, read_directory(directory), cfg, dtype, fp8)


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
