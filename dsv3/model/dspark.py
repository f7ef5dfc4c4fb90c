"""DSpark: drafts of a whole block in one pass (DeepSeek-V4's final checkpoints, as their reference computes them).

The stages are layers like the model's, which see a window. Their cache has latents of what the model itself has
computed: the means of its streams behind the target layers, projected and normed. A block is the last token and
placeholders. Each of its rows sees the window before the block, and all rows of the block, also those behind it. Row i
gives the scores of draft i + 1, to which a correction adds what the token of row i says about the next one.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dsv3.config.model import WINDOW_LATENTS, DSparkConfig, ModelConfig
from dsv3.kv_cache.layout import Pool
from dsv3.model.batch import DecodeBatch, PrefillBatch, StepRows
from dsv3.model.decoder import LayerContext, Stack, embed, norm, run_layers
from dsv3.model.layers.attention import LayerPlace, Projected
from dsv3.model.layers.cache_rows import CacheRows
from dsv3.model.layers.compressed_attention import EntryAttention, compressed_of, project_latents
from dsv3.model.layers.experts import LOCAL_EXPERTS, RoutedExperts
from dsv3.model.layers.hyper_connections import start
from dsv3.model.layers.linear import Numerics, linear
from dsv3.model.layers.rope import rotation
from dsv3.model.params import CompressedAttentionParams, DSparkParams, Params
from dsv3.model.steps import StepOutput
from dsv3.model.vocabulary import Vocabulary
from pallas_kernels import dense
from pallas_kernels.backend import Backend
from pallas_kernels.compressed import attend_compressed
from pallas_kernels.entries import encode_rows
from pallas_kernels.rows import rms_norm
from sharding.experts.placement import Placement


def write_context(
    params: Params,
    cfg: ModelConfig,
    batch: PrefillBatch | DecodeBatch,
    pages: Pool,
    draft_input: jax.Array,
    *,
    backend: Backend | None = None,
) -> Pool:
    """Writes what the stages see of the tokens of a step, at the tokens' positions; returns the pages.

    Rows of rejected drafts are written too. They are written again before a block sees them.

    Args:
      batch: that of the step; its tokens are not read.
      pages: those that the step has returned. Donate them.
      draft_input: that of the step, `[T, M * D]` or `[B, S, M * D]` of M target layers.

    Raises:
      ValueError: the model has no stages.
    """
    stages, dspark = _stages(params), dspark_of(cfg)
    rows, numerics = StepRows.of(batch), Numerics.from_config(cfg, backend)
    by = rotation(cfg, rows.positions)
    with jax.named_scope("main_proj"):
        projected = linear(draft_input.reshape(-1, draft_input.shape[-1]), stages.main_proj, 0, numerics)
        main = rms_norm(projected, stages.main_norm, 0, cfg.rms_norm_eps, backend=backend)
    for stage in range(dspark.stages):
        latents = project_latents(main, stages.layers.attention, stage, cfg, by, numerics)
        window = CacheRows.of(cfg, WINDOW_LATENTS, pages, rows, cfg.num_hidden_layers + stage)
        new = encode_rows(latents, cfg.kv_lora_rank, window.array.dtype, backend=backend)
        pages = {**pages, WINDOW_LATENTS: window.write_new(new)}
    return pages


def propose(
    params: Params,
    cfg: ModelConfig,
    batch: DecodeBatch,
    pages: Pool,
    *,
    backend: Backend | None = None,
    routed: RoutedExperts = LOCAL_EXPERTS,
    placement: Placement | None = None,
) -> StepOutput:
    """Runs the stages over the blocks of requests, n rows each; the pages are only read.

    Args:
      batch: the last token of each request, `[B, 1]`; `lengths` count it. `write_context` has written the tokens before
        it.
      placement: replicas of the stages' own experts.

    Returns:
      `StepOutput` with hidden `[B, n, D]`, ready for `logits`; its `draft_input` are the states before their norm,
      which `choose` takes.

    Raises:
      ValueError: the model has no stages.
    """
    stages, dspark = _stages(params), dspark_of(cfg)
    block = _block(batch, dspark)
    rows, tokens = StepRows.of(block), block.tokens.reshape(-1)
    attention = EntryAttention.at(cfg, rows.positions, functools.partial(_attend, cfg, rows, pages, backend))
    numerics = Numerics.from_config(cfg, backend, tokens.size // routed.shards.size)
    context = LayerContext(cfg, attention, rows.valid, numerics, routed)
    stack = Stack(stages.layers, cfg.num_hidden_layers, placement)
    x, _, router_stats = run_layers(stack, context, start(cfg, embed(params, tokens)), None)
    states = x.end(stages.head_mixing, cfg, backend)
    hidden = norm(states, stages.norm, 0, context)
    return StepOutput.of_rows(block.tokens.shape, hidden, states, pages, router_stats)


def choose(
    params: Params,
    vocabulary: Vocabulary,
    best: Callable[[jax.Array], jax.Array],
    scores: jax.Array,
    states: jax.Array,
    last: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Chooses drafts from left to right, each by scores that the token before it corrects.

    Args:
      vocabulary: the devices that share the words.
      best: returns the best tokens `[B]` of scores `[Xn, B, W / Xn]`.
      scores: those of the first drafts of a block, `[Xn, B, n, W / Xn]`, from `propose`'s hidden states.
      states: `[B, n, D]`, `draft_input` of `propose`.
      last: `[B]` int32, the requests' last tokens.

    Returns:
      The drafts `[B, n]` int32, and float32 `[B, n]`, how likely each is accepted if those before it are.
    """
    stages, chosen, confidence = _stages(params), [], []

    def correction(embedded: jax.Array) -> jax.Array:
        return dense.plain_gemm(embedded, stages.markov_head, out_dtype=jnp.float32)

    for i in range(states.shape[1]):
        embedded = stages.markov_embed.at[last].get(mode="clip")
        both = jnp.concatenate([states[:, i], embedded], axis=-1).astype(jnp.float32)
        confidence.append(jax.nn.sigmoid((both * stages.confidence[0].astype(jnp.float32)).sum(-1)))
        last = best(scores[:, :, i] + vocabulary.scores(correction, embedded))
        chosen.append(last)
    return jnp.stack(chosen, axis=1), jnp.stack(confidence, axis=1)


def dspark_of(cfg: ModelConfig) -> DSparkConfig:
    """Returns how the stages draft. Raises ValueError for a model without stages."""
    if cfg.dspark is None:
        raise ValueError("the model has no stages of DSpark (dspark is None)")
    return cfg.dspark


def _stages(params: Params) -> DSparkParams:
    if not isinstance(params.mtp, DSparkParams):
        raise ValueError("the parameters have no stages of DSpark; make them of a configuration that has `dspark`")
    return params.mtp


def _block(batch: DecodeBatch, dspark: DSparkConfig) -> DecodeBatch:
    """Returns the batch of the blocks `[B, n]` that begin with the tokens `[B, 1]` of `batch`."""
    n = dspark.block_size
    tokens = jnp.pad(batch.tokens, ((0, 0), (0, n - 1)), constant_values=dspark.noise_token_id)
    lengths = jnp.where(batch.lengths > 0, batch.lengths + (n - 1), 0)
    return dataclasses.replace(batch, tokens=tokens, lengths=lengths)


def _attend(
    cfg: ModelConfig,
    rows: StepRows,
    pages: Pool,
    backend: Backend | None,
    tokens: Projected,
    params: CompressedAttentionParams,
    place: LayerPlace,
    state: Any,
) -> tuple[jax.Array, Any]:
    """Attends to the window before the block, the same for all its rows, and to the whole block; see `Attend`.

    Rows of the block are rounded as those in the cache are.
    """
    cached = CacheRows.of(cfg, WINDOW_LATENTS, pages, rows, place.cache_layer)
    new, window = (
        encode_rows(tokens.latent, cfg.kv_lora_rank, cached.array.dtype, backend=backend),
        compressed_of(cfg).window,
    )
    n, first, before = len(new) // len(rows.ends), rows.firsts[rows.requests], rows.contexts[rows.requests]
    block = -1 - (first[:, None] + jnp.arange(n, dtype=jnp.int32))
    earlier = jnp.maximum(before - window, 0)[:, None] + jnp.arange(window, dtype=jnp.int32)
    seen = jnp.where(rows.valid, n + jnp.minimum(before, window), 0)
    listed = cached.list_rows(rows.requests, earlier, seen)
    listed = dataclasses.replace(listed, numbers=jnp.concatenate([block, listed.numbers], axis=1))
    how: dict[str, Any] = {"scale": cfg.softmax_scale, "plain": cfg.kv_lora_rank, "layer": place.layer}
    out = attend_compressed(tokens.q, params.sink, new, listed, None, **how, backend=backend)
    return out, state
