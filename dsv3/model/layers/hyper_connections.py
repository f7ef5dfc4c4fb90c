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

from dsv3.config.model import HyperConnections, ModelConfig
from dsv3.model.layers.linear import Index, QuantizedRows, Rows
from dsv3.model.params import MixingParams
from pallas_kernels.backend import Backend, resolve_backend
from pallas_kernels.mixing import read_streams, stream_logits, weighted_sum, write_streams
from pallas_kernels.rows import rms_norm


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OneStream:
    """The residual stream of T tokens."""

    stream: jax.Array  # [T, D]

    def at(self, *_: Any) -> "OneStream":
        """Returns the stream at the place of a block; takes what `Streams.at` does."""
        return self

    def idle(self) -> "OneStream":
        """Returns the stream at the place of a block whose result is zero."""
        return self

    def read(self, weight: jax.Array, layer: Index, eps: float, backend: Backend | None) -> jax.Array:
        """Returns what a block works on, `[T, D]`, normed by layer `layer` of `weight` `[L, D]`."""
        return rms_norm(self.stream, weight, layer, eps, backend=backend)

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
        self,
        params: MixingParams | None,
        norm: jax.Array,
        layer: Index,
        cfg: ModelConfig,
        backend: Backend | None,
        ue8m0: bool | None = None,
    ) -> "MixedStreams":
        """Returns the streams at the place of a block: its mixing and norm are layer `layer` of `params` and `norm`.

        With `ue8m0` what the block reads is quantized too, with scales of that kind.
        """
        assert params is not None  # every place has its own
        hyper = hyper_of(cfg)
        how: dict[str, Any] = {"iterations": hyper.sinkhorn_iterations, "eps": hyper.eps, "norm_eps": cfg.rms_norm_eps}
        arrays = self.streams, params.weight, params.base, params.scale, norm
        found = read_streams(*arrays, layer, **how, ue8m0=ue8m0, backend=backend)
        normed = found.normed if found.quantized is None else QuantizedRows(found.normed, *found.quantized)
        return MixedStreams(self.streams, normed, found.post, found.between, self.means, backend)

    @jax.named_scope("mixing")
    def end(self, params: MixingParams | None, cfg: ModelConfig, backend: Backend | None) -> jax.Array:
        """Returns what the norm behind the last layer takes, `[T, D]`; `params` have no leading axis of layers."""
        assert params is not None
        backend = resolve_backend(requested=backend)
        logits = stream_logits(self.streams, params.weight[None], 0, cfg.rms_norm_eps, backend)
        return weighted_sum(jax.nn.sigmoid(logits * params.scale + params.base) + hyper_of(cfg).eps, self.streams)

    def flat(self) -> jax.Array:
        """Returns the streams side by side, `[T, n * D]`."""
        return self.streams.reshape(len(self.streams), -1)

    def with_mean(self) -> "Streams":
        """Returns the streams, with their mean behind those of earlier layers."""
        mean = self.streams.astype(jnp.float32).mean(1).astype(self.streams.dtype)
        return dataclasses.replace(self, means=(*self.means, mean))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MixedStreams:
    """Several streams at the place of a block, between what it reads and what it writes."""

    streams: jax.Array  # [T, n, D]
    normed: Rows  # [T, D]
    post: jax.Array  # [T, n] float32
    between: jax.Array  # [T, n, n] float32: from stream j, the second axis, to stream k, the third
    means: tuple[jax.Array, ...]
    backend: Backend | None = dataclasses.field(metadata={"static": True})

    def read(self, weight: jax.Array, layer: Index, eps: float, backend: Backend | None) -> Rows:
        """Returns what the block works on, `[T, D]`, which was normed where it was read."""
        return self.normed

    def idle(self) -> "MixedStreams":
        """Returns the streams at the place of a block whose result is zero, and which leaves them as they are."""
        between = jnp.broadcast_to(jnp.eye(self.between.shape[-1], dtype=jnp.float32), self.between.shape)
        return dataclasses.replace(self, post=jnp.zeros_like(self.post), between=between)

    @jax.named_scope("mixing")
    def write(self, *parts: jax.Array) -> Streams:
        """Returns the streams after the block, whose result is the sum of `parts` `[T, D]`."""
        streams = write_streams(self.streams, self.post, self.between, *parts, backend=self.backend)
        return Streams(streams, self.means)


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
