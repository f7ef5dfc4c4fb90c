"""Several residual streams, mixed around every block (manifold-constrained hyper-connections, arXiv:2512.24880).

A token carries n streams. At the place of a block three things are computed from all of them: `pre`, by which they add
up to what the block reads; `post`, by which the block's result is added to each; and C, n x n and doubly stochastic, by
which the streams themselves change places. Everything but the streams is float32.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from dsv3.config.model import HyperConnections, ModelConfig
from dsv3.model.layers.linear import Index, layer_slice
from dsv3.model.layers.router import router_logits
from dsv3.model.params import MixingParams
from pallas_kernels.backend import Backend


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Streams:
    """What T tokens carry from layer to layer: n streams of width D."""

    streams: jax.Array  # [T, n, D]

    @classmethod
    def start(cls, embedded: jax.Array, count: int) -> "Streams":
        """Returns what the first layer gets, from the embeddings `[T, D]`: `count` equal streams."""
        T, D = embedded.shape
        return cls(jnp.broadcast_to(embedded[:, None], (T, count, D)))

    @jax.named_scope("mixing")
    def at(self, params: MixingParams, layer: Index, cfg: ModelConfig, backend: Backend | None) -> "MixedStreams":
        """Returns the streams at the place of a block, whose mixing is layer `layer` of `params`."""
        hyper = hyper_of(cfg)
        n = hyper.streams
        logits = self._logits(params.weight, layer, cfg, backend)
        base, scale = layer_slice(params.base, layer), layer_slice(params.scale, layer)
        pre = jax.nn.sigmoid(logits[:, :n] * scale[0] + base[:n]) + hyper.eps
        post = 2 * jax.nn.sigmoid(logits[:, n : 2 * n] * scale[1] + base[n : 2 * n])
        between = (logits[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(-1, n, n)
        return MixedStreams(self.streams, _weighted_sum(pre, self.streams), post, doubly_stochastic(between, hyper))

    @jax.named_scope("mixing")
    def end(self, params: MixingParams, cfg: ModelConfig, backend: Backend | None) -> jax.Array:
        """Returns what the norm behind the last layer takes, `[T, D]`; `params` have no leading axis of layers."""
        logits = self._logits(params.weight[None], 0, cfg, backend)
        return _weighted_sum(jax.nn.sigmoid(logits * params.scale + params.base) + hyper_of(cfg).eps, self.streams)

    def _logits(self, weight: jax.Array, layer: Index, cfg: ModelConfig, backend: Backend | None) -> jax.Array:
        """Returns the logits float32 `[T, M]` of all streams, over one root mean square of them together."""
        flat = self.streams.reshape(len(self.streams), -1)
        mean_square = jnp.mean(jnp.square(flat.astype(jnp.float32)), axis=-1, keepdims=True)
        return router_logits(flat, weight, layer, backend) * lax.rsqrt(mean_square + cfg.rms_norm_eps)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MixedStreams:
    """The streams around one block, between what it reads and what it writes."""

    streams: jax.Array  # [T, n, D]
    collapsed: jax.Array  # [T, D]
    post: jax.Array  # [T, n] float32
    between: jax.Array  # [T, n, n] float32: from stream j, the second axis, to stream k, the third

    def read(self) -> jax.Array:
        """Returns what the block works on, `[T, D]`, before its norm."""
        return self.collapsed

    @jax.named_scope("mixing")
    def write(self, *parts: jax.Array) -> Streams:
        """Returns the streams after the block, whose result is the sum of `parts` `[T, D]`."""
        y = jnp.stack([part.astype(jnp.float32) for part in parts]).sum(0)
        moved = jnp.einsum("tjk,tjd->tkd", self.between, self.streams.astype(jnp.float32), precision="highest")
        return Streams((self.post[..., None] * y[:, None] + moved).astype(self.streams.dtype))


def doubly_stochastic(logits: jax.Array, hyper: HyperConnections) -> jax.Array:
    """Returns `[T, n, n]` whose rows and columns sum to 1, by Sinkhorn's algorithm; the columns come last.

    The first step over rows is a softmax.
    """
    eps = hyper.eps

    def columns(c: jax.Array) -> jax.Array:
        return c / (c.sum(-2, keepdims=True) + eps)

    def both(_: int, c: jax.Array) -> jax.Array:
        return columns(c / (c.sum(-1, keepdims=True) + eps))

    first = columns(jax.nn.softmax(logits, axis=-1) + eps)
    return lax.fori_loop(1, hyper.sinkhorn_iterations, both, first)


def hyper_of(cfg: ModelConfig) -> HyperConnections:
    """Returns how the streams of a model that has several are mixed."""
    assert cfg.hyper_connections is not None
    return cfg.hyper_connections


def _weighted_sum(pre: jax.Array, streams: jax.Array) -> jax.Array:
    """Returns the sum of streams `[T, n, D]` by weights `[T, n]`, `[T, D]` in the streams' dtype."""
    return (pre[..., None] * streams.astype(jnp.float32)).sum(1).astype(streams.dtype)
