"""The residual: one stream, or several that are mixed around every block (hyper-connections, arXiv:2512.24880).

`start` makes it from the embeddings. `at` returns it at the place of a block, where it has `read`, what the block works
on, and `write`, which adds the block's result. `end` returns what the final norm takes. A single stream is the same at
all places.

Of n streams three things are computed at the place of a block, from all of them: `pre`, by which they add up to what
the block reads; `post`, by which the block's result is added to each; and C, n x n and doubly stochastic, by which the
streams themselves change places. Everything but the streams is float32.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dsv3.config.model import HyperConnections, ModelConfig
from dsv3.model.layers.linear import Index, layer_slice
from dsv3.model.layers.router import router_logits
from dsv3.model.params import MixingParams
from pallas_kernels.backend import Backend
from pallas_kernels.mixing import mixing_weights


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OneStream:
    """The residual stream of T tokens."""

    stream: jax.Array  # [T, D]

    def at(self, params: MixingParams | None, layer: Index, cfg: ModelConfig, backend: Backend | None) -> "OneStream":
        """Returns the stream at the place of a block."""
        return self

    def read(self) -> jax.Array:
        """Returns what a block works on, `[T, D]`, before its norm."""
        return self.stream

    def write(self, *parts: jax.Array) -> "OneStream":
        """Returns the stream after a block, whose result is the sum of `parts` `[T, D]`."""
        return OneStream(sum(parts, self.stream))

    def end(self, params: MixingParams | None, cfg: ModelConfig, backend: Backend | None) -> jax.Array:
        """Returns what the norm behind the last layer takes, `[T, D]`."""
        return self.stream

    def flat(self) -> jax.Array:
        """Returns the stream, `[T, D]`."""
        return self.stream


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Streams:
    """Several residual streams of T tokens, and their means `[T, D]` behind the target layers so far (`with_mean`)."""

    streams: jax.Array  # [T, n, D]
    means: tuple[jax.Array, ...] = ()

    @jax.named_scope("mixing")
    def at(
        self, params: MixingParams | None, layer: Index, cfg: ModelConfig, backend: Backend | None
    ) -> "MixedStreams":
        """Returns the streams at the place of a block, whose mixing is layer `layer` of `params`."""
        assert params is not None  # every place has its own
        hyper = hyper_of(cfg)
        logits = self._logits(params.weight, layer, cfg, backend)
        base, scale = layer_slice(params.base, layer), layer_slice(params.scale, layer)
        how: dict[str, Any] = {"iterations": hyper.sinkhorn_iterations, "eps": hyper.eps, "backend": backend}
        pre, post, between = mixing_weights(logits, base, scale, streams=hyper.streams, **how)
        return MixedStreams(self.streams, _weighted_sum(pre, self.streams), post, between, self.means)

    @jax.named_scope("mixing")
    def end(self, params: MixingParams | None, cfg: ModelConfig, backend: Backend | None) -> jax.Array:
        """Returns what the norm behind the last layer takes, `[T, D]`; `params` have no leading axis of layers."""
        assert params is not None
        logits = self._logits(params.weight[None], 0, cfg, backend)
        return _weighted_sum(jax.nn.sigmoid(logits * params.scale + params.base) + hyper_of(cfg).eps, self.streams)

    def flat(self) -> jax.Array:
        """Returns the streams side by side, `[T, n * D]`."""
        return self.streams.reshape(len(self.streams), -1)

    def with_mean(self) -> "Streams":
        """Returns the streams, with their mean behind those of earlier layers."""
        mean = self.streams.astype(jnp.float32).mean(1).astype(self.streams.dtype)
        return dataclasses.replace(self, means=(*self.means, mean))

    def _logits(self, weight: jax.Array, layer: Index, cfg: ModelConfig, backend: Backend | None) -> jax.Array:
        """Returns the logits float32 `[T, M]` of all streams, over one root mean square of them together."""
        flat = self.flat()
        mean_square = jnp.mean(jnp.square(flat.astype(jnp.float32)), axis=-1, keepdims=True)
        return router_logits(flat, weight, layer, backend) * lax.rsqrt(mean_square + cfg.rms_norm_eps)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MixedStreams:
    """Several streams at the place of a block, between what it reads and what it writes."""

    streams: jax.Array  # [T, n, D]
    collapsed: jax.Array  # [T, D]
    post: jax.Array  # [T, n] float32
    between: jax.Array  # [T, n, n] float32: from stream j, the second axis, to stream k, the third
    means: tuple[jax.Array, ...]

    def read(self) -> jax.Array:
        """Returns what the block works on, `[T, D]`, before its norm."""
        return self.collapsed

    @jax.named_scope("mixing")
    def write(self, *parts: jax.Array) -> Streams:
        """Returns the streams after the block, whose result is the sum of `parts` `[T, D]`."""
        y = jnp.stack([part.astype(jnp.float32) for part in parts]).sum(0)
        # Products and their sum are one kernel on a GPU; a batch of 4 x 4 matrices is not.
        moved = (self.between[..., None] * self.streams.astype(jnp.float32)[:, :, None]).sum(1)
        return Streams((self.post[..., None] * y[:, None] + moved).astype(self.streams.dtype), self.means)


Residual = OneStream | Streams
"""The residual between blocks."""

Block = OneStream | MixedStreams
"""The residual at the place of a block."""


def start(cfg: ModelConfig, embedded: jax.Array) -> Residual:
    """Returns the residual before the first layer, from the embeddings `[T, D]`: they are its one stream, or all."""
    if cfg.hyper_connections is None:
        return OneStream(embedded)
    T, D = embedded.shape
    return Streams(jnp.broadcast_to(embedded[:, None], (T, cfg.hyper_connections.streams, D)))


def residual_of(cfg: ModelConfig, flat: jax.Array) -> Residual:
    """Returns the residual whose `flat` is `[T, D]` of one stream, or `[T, n * D]` of n."""
    if cfg.hyper_connections is None:
        return OneStream(flat)
    return Streams(flat.reshape(len(flat), cfg.hyper_connections.streams, -1))


def hyper_of(cfg: ModelConfig) -> HyperConnections:
    """Returns how the streams of a model that has several are mixed."""
    assert cfg.hyper_connections is not None
    return cfg.hyper_connections


def _weighted_sum(pre: jax.Array, streams: jax.Array) -> jax.Array:
    """Returns the sum of streams `[T, n, D]` by weights `[T, n]`, `[T, D]` in the streams' dtype."""
    return (pre[..., None] * streams.astype(jnp.float32)).sum(1).astype(streams.dtype)
