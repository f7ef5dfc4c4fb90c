"""The indexer of sparse attention (DeepSeek-V3.2): small queries and keys whose products rank the cached tokens."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dsv3.config.model import IndexerConfig, ModelConfig
from dsv3.model.layers.linear import Index, Numerics, layer_slice, linear
from dsv3.model.layers.rope import Rotation, rotate, rotate_halves
from dsv3.model.layers.router import router_logits
from dsv3.model.params import IndexerParams
from pallas_kernels.backend import blocks_host, resolve_backend


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """Returns `(x - mean(x)) / std(x) * weight + bias` over the last axis; computed in float32, dtype of x."""
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    return (normed * weight.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


_KEY_NORM_EPS = 1e-6  # of every published model, independent of rms_norm_eps


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IndexTokens:
    """The indexer's queries, keys and weights of T tokens.

    Queries `[T, Hi, Y]` and keys `[T, Y]` are rotated. `weights` `[T, Hi]` float32 are the heads' factors on a score.
    In compressed attention `key` `[T, 4 * Y]` float32 is what is `given` to the indexer's own entries.
    """

    q: jax.Array
    key: jax.Array
    weights: jax.Array


class IndexLayers(NamedTuple):
    """Indexers by cache layer, `[C]` each: whether a layer has one, and its number in its stack and in the key pool.

    A layer without one has the numbers of the closest indexer before it.
    """

    has: np.ndarray  # bool
    in_stack: np.ndarray  # int32
    in_pool: np.ndarray  # int32


@functools.cache
def index_layers(cfg: ModelConfig) -> IndexLayers:
    """Returns the table of a model with sparse attention."""
    has = np.isin(np.arange(cfg.num_cache_layers), cfg.index_layers)
    starts = (*(group.first for group in cfg.layer_groups), cfg.num_hidden_layers, cfg.num_cache_layers)
    stacks = [np.cumsum(has[first:stop]) - 1 for first, stop in itertools.pairwise(starts)]
    in_stack, in_pool = np.maximum(np.concatenate(stacks), 0), np.cumsum(has) - 1
    return IndexLayers(has, in_stack.astype(np.int32), in_pool.astype(np.int32))


def shares_topk(cfg: ModelConfig) -> bool:
    """Returns whether layers without an indexer reuse the top-k indices of an earlier layer."""
    return 0 < len(cfg.index_layers) < cfg.num_cache_layers


def indexer_of(cfg: ModelConfig) -> IndexerConfig:
    """Returns the indexer of a model with sparse attention."""
    assert cfg.indexer is not None
    return cfg.indexer


def lookup(table: np.ndarray, cache_layer: Index) -> Index:
    """Returns an entry of a table by cache layer: a number if the layer is static, else a traced scalar."""
    return table[cache_layer].item() if isinstance(cache_layer, int) else jnp.asarray(table)[cache_layer]


def either(which: Index, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
    """Returns `yes()` or `no()`; if `which` is traced, the device decides while the step runs."""
    if isinstance(which, bool):
        return yes() if which else no()
    return jax.lax.cond(which, yes, no)


@jax.named_scope("indexer")
def index_tokens(
    x: jax.Array,
    q_latent: jax.Array,
    params: IndexerParams | None,
    cache_layer: Index,
    cfg: ModelConfig,
    rotation: Rotation,
    numerics: Numerics,
) -> IndexTokens | None:
    """Projects `x` `[T, D]` and the normed query latents `[T, Q]` for the indexer; returns None in dense attention.

    In a layer without an indexer the result is not used: zeros, or on a GPU the projections by an earlier layer's
    weights (9.4 MB in GLM-5.2, about 2 us to read), because a condition on the device would stall the host.
    """
    if cfg.indexer is None:
        return None
    indexer, has = cfg.indexer, index_layers(cfg).has

    def computed() -> IndexTokens:
        assert params is not None  # a stack that has indexers
        layer = lookup(index_layers(cfg).in_stack, cache_layer)
        q = linear(q_latent, params.q_b, layer, numerics).reshape(len(x), indexer.num_heads, indexer.head_dim)
        key = linear(x, params.k, layer, numerics)
        key = layer_norm(key, layer_slice(params.k_norm, layer), layer_slice(params.k_bias, layer), _KEY_NORM_EPS)
        weights = router_logits(x, params.weights, layer, numerics.backend)
        factor = (indexer.num_heads * indexer.head_dim) ** -0.5
        return IndexTokens(_rotated(q, cfg, rotation), _rotated(key, cfg, rotation), weights * factor)

    def unused() -> IndexTokens:
        q = jnp.zeros((len(x), indexer.num_heads, indexer.head_dim), x.dtype)
        return IndexTokens(q, q[:, 0], jnp.zeros(q.shape[:2]))

    which = params is not None and lookup(has, cache_layer)
    if not isinstance(which, bool) and blocks_host(resolve_backend(requested=numerics.backend)):
        return computed()
    return either(which, computed, unused)


def _rotated(x: jax.Array, cfg: ModelConfig, rotation: Rotation) -> jax.Array:
    """Rotates the first P values of `x` `[..., Y]`: the heads' rotated values are their last."""
    turn, P = rotate if indexer_of(cfg).interleaved else rotate_halves, cfg.qk_rope_head_dim
    return jnp.concatenate([turn(x[..., :P], rotation), x[..., P:]], axis=-1)
