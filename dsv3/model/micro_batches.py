"""The served steps with communication hidden: the contracts of `steps.prefill` and `steps.decode`, overlap inside.

`*_overlapped` cut the batch in two; `*_with_hooks` keep it whole, and hide the combine behind the shared expert.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from dsv3.config import ModelConfig
from dsv3.model.batch import DecodeBatch, PrefillBatch
from dsv3.model.decoder import Step, embed, run_layers
from dsv3.model.expert_parallel import ExpertParallel
from dsv3.model.experts import Tally
from dsv3.model.lane import Lane
from dsv3.model.norm import rms_norm
from dsv3.model.overlap import Layers, decode_layers, hooked_layers, prefill_layers
from dsv3.model.params import Params
from dsv3.model.steps import StepOutput, decode_step, prefill_step
from pallas_kernels.backend import Backend

Runner = Callable[[tuple[Lane, Lane], tuple[jax.Array, jax.Array], jax.Array], Layers]


def prefill_overlapped(
    params: Params,
    cfg: ModelConfig,
    batch: PrefillBatch,
    pages: jax.Array,
    *,
    backend: Backend | None = None,
    routed: ExpertParallel,
) -> StepOutput:
    """As `steps.prefill`, T even; `routed`'s transport is built for T / 2 tokens, and has hops."""
    earlier, later = split_prefill(batch)
    steps = tuple(prefill_step(cfg, half, pages, backend, routed, routed.shards) for half in (later, earlier))
    x = (embed(params, later.tokens), embed(params, earlier.tokens))
    x0, x1, pages, tally = _run(params, cfg, routed, steps, x, pages, prefill_layers)
    return StepOutput.of(rms_norm(jnp.concatenate([x1, x0]), params.norm, cfg.rms_norm_eps), pages, tally)


def decode_overlapped(
    params: Params,
    cfg: ModelConfig,
    batch: DecodeBatch,
    pages: jax.Array,
    *,
    backend: Backend | None = None,
    routed: ExpertParallel,
) -> StepOutput:
    """As `steps.decode`, B even; `routed`'s transport is built for B * S / 2 tokens, and has hops."""
    halves = split_decode(batch)
    steps = tuple(decode_step(cfg, half, pages, backend, routed, routed.shards) for half in halves)
    x = tuple(embed(params, half.tokens.reshape(-1)) for half in halves)
    x0, x1, pages, tally = _run(params, cfg, routed, steps, x, pages, decode_layers)
    hidden = rms_norm(jnp.concatenate([x0, x1]), params.norm, cfg.rms_norm_eps)
    return StepOutput.of(hidden.reshape(*batch.tokens.shape, -1), pages, tally)


def prefill_with_hooks(
    params: Params,
    cfg: ModelConfig,
    batch: PrefillBatch,
    pages: jax.Array,
    *,
    backend: Backend | None = None,
    routed: ExpertParallel,
) -> StepOutput:
    """As `steps.prefill`, with any transport."""
    step = prefill_step(cfg, batch, pages, backend, routed, routed.shards)
    return StepOutput.of(*_run_whole(params, step, routed, embed(params, batch.tokens), pages))


def decode_with_hooks(
    params: Params,
    cfg: ModelConfig,
    batch: DecodeBatch,
    pages: jax.Array,
    *,
    backend: Backend | None = None,
    routed: ExpertParallel,
) -> StepOutput:
    """As `steps.decode`, with any transport."""
    step = decode_step(cfg, batch, pages, backend, routed, routed.shards)
    hidden, pages, tally = _run_whole(params, step, routed, embed(params, batch.tokens.reshape(-1)), pages)
    return StepOutput.of(hidden.reshape(*batch.tokens.shape, -1), pages, tally)


def split_prefill(batch: PrefillBatch) -> tuple[PrefillBatch, PrefillBatch]:
    """The first and second half of the rows; a chunk cut in two finds its first part in the cache as context."""
    T = batch.tokens.shape[0]
    middle = T // 2
    first = jnp.minimum(batch.cu_lengths, middle)
    earlier = dataclasses.replace(
        batch, tokens=batch.tokens[:middle], positions=batch.positions[:middle], cu_lengths=first
    )
    later = dataclasses.replace(
        batch,
        tokens=batch.tokens[middle:],
        positions=batch.positions[middle:],
        cu_lengths=jnp.maximum(batch.cu_lengths, middle) - middle,
        context_lengths=batch.context_lengths + jnp.diff(first),
    )
    return earlier, later


def split_decode(batch: DecodeBatch) -> tuple[DecodeBatch, DecodeBatch]:
    """The first and second half of the requests."""
    middle = batch.lengths.shape[0] // 2
    return jax.tree.map(lambda a: a[:middle], batch), jax.tree.map(lambda a: a[middle:], batch)


def _run(
    params: Params,
    cfg: ModelConfig,
    parallel: ExpertParallel,
    steps: tuple[Step, ...],
    x: tuple[jax.Array, ...],
    pages: jax.Array,
    runner: Runner,
) -> Layers:
    """Dense layers one micro-batch after the other, the one with the earlier tokens first, then the MoE layers."""
    if params.moe is None or not parallel.transport.hops:
        raise ValueError(f"nothing to overlap: {cfg.num_moe_layers} MoE layers, transport {parallel.transport.kind}")
    x0, x1 = x
    if params.dense is not None:
        x1, pages, _ = run_layers(params.dense, steps[1], x1, pages, 0)
        x0, pages, _ = run_layers(params.dense, steps[0], x0, pages, 0)
    zero, one = (Lane(params.moe, step, parallel, cfg.num_dense_layers, n) for n, step in enumerate(steps))
    return runner((zero, one), (x0, x1), pages)


def _run_whole(
    params: Params, step: Step, parallel: ExpertParallel, x: jax.Array, pages: jax.Array
) -> tuple[jax.Array, jax.Array, Tally | None]:
    """As `decoder.run_decoder`."""
    if params.dense is not None:
        x, pages, _ = run_layers(params.dense, step, x, pages, 0)
    tally = None
    if params.moe is not None:
        x, pages, tally = hooked_layers(Lane(params.moe, step, parallel, step.cfg.num_dense_layers), x, pages)
    return rms_norm(x, params.norm, step.cfg.rms_norm_eps), pages, tally
