"""The served steps, for one rank: prefill of a ragged batch, decode of a batch, and the MTP module on both."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dsv3.config.model import ModelConfig
from dsv3.kv_cache.layout import Pool, pages_per_layer
from dsv3.model import mtp
from dsv3.model.batch import DecodeBatch, PrefillBatch, StepRows, split_decode, split_prefill
from dsv3.model.decoder import LayerContext, MoeLayers, embed, final_norm, run_decoder
from dsv3.model.forms import paged_attend
from dsv3.model.layers.attention import Attention, LatentAttention, LatentStep
from dsv3.model.layers.compressed_attention import EntryAttention
from dsv3.model.layers.compressed_paged import SplitState, paged_attend_compressed
from dsv3.model.layers.experts import LOCAL_EXPERTS, RoutedExperts, RouterStats
from dsv3.model.layers.hyper_connections import Residual, start
from dsv3.model.layers.linear import Numerics
from dsv3.model.layers.rope import rotation
from dsv3.model.layers.router import by_layer
from dsv3.model.layers.sparse import initial_state, state_pages
from dsv3.model.params import Params
from dsv3.model.schedules import PLAIN, Schedule
from pallas_kernels.backend import Backend
from sharding.experts.placement import Placement


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepOutput:
    """Hidden states after the final norm, the page pool, the counts of the routed experts, and the input of drafts.

    `draft_input` is what the layers that make drafts take of the same rows, `[..., draft_input_width]`: the hidden
    states, or all streams of a model that has several, or their means behind the target layers of `dspark`.

    `expert_counts` is int32 `[num_moe_layers, E]`, (token, expert) pairs without the padding rows; None in a model
    without routed experts. `overflows` is int32 `[]`: how many expert buffers of this device overflowed in all MoE
    layers; None if the experts are local. If it is above 0 on any device, the hidden states of all devices and the
    latents that the step has written are undefined.

    `routed_experts` are the experts that the router chose for each token, before any map to replicas: uint8 or uint16
    `[..., num_moe_layers, K]`, best first, undefined in padding rows; None unless the batch asks for them.
    """

    hidden: Any
    pages: Any
    expert_counts: Any
    overflows: Any
    draft_input: Any
    routed_experts: Any = None

    @classmethod
    def of_rows(
        cls,
        rows: tuple[int, ...],
        hidden: jax.Array,
        draft_input: jax.Array,
        pages: Pool,
        router_stats: RouterStats | None,
    ) -> "StepOutput":
        """Returns the output of a step whose tokens have the shape `rows`, with `router_stats` by layer."""
        hidden, draft_input = (a.reshape(*rows, -1) for a in (hidden, draft_input))
        if router_stats is None:
            return cls(hidden, pages, None, None, draft_input)
        overflows = None if router_stats.overflows is None else router_stats.overflows.sum()
        ids = None if router_stats.ids is None else jnp.moveaxis(router_stats.ids, 0, 1)
        routed_experts = None if ids is None else ids.reshape(*rows, *ids.shape[1:])
        return cls(hidden, pages, router_stats.counts, overflows, draft_input, routed_experts)


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
    routed_experts: jax.Array | None = None,
) -> StepOutput:
    """Runs the chunks of a ragged batch and writes their latents into the pages of their requests.

    Args:
      params: the model, those of this device where `routed.shards` split it; activations have the dtype of
        `params.embed`.
      batch: see `PrefillBatch`. Padding rows write nothing; their hidden states are undefined.
      pages: an array per cache group (`dsv3.kv_cache.layout.pool`). Latents are `[num_cache_layers * pages_per_layer,
        64, R + P]` of the dtype of the activations, or FP8 rows (uint8, see `pallas_kernels.mla`). Donate it: the
        result's `pages` is the same memory.
      backend: implementation of the kernels, or None for the one that suits the device.
      routed: the routed experts: local, or `ExpertParallel`.
      placement: replicas of the main model's experts, for `ExpertParallel`.
      schedule: order of the MoE layers. `OVERLAPPED` needs an even T and a transport with hops, built for T / 2
        tokens.
      routed_experts: `[..., num_moe_layers, K]` of T tokens, as in `forward`; only for the schedule `PLAIN`.

    Returns:
      `StepOutput` with hidden `[T, D]`.
    """
    batches = split_prefill(batch)[::-1] if schedule.micro_batches == 2 else (batch,)
    replayed = None if routed_experts is None else by_layer(routed_experts)
    x, pages, router_stats = _run(params, cfg, batches, pages, backend, routed, placement, schedule.prefill, replayed)
    return _finish(params, cfg, batch, x[::-1], pages, router_stats, backend)


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

    `OVERLAPPED` needs an even B and a transport for B * S / 2 tokens.

    Returns:
      `StepOutput` with hidden `[B, S, D]`. Rows of length 0 write nothing; their hidden states are undefined.
    """
    batches = split_decode(batch) if schedule.micro_batches == 2 else (batch,)
    x, pages, router_stats = _run(params, cfg, batches, pages, backend, routed, placement, schedule.decode)
    return _finish(params, cfg, batch, x, pages, router_stats, backend)


def predict(
    params: Params,
    cfg: ModelConfig,
    batch: PrefillBatch | DecodeBatch,
    pages: Pool,
    draft_input: jax.Array,
    *,
    backend: Backend | None = None,
    routed: RoutedExperts = LOCAL_EXPERTS,
    placement: Placement | None = None,
) -> StepOutput:
    """Runs the first MTP module over the rows of a step; arguments as in `prefill`, with three exceptions.

    Args:
      batch: each row has the token that follows the one of that row in the step.
      draft_input: that of `prefill`, `[T, residual_width]`, of `decode`, `[B, S, residual_width]`, or of this
        function.
      placement: replicas of the module's own experts.

    Returns:
      `StepOutput` of as many rows, whose logits predict the token after the next.
    """
    context = _context(cfg, batch, pages, backend, routed)
    before = draft_input.reshape(-1, draft_input.shape[-1])
    hidden, after, pages, router_stats = mtp.predict(
        params, context, 0, before, batch.tokens.reshape(-1), pages, placement
    )
    by_layer = jax.tree.map(lambda x: x[None], router_stats)
    return StepOutput.of_rows(batch.tokens.shape, hidden, after, pages, by_layer)


def _run(
    params: Params,
    cfg: ModelConfig,
    batches: tuple[PrefillBatch | DecodeBatch, ...],
    pages: Pool,
    backend: Backend | None,
    routed: RoutedExperts,
    placement: Placement | None,
    moe_layers: MoeLayers,
    replayed: jax.Array | None = None,
) -> tuple[tuple[Residual, ...], Any, RouterStats | None]:
    """Runs all layers on the micro-batches of a step; returns residuals, pages and router statistics."""
    assert replayed is None or len(batches) == 1, "replayed experts are not split"
    found = (_context(cfg, part, pages, backend, routed, n) for n, part in enumerate(batches))
    how: dict[str, Any] = {"replayed": replayed, "returns_routed_experts": batches[0].returns_routed_experts}
    contexts = tuple(dataclasses.replace(context, **how) for context in found)
    x = tuple(start(cfg, embed(params, part.tokens.reshape(-1))) for part in batches)
    state = initial_state(cfg, pages, tuple(part.tokens.size for part in batches))
    if cfg.compressed is not None and len(batches) > 1 and isinstance(batches[0], PrefillBatch):
        state = SplitState.of(cfg, pages, batches[0].tokens.size)
    x, state, router_stats = run_decoder(params, contexts, x, state, moe_layers, placement)
    return x, state_pages(state), router_stats


def _context(
    cfg: ModelConfig,
    batch: PrefillBatch | DecodeBatch,
    pages: Pool,
    backend: Backend | None,
    routed: RoutedExperts,
    number: int = 0,
) -> LayerContext:
    """Returns the layer context of a step, or of micro-batch `number` of it.

    Rows whose token is below 0 are drafts that were not made: no later row reads them, and no expert computes them.
    """
    rows, tokens, shards = StepRows.of(batch), batch.tokens.reshape(-1), routed.shards.size
    attention: Attention
    if cfg.compressed is not None:
        attention = EntryAttention.at(cfg, rows.positions, paged_attend_compressed(cfg, batch, rows, backend))
    else:
        step = LatentStep.of(cfg, rows, pages_per_layer(cfg, pages), backend)
        attend = paged_attend(step, batch, cfg.num_attention_heads // shards, number)
        attention = LatentAttention(cfg, rotation(cfg, rows.positions), attend)
    return LayerContext(
        cfg=cfg,
        attention=attention,
        valid=rows.valid & (tokens >= 0),
        numerics=Numerics.from_config(cfg, backend, tokens.size // shards),
        routed=routed,
        tokens=tokens,
    )


def _finish(
    params: Params,
    cfg: ModelConfig,
    batch: PrefillBatch | DecodeBatch,
    parts: tuple[Residual, ...],
    pages: Pool,
    router_stats: RouterStats | None,
    backend: Backend | None,
) -> StepOutput:
    """Returns the output of a step from the residuals of its micro-batches, in the order of their rows."""
    x = jax.tree.map(lambda *each: jnp.concatenate(each), *parts)
    hidden = final_norm(params, cfg, x, backend)
    return StepOutput.of_rows(batch.tokens.shape, hidden, mtp.draft_input(x, hidden), pages, router_stats)
