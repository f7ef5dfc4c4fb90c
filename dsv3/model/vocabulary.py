"""Embedding and head, sharded over the devices of a node: the embedding by channels, the head by words.

Both are `[W, D]`: 1.85 GB each in DeepSeek-V3, equal for all ranks. A lookup sends the token ids of all ranks to all
devices, and each returns the channels that it holds. (Split by words, a device would send a row for every token,
`devices` times the bytes.) For logits the hidden states of all ranks go to all devices, and each computes the logits of
its own words for all of them (`scores`). The sampler fetches from other devices what it needs: the best word of each
for greedy sampling, all logits otherwise.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from dsv3.config.model import ModelConfig
from sharding.mesh import AXES, GPU, OF_NODE, OF_RANK, AxisTable, rank_size


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The devices that share embedding and head: `ranks` ranks of `shards` devices each; 1 and 1: nothing is split.

    Methods are called inside `shard_map`. Device t of rank g holds shard `g * shards + t` of channels and words. `Xn`
    is short for `ranks`.
    """

    ranks: int = 1
    shards: int = 1

    @classmethod
    def from_mesh(cls, cfg: ModelConfig, mesh: Mesh) -> "Vocabulary":
        """Returns all devices of a node, or `WHOLE` if they divide neither words nor channels evenly.

        A tied head is not split either: one array would have to be split along both of its axes.
        """
        shared = cls(mesh.shape[GPU], rank_size(mesh))
        divides = cfg.vocab_size % shared.devices == cfg.hidden_size % shared.devices == 0
        return shared if divides and not cfg.tie_word_embeddings else WHOLE

    @property
    def devices(self) -> int:
        return self.ranks * self.shards

    @property
    def table(self) -> AxisTable:
        return AXES if self.devices == 1 else dataclasses.replace(AXES, vocab=OF_NODE, channels=OF_NODE)

    def embed(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
        """Returns the embeddings `[..., D]` of this rank's `tokens` `[...]`, from this device's part `[W, D / n]`.

        Ids out of range are clipped.
        """
        rows = table.at[self.of_all(tokens)].get(mode="clip")
        parts = self._join_rank(self.exchange(rows))
        return jnp.moveaxis(parts, 0, -2).reshape(*tokens.shape, -1)

    @jax.named_scope("head")
    def scores(self, logits: Callable[[jax.Array], jax.Array], hidden: jax.Array) -> jax.Array:
        """Returns the logits of the words of this device's rank, for all ranks: float32 `[Xn, ..., W / Xn]`.

        `logits` computes those of this device's words; `hidden` `[..., D]` are this rank's hidden states.
        """
        return self._join_rank(logits(self.of_all(hidden)))

    def whole(self, scores: jax.Array) -> jax.Array:
        """Returns this rank's logits of all words, `[..., W]`."""
        if self.ranks == 1:
            return scores[0]
        parts = self.exchange(scores)
        return jnp.moveaxis(parts, 0, -2).reshape(*scores.shape[1:-1], -1)

    def exchange(self, x: jax.Array) -> jax.Array:
        """Sends entry g of `x` `[Xn, ...]` to rank g; entry g of the result comes from rank g."""
        return x if self.ranks == 1 else lax.all_to_all(x, GPU, 0, 0, tiled=True)

    def of_all(self, x: jax.Array) -> jax.Array:
        """Gathers `x` `[...]` of all ranks: `[Xn, ...]`."""
        return x[None] if self.ranks == 1 else lax.all_gather(x, GPU)

    def first_word(self, words: int) -> jax.Array | int:
        """Returns the first of the `words` words whose scores this device's rank has."""
        return 0 if self.ranks == 1 else lax.axis_index(GPU) * words

    def _join_rank(self, x: jax.Array) -> jax.Array:
        """Joins the last axis of the devices of a rank."""
        return x if self.shards == 1 else lax.all_gather(x, OF_RANK, axis=x.ndim - 1, tiled=True)


WHOLE = Vocabulary()
"""Embedding and head are not split."""


@dataclasses.dataclass(frozen=True)
class SharedEmbedding:
    """Replaces `Params.embed` if devices share it: this device's channels, `[W, D / n]`."""

    channels: jax.Array
    vocabulary: Vocabulary


def lookup(embedding: jax.Array | SharedEmbedding, tokens: jax.Array) -> jax.Array:
    """Returns the embeddings `[..., D]` of `tokens` `[...]`; ids out of range are clipped."""
    if isinstance(embedding, SharedEmbedding):
        return embedding.vocabulary.embed(embedding.channels, tokens)
    return embedding.at[tokens].get(mode="clip")
