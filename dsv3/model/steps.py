"""The served steps, for one rank: prefill of a ragged batch, decode of a batch, and the MTP module on both."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dsv3.config.model import ModelConfig
from dsv3.kv_cache.layout import Pool, pages_per_layer
from dsv3.model import mtp
from dsv3.model.batch import DecodeBatch, PrefillBatch, split_decode, split_prefill
from dsv3.model.decoder import LayerContext, MoeLayers, Residual, embed, final_norm, run_decoder
from dsv3.model.forms import decode_attend, prefill_attend
from dsv3.model.layers.attention import decode_positions
from dsv3.model.layers.experts import LOCAL_EXPERTS, RoutedExperts, RouterStats
from dsv3.model.layers.linear import Numerics
from dsv3.model.layers.rope import rotation
from dsv3.model.layers.sparse import begin, pages_of
from dsv3.model.params import Params
from dsv3.model.schedules import PLAIN, Schedule
from pallas_kernels.backend import Backend
from sharding.experts.placement import Placement


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepOutput:
    """Hidden states after the final norm, the page pool, and the counts of the routed experts.

    `expert_counts` is int32 `[num_moe_layers, E]`, (token, expert) pairs without the padding rows; None in a model
    without routed experts. `overflows` is int32 `[]`: how often, in all MoE layers, this device had more rows to send
    or pairs to compute than buffers hold; None where the experts are local. Where it is above 0 on any device, the
    hidden states of all mean nothing, and so do the latents that the step has written.
    """

    hidden: Any
    pages: Any
    expert_counts: Any
    overflows: Any

    @classmethod
    def from_router_stats(cls, hidden: jax.Array, pages: Pool, router_stats: RouterStats | None) -> "StepOutput":
        """Returns the output of a step whose experts gave `router_stats` by layer."""
        if router_stats is None:
            return cls(hidden, pages, None, None)
        overflows = None if router_stats.overflows is None else router_stats.overflows.sum()
        return cls(hidden, pages, router_stats.counts, overflows)


def prefill(
    params: Params,
    cfg: ModelConfig,
    batch: PrefillBatch,
    pages: Pool,
    *,
    backend: Backend | None = None,
    routed: RoutedExperts = LOCAL_EXPERTS,
    placement: Placement | None = None,
    schedule: Schedule = PLAIN,
) -> StepOutput:
    """Runs the chunks of a ragged batch and writes their latents into the pages of their requests.

    Args:
      params: the model, those of this device where `routed.shards` split it; activations have the dtype of
        `params.embed`.
      batch: see `PrefillBatch`. Padding rows write nothing; their hidden states mean nothing.
      pages: an array per cache group (`dsv3.kv_cache.layout.pool`). Latents are `[num_cache_layers * pages_per_layer,
        64, R + P]` of the dtype of the activations, or FP8 rows (uint8, see `pallas_kernels.mla`). Donate it: the
        result's `pages` is the same memory.
      backend: implementation of the kernels, or None for the one that suits the device.
      routed: the routed experts, on this device unless an `ExpertParallel` carries rows to where they live.
      placement: where the replicas of the main model's experts stand, for `ExpertParallel`.
      schedule: order of the MoE layers. With `OVERLAPPED` T is even, and the transport, which has hops, is built for
        T / 2 tokens.

    Returns:
      `StepOutput` with hidden `[T, D]`.
    """
    batches = split_prefill(batch)[::-1] if schedule.micro_batches == 2 else (batch,)
    x, pages, router_stats = _run(params, cfg, batches, pages, backend, routed, placement, schedule.prefill)
    return StepOutput.from_router_stats(final_norm(params, cfg, _together(x[::-1]), backend), pages, router_stats)


def decode(
    params: Params,
    cfg: ModelConfig,
    batch: DecodeBatch,
    pages: Pool,
    *,
    backend: Backend | None = None,
    routed: RoutedExperts = LOCAL_EXPERTS,
    placement: Placement | None = None,
    schedule: Schedule = PLAIN,
) -> StepOutput:
    """Advances every request of a batch by its S query tokens; arguments as in `prefill`.

    With the schedule `OVERLAPPED` B is even, and the transport is built for B * S / 2 tokens.

    Returns:
      `StepOutput` with hidden `[B, S, D]`. Rows of length 0 write nothing; their hidden states mean nothing.
    """
    batches = split_decode(batch) if schedule.micro_batches == 2 else (batch,)
    x, pages, router_stats = _run(params, cfg, batches, pages, backend, routed, placement, schedule.decode)
    hidden = final_norm(params, cfg, _together(x), backend)
    return StepOutput.from_router_stats(hidden.reshape(*batch.tokens.shape, -1), pages, router_stats)


def predict(
    params: Params,
    cfg: ModelConfig,
    batch: PrefillBatch | DecodeBatch,
    pages: Pool,
    hidden: jax.Array,
    *,
    backend: Backend | None = None,
    routed: RoutedExperts = LOCAL_EXPERTS,
    placement: Placement | None = None,
) -> StepOutput:
    """Runs the first MTP module over the rows of a step; arguments as in `prefill` but for three.

    Args:
      batch: its tokens are the next ones: each row has the token that follows the one of that row in the step.
      hidden: `[T, D]` of `prefill` or `[B, S, D]` of `decode`, or of this function.
      placement: where the replicas of the module's own experts stand.

    Returns:
      `StepOutput` with hidden of the same shape, whose logits predict the token after the next.
    """
    context = _context(cfg, batch, pages, backend, routed)
    flat = hidden.reshape(-1, hidden.shape[-1])
    out, pages, router_stats = mtp.predict(params, context, 0, flat, batch.tokens.reshape(-1), pages, placement)
    return StepOutput.from_router_stats(out.reshape(hidden.shape), pages, jax.tree.map(lambda x: x[None], router_stats))


def _run(
    params: Params,
    cfg: ModelConfig,
    batches: tuple[PrefillBatch | DecodeBatch, ...],
    pages: Pool,
    backend: Backend | None,
    routed: RoutedExperts,
    placement: Placement | None,
    moe_layers: MoeLayers,
) -> tuple[tuple[Residual, ...], Any, RouterStats | None]:
    """Runs all layers on the micro-batches of a step; returns their residuals, the pages and the experts' tally."""
    contexts = tuple(_context(cfg, part, pages, backend, routed, n) for n, part in enumerate(batches))
    x = tuple(Residual.start(embed(params, part.tokens.reshape(-1))) for part in batches)
    state = begin(cfg, pages, tuple(part.tokens.size for part in batches))
    x, state, router_stats = run_decoder(params, contexts, x, state, moe_layers, placement)
    return x, pages_of(state), router_stats


def _context(
    cfg: ModelConfig,
    batch: PrefillBatch | DecodeBatch,
    pages: Pool,
    backend: Backend | None,
    routed: RoutedExperts,
    number: int = 0,
) -> LayerContext:
    """Returns what the layers of a step, or of micro-batch `number` of it, have in common."""
    per_layer, shards = pages_per_layer(cfg, pages), routed.shards.size
    if isinstance(batch, DecodeBatch):
        positions = decode_positions(batch).reshape(-1)
        turn, heads = rotation(cfg, positions), cfg.num_attention_heads // shards
        attend = decode_attend(cfg, batch, per_layer, backend, heads, number)
        valid = positions >= 0
    else:
        rows = jnp.arange(batch.tokens.shape[0], dtype=jnp.int32)
        turn = rotation(cfg, batch.positions)
        attend = prefill_attend(cfg, batch, per_layer, backend, number)
        valid = rows < batch.cu_lengths[-1]
    return LayerContext(
        cfg=cfg,
        rotation=turn,
        attend=attend,
        valid=valid,
        numerics=Numerics.from_config(cfg, backend, batch.tokens.size // shards),
        routed=routed,
    )


def _together(x: tuple[Residual, ...]) -> Residual:
    """Returns the residual of the rows of all micro-batches."""
    return jax.tree.map(lambda *each: jnp.concatenate(each), *x)
