"""Tensor parallelism: the devices of a rank split attention heads and MLP widths, and share the experts' tokens.

A device holds H / n heads and F / n of the width of dense layers and shared experts, and computes a partial sum of
each block's output, which an all-reduce completes: two per layer. All heads share the latent cache, so every device of
a rank writes and stores all of it: tensor parallelism saves weights and compute, not cache, unless devices divide its
pages (`context_parallel.py`). The routed experts are spread over all devices of all ranks; each device of a rank sends
its part of the rank's tokens to them.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv3.config.model import ModelConfig
from dsv3.model.params import Fp8Weight, Params, ParamSpec, declare
from pallas_kernels.float8 import BLOCK
from sharding.mesh import OF_RANK, is_split


@dataclasses.dataclass(frozen=True)
class Shards:
    """The devices of a rank, inside `shard_map`."""

    size: int

    def sum(self, x: jax.Array) -> jax.Array:
        """Sums the devices' partial results `x`."""
        return x if self.size == 1 else jax.lax.psum(x, OF_RANK)

    def part(self, x: jax.Array, fill: int = 0) -> jax.Array:
        """Returns this device's `ceil(T / size)` rows of `x` `[T, ...]`; the last ones may be padding, of `fill`."""
        if self.size == 1:
            return x
        rows = -(-x.shape[0] // self.size)
        padding = [(0, rows * self.size - x.shape[0])] + [(0, 0)] * (x.ndim - 1)
        padded = jnp.pad(x, padding, constant_values=fill)
        return jax.lax.dynamic_slice_in_dim(padded, jax.lax.axis_index(OF_RANK) * rows, rows)

    def join(self, x: jax.Array, rows: int) -> jax.Array:
        """Joins the parts of all devices, in order: `[rows, ...]`."""
        return x if self.size == 1 else jax.lax.all_gather(x, OF_RANK, axis=0, tiled=True)[:rows]


ONE_DEVICE = Shards(1)


def check_shards(cfg: ModelConfig, shards: int, *, fp8: bool) -> None:
    """Raises ValueError if `shards` devices cannot split the model evenly, or, with `fp8`, in whole blocks."""
    widths = {
        "num_attention_heads": cfg.num_attention_heads,
        "intermediate_size": cfg.intermediate_size if cfg.num_dense_layers else 0,
        "n_shared_experts * moe_intermediate_size": cfg.n_shared_experts * cfg.moe_intermediate_size,
        "o_groups": 0 if cfg.compressed is None else cfg.compressed.output_groups,
    }
    for name, width in widths.items():
        if width % shards:
            raise ValueError(
                f"tensor_parallel_size {shards} does not divide {name} {width}; use a divisor of both, or more "
                "data_parallel_size instead"
            )
    if fp8 and shards > 1:
        for path, spec in jax.tree_util.tree_leaves_with_path(declare(cfg)):
            _check_blocks(jax.tree_util.keystr(path, simple=True, separator="."), spec, cfg, shards)


def _check_blocks(path: str, spec: ParamSpec, cfg: ModelConfig, shards: int) -> None:
    if not spec.quantizable:
        return
    for axis, size in zip(spec.axes, spec.shape, strict=True):
        for run in _runs(axis, size, cfg, shards):
            if run % BLOCK:
                raise ValueError(
                    f"tensor_parallel_size {shards} gives each device {run} rows or columns of {path}, which is no "
                    f"multiple of the FP8 block's {BLOCK}; lower it, or load with fp8='dequantize'"
                )


def _runs(axis: str | None, size: int, cfg: ModelConfig, shards: int) -> tuple[int, ...]:
    """Returns the lengths of the contiguous runs of a split axis that a device holds."""
    if axis == "heads_latent":
        return (size - cfg.latent_dim) // shards, cfg.latent_dim
    if axis == "gate_up":
        return (size // 2 // shards,)
    return (size // shards,) if is_split(axis) else ()


def row_order(spec: ParamSpec, cfg: ModelConfig, shards: int) -> np.ndarray | None:
    """Returns the permutation of the rows of a stack `[L, rows, ...]` for `shards` devices; None for no change.

    After it, the i-th of `shards` equal parts belongs to device i. "gate_up": its gate rows, then its up rows.
    "heads_latent": the rows of its heads, then all latent rows, which are therefore repeated `shards` times.
    """
    if shards == 1 or len(spec.shape) != 3:
        return None
    axis, rows = spec.axes[1], np.arange(spec.shape[1])
    if axis == "gate_up":
        return rows.reshape(2, shards, -1).swapaxes(0, 1).ravel()
    if axis == "heads_latent":
        heads, latent = np.split(rows, [len(rows) - cfg.latent_dim])
        return np.concatenate([np.concatenate([part, latent]) for part in np.split(heads, shards)])
    return None


def arrange(params: Params, cfg: ModelConfig, shards: int) -> Params:
    """Returns the parameters with fused rows reordered for contiguous shards (`row_order`).

    Works on arrays of any kind, and on shapes under `jax.eval_shape`. Raises ValueError as `check_shards`.
    """
    has_fp8 = any(_is_fp8(leaf) for leaf in jax.tree.leaves(params, is_leaf=_is_fp8))
    check_shards(cfg, shards, fp8=has_fp8)
    specs = declare(cfg)
    if params.mtp is None:
        specs = dataclasses.replace(specs, mtp=None)

    def arranged(spec: ParamSpec, leaf: Any) -> Any:
        order = row_order(spec, cfg, shards)
        if order is None:
            return leaf
        if isinstance(leaf, Fp8Weight):
            return Fp8Weight(leaf.data[:, order], leaf.scale[:, order[::BLOCK] // BLOCK])
        return leaf[:, order]

    return jax.tree.map(arranged, specs, params)


def _is_fp8(leaf: Any) -> bool:
    return isinstance(leaf, Fp8Weight)
