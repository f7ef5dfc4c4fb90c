"""The parts of DeepSeek-V4's attention token by token, with rings by position, give what whole sequences give."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv3.config.model import ModelConfig
from dsv3.model.compressed import RowContext, hidden_states, run_compressed
from dsv3.model.decoder import embed, logits
from dsv3.model.layers.compressed_attention import (
    AttendCompressed,
    LayerPlace,
    attended,
    complete,
    compressor_of,
    entry_rotation,
    in_window,
    index_scores,
    rotations,
)
from dsv3.model.layers.compressor import Contribution, finished, pooled, window_rows
from dsv3.model.layers.hyper_connections import Streams
from dsv3.model.layers.linear import Numerics
from dsv3.model.params import CompressorParams, Params
from pallas_kernels import dsa
from tests.dsv3.model.deepseek_v4 import model
from tests.dsv3.model.golden import data, relative_error

State = dict[str, jax.Array]
SPARE = 3  # tokens that a ring keeps beyond what the next token needs, as drafts would use


def empty(cfg: ModelConfig, length: int) -> State:
    """One request's rings and entries in all layers, full of what was there before."""
    attention, d, junk = cfg.compressed, cfg.latent_dim, 1e3
    state = {"window": jnp.full((len(attention.ratios), attention.window + SPARE, d), junk)}
    for ratio in set(attention.ratios) - {0}:
        layers, overlaps = attention.ratios.count(ratio), ratio == attention.sparse_ratio
        for name, width in [(f"{ratio}", d)] + ([(f"{ratio}.index", attention.indexer.head_dim)] if overlaps else []):
            span, C = (2 * ratio if overlaps else ratio) + SPARE, (1 + overlaps) * width
            state[f"{name}.values"] = state[f"{name}.scores"] = jnp.full((layers, span, C), junk)
            state[f"{name}.entries"] = jnp.full((layers, length // ratio, width), junk)
    return state


def extended(
    state: State,
    name: str,
    new: Contribution,
    params: CompressorParams,
    place: LayerPlace,
    cfg: ModelConfig,
    t: jax.Array,
) -> State:
    """Keeps what the token at `t` gives, and the entry that it completes, if any."""
    span, at = state[f"{name}.values"].shape[1], t // place.ratio
    kept = {
        part: state[f"{name}.{part}"].at[place.of_ratio, t % span].set(getattr(new, part)[0])
        for part in ("values", "scores")
    }
    rows = window_rows(place.ratio, at, overlaps=place.ratio == cfg.compressed.sparse_ratio)
    window = Contribution(*(kept[part][place.of_ratio, rows % span] for part in ("values", "scores")))
    made = pooled(window, rows >= 0, params.norm.shape[-1])
    done = finished(
        made[None], params, place.of_ratio, entry_rotation(cfg, at[None] * place.ratio), cfg.rms_norm_eps, made.dtype
    )
    where = jnp.where((t + 1) % place.ratio == 0, at, state[f"{name}.entries"].shape[1])
    entries = state[f"{name}.entries"].at[place.of_ratio, where].set(done[0], mode="drop")
    return {**state, **{f"{name}.{part}": value for part, value in kept.items()}, f"{name}.entries": entries}


def ring_attend(cfg: ModelConfig, t: jax.Array) -> AttendCompressed:
    """Attends with one new token at position `t`."""

    def attend(tokens: Any, params: Any, place: LayerPlace, state: State) -> tuple[jax.Array, State]:
        window = state["window"].at[place.layer, t % state["window"].shape[1]].set(tokens.latent[0])
        slots = jnp.arange(window.shape[1], dtype=jnp.int32)
        positions = t - (t - slots) % window.shape[1]
        state, keys = {**state, "window": window}, window[place.layer]
        visible = in_window(cfg, t[None], positions) & (positions >= 0)
        if (compressor := compressor_of(params, cfg, place.ratio)) is not None:
            name = str(place.ratio)
            state = extended(state, name, tokens.entries, compressor, place, cfg, t)
            entries = state[f"{name}.entries"][place.of_ratio]
            seen = jnp.arange(len(entries)) < complete(place.ratio, t)
            if tokens.index is not None:
                index = tokens.index
                state = extended(state, f"{name}.index", index.keys, params.indexer.compressor, place, cfg, t)
                scores = index_scores(
                    index.q[None], index.weights[None], state[f"{name}.index.entries"][None, place.of_ratio]
                )
                best = cfg.compressed.indexer.topk
                chosen = dsa.select_best(jnp.where(seen, scores[0], -jnp.inf), complete(place.ratio, t)[None], best)
                seen = jnp.zeros(len(entries), jnp.bool).at[chosen[0]].set(True, mode="drop")
            keys, visible = jnp.concatenate([keys, entries]), jnp.concatenate([visible, seen[None]], 1)
        out = attended(tokens.q[None], keys[None], visible[None], params.sink[place.layer], cfg.softmax_scale)
        return out[0], state

    return attend


def step(params: Params, cfg: ModelConfig, token: jax.Array, t: jax.Array, state: State) -> tuple[jax.Array, State]:
    """Returns the logits `[W]` behind one token."""
    numerics = Numerics.from_config(cfg, None)
    attend, valid = ring_attend(cfg, t), jnp.ones(1, jnp.bool)
    context = RowContext(cfg, token[None], t[None], rotations(cfg, t[None]), valid, attend, numerics)
    x = Streams.start(embed(params, token[None]), cfg.hyper_connections.streams)
    x, state, _ = run_compressed(params.moe, context, x, state)
    return logits(params, cfg, hidden_states(params, cfg, x, numerics))[0], state


def test_token_by_token_with_rejected_drafts() -> None:
    """Rings are by position: what wrong tokens wrote is overwritten before anything reads it."""
    params, cfg = model("deepseek_v4")
    tokens, expected = data("deepseek_v4")["input_ids"][0], data("deepseek_v4")["logits"][0]
    run, state, found = jax.jit(step, static_argnames="cfg"), empty(cfg, len(tokens) + SPARE), []
    for t, token in enumerate(tokens):
        one, state = run(params, cfg, jnp.int32(token), jnp.int32(t), state)
        found.append(one)
        for draft in range(1, SPARE + 1) if t % 5 == 0 else ():
            _, state = run(params, cfg, jnp.int32(7 * t % cfg.vocab_size), jnp.int32(t + draft), state)
    assert relative_error(np.stack(found), expected) < 1e-5
