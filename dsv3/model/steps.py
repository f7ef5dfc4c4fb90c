"""The two served steps, for one rank: prefill of a ragged batch and decode of a batch of requests."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dsv3.config import ModelConfig
from dsv3.model.attention import decode_attend, decode_positions, prefill_attend
from dsv3.model.batch import DecodeBatch, PrefillBatch
from dsv3.model.decoder import Step, embed, run_decoder
from dsv3.model.experts import RoutedExperts, Tally, moe
from dsv3.model.linear import Numerics
from dsv3.model.params import Params
from dsv3.model.rope import rotation
from dsv3.model.tensor_parallel import ONE_DEVICE, Shards
from pallas_kernels.backend import Backend


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepOutput:
    """Hidden states after the final norm, the page pool, and what the routed experts counted.

    `expert_counts` is int32 `[num_moe_layers, E]`, (token, expert) pairs without the padding rows; None in a model
    without routed experts. `rounds` is int32 `[2]`: rounds of the transport's first and second hop in all MoE layers
    together, 0 for a hop it does not have; None where the experts are local.
    """

    hidden: Any
    pages: Any
    expert_counts: Any
    rounds: Any

    @classmethod
    def of(cls, hidden: jax.Array, pages: jax.Array, tally: Tally | None) -> "StepOutput":
        """From the experts' tally by layer."""
        if tally is None:
            return cls(hidden, pages, None, None)
        rounds = None if tally.rounds is None else tally.rounds.sum(axis=0)
        return cls(hidden, pages, tally.counts, rounds)


def prefill(
    params: Params,
    cfg: ModelConfig,
    batch: PrefillBatch,
    pages: jax.Array,
    *,
    backend: Backend | None = None,
    routed: RoutedExperts = moe,
    shards: Shards = ONE_DEVICE,
) -> StepOutput:
    """Runs the chunks of a ragged batch and writes their latents into the pages of their requests.

    Args:
      params: the model; activations have the dtype of `params.embed`.
      batch: see `PrefillBatch`. Padding rows write nothing; their hidden states mean nothing.
      pages: `[num_cache_layers * pages_per_layer, 64, R + P]` of the dtype of the activations, or FP8 rows (uint8,
        see `pallas_kernels.mla`). Donate it: the result's `pages` is the same memory.
      backend: implementation of the kernels, or None for the one that suits the device.
      routed: the routed experts, on this device unless an `ExpertParallel` carries rows to where they live.
      shards: the devices that split the model's heads and widths; `params` are this one's.

    Returns:
      `StepOutput` with hidden `[T, D]`.
    """
    step = prefill_step(cfg, batch, pages, backend, routed, shards)
    return StepOutput.of(*run_decoder(params, step, embed(params, batch.tokens), pages))


def decode(
    params: Params,
    cfg: ModelConfig,
    batch: DecodeBatch,
    pages: jax.Array,
    *,
    backend: Backend | None = None,
    routed: RoutedExperts = moe,
    shards: Shards = ONE_DEVICE,
) -> StepOutput:
    """Advances every request of a batch by its S query tokens; arguments as in `prefill`.

    Returns:
      `StepOutput` with hidden `[B, S, D]`. Rows of length 0 write nothing; their hidden states mean nothing.
    """
    step = decode_step(cfg, batch, pages, backend, routed, shards)
    x = embed(params, batch.tokens.reshape(-1))
    hidden, pages, tally = run_decoder(params, step, x, pages)
    return StepOutput.of(hidden.reshape(*batch.tokens.shape, -1), pages, tally)


def prefill_step(
    cfg: ModelConfig,
    batch: PrefillBatch,
    pages: jax.Array,
    backend: Backend | None,
    routed: RoutedExperts,
    shards: Shards = ONE_DEVICE,
) -> Step:
    """What the layers of a prefill step have in common; arguments as in `prefill`."""
    rows = jnp.arange(batch.tokens.shape[0], dtype=jnp.int32)
    return Step(
        cfg=cfg,
        rotation=rotation(cfg, batch.positions),
        attend=prefill_attend(cfg, batch, _pages_per_layer(cfg, pages), backend),
        valid=rows < batch.cu_lengths[-1],
        numerics=Numerics.of(cfg, backend, batch.tokens.size // shards.size),
        routed=routed,
        shards=shards,
    )


def decode_step(
    cfg: ModelConfig,
    batch: DecodeBatch,
    pages: jax.Array,
    backend: Backend | None,
    routed: RoutedExperts,
    shards: Shards = ONE_DEVICE,
) -> Step:
    """What the layers of a decode step have in common; arguments as in `decode`."""
    positions = decode_positions(batch).reshape(-1)
    return Step(
        cfg=cfg,
        rotation=rotation(cfg, positions),
        attend=decode_attend(
            cfg, batch, _pages_per_layer(cfg, pages), backend, heads=cfg.num_attention_heads // shards.size
        ),
        valid=positions >= 0,
        numerics=Numerics.of(cfg, backend, batch.tokens.size // shards.size),
        routed=routed,
        shards=shards,
    )


def _pages_per_layer(cfg: ModelConfig, pages: jax.Array) -> int:
    if pages.shape[0] % cfg.num_cache_layers:
        raise ValueError(f"the {pages.shape[0]} pages of the pool must divide by {cfg.num_cache_layers} cache layers")
    return pages.shape[0] // cfg.num_cache_layers
