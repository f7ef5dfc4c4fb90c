"""Rotary position embedding of the family: interleaved pairs, plain or with YaRN (arXiv:2309.00071).

Only the indexer of DeepSeek-V3.2 pairs value i with value i + P / 2. A wrong pairing shows only in texts that are
longer than its top-k.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from dsv3.config.model import ModelConfig, QueryScaling, YarnConfig
from pallas_kernels import rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rotation:
    """Cosines and sines `[T, P / 2]` float32 of the angles of T tokens, computed once for all layers.

    `query_scale` `[T]` float32 is a factor on the queries, None in models that have none.
    """

    cos: jax.Array
    sin: jax.Array
    query_scale: jax.Array | None = None


def inverse_frequencies(cfg: ModelConfig) -> np.ndarray:
    """Returns the radians per position of each of the P / 2 pairs, float32.

    Under YaRN pairs that turn often within the original context keep their frequency, pairs that never complete a turn
    are slowed by `factor`, and those between are mixed linearly (for DeepSeek-V3 pairs 10 to 23 of 32).
    """
    width = cfg.qk_rope_head_dim
    plain = 1.0 / np.float32(cfg.rope_theta) ** (np.arange(0, width, 2, dtype=np.float32) / np.float32(width))
    if cfg.yarn is None:
        return plain
    low, high = _correction_range(cfg.yarn, width, cfg.rope_theta)
    ramp = np.clip((np.arange(width // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    return (plain / np.float32(cfg.yarn.factor) * ramp + plain * (1 - ramp)).astype(np.float32)


def _correction_range(yarn: YarnConfig, width: int, theta: float) -> tuple[float, float]:
    def pair_turning(turns: float) -> float:
        span = yarn.original_max_position_embeddings / (turns * 2 * math.pi)
        return width * math.log(span) / (2 * math.log(theta))

    low = max(math.floor(pair_turning(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_turning(yarn.beta_slow)), width - 1)
    return low, high if high > low else low + 0.001  # Kimi-K2 has beta_fast = beta_slow


def amplitude(yarn: YarnConfig | None) -> float:
    """Returns a factor on cosines and sines: the ratio of YaRN's two temperatures, 1 in every published model."""
    if yarn is None or yarn.factor <= 1:
        return 1.0
    return _temperature(yarn.factor, yarn.mscale) / _temperature(yarn.factor, yarn.mscale_all_dim)


def _temperature(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0


def rotation(cfg: ModelConfig, positions: jax.Array) -> Rotation:
    """Returns the rotation of tokens at `positions` [T] int32."""
    angles = positions.astype(jnp.float32)[..., None] * inverse_frequencies(cfg)
    factor = amplitude(cfg.yarn)
    return Rotation(jnp.cos(angles) * factor, jnp.sin(angles) * factor, _query_scale(cfg.query_scaling, positions))


def _query_scale(scaling: QueryScaling | None, positions: jax.Array) -> jax.Array | None:
    """Returns the factor on the queries of each token; inactive rows have negative positions and get 1."""
    if scaling is None:
        return None
    periods = jnp.maximum(positions, 0) // scaling.original_max_position_embeddings
    return 1 + scaling.beta * jnp.log1p(periods.astype(jnp.float32))


def scale_queries(q: jax.Array, by: Rotation) -> jax.Array:
    """Returns `q` `[T, H, N + P]` times the factor of each token; computed in float32, dtype of q."""
    if by.query_scale is None:
        return q
    return (q.astype(jnp.float32) * by.query_scale[:, None, None]).astype(q.dtype)


def rotate(x: jax.Array, by: Rotation) -> jax.Array:
    """Rotates the pairs (x0, x1), (x2, x3), ... of `x` `[T, P]` or `[T, H, P]`; computed in float32, dtype of x."""
    return rows.rotate(x, by.cos, by.sin)


def rotate_halves(x: jax.Array, by: Rotation) -> jax.Array:
    """Rotates the pairs (x0, x[P/2]), (x1, x[P/2 + 1]), ... of `x`, as `rotate` does those of neighbours."""
    heads = (slice(None), *(None,) * (x.ndim - 2))
    cos, sin = by.cos[heads], by.sin[heads]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
