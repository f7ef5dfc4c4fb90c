"""DeepSeek-V4 with experts on several devices: each rank gets the result of local experts, and the same drafts."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv3.config.model import ModelConfig
from dsv3.engine.communication import Communication
from dsv3.engine.device.sampling import best_tokens
from dsv3.engine.expert_parallel import SpreadParams, expert_parallel_functions
from dsv3.engine.functions import StepFunctions, model_functions
from dsv3.kv_cache import layout
from dsv3.model import DecodeBatch, Params, PrefillBatch
from dsv3.model.schedules import HOOKED, OVERLAPPED, Schedule
from dsv3.model.tensor_parallel import check_shards
from sharding.mesh import RANK_SPEC, rank_mesh
from tests.dsv3.engine.spread import spread_experts
from tests.dsv3.model.deepseek_v4 import with_module, with_stages

RANKS, REDUNDANT, ROWS, S = 2, 4, 48, 2
PROMPTS = (26, 14)
"""The first one is cut where two micro-batches of prefill meet; in decode each has one request."""
PROMPT = sum(PROMPTS)


@functools.cache
def parameters(run: Any = None) -> tuple[Params, ModelConfig]:
    """Layers with entries of both ratios, the first with experts chosen by token, and the drafter, without entries.

    DSpark's stages stand behind the first layer alone: `test_dspark` has the mean behind several.
    """
    if run is run_blocks:
        params, cfg = with_stages("deepseek_v4", layers=(1,))
    else:
        params, cfg = with_module("deepseek_v4", 1, 2)
    return jax.device_get(params), cfg


def batches(cfg: ModelConfig) -> tuple[PrefillBatch, DecodeBatch, Any]:
    """Two requests of 40 tokens per rank with 8 rows of padding, then two tokens; also those that follow these."""
    rng, B = np.random.default_rng(0), len(PROMPTS)
    first = np.full((RANKS, ROWS), -5, np.int32)
    first[:, :PROMPT] = rng.integers(0, cfg.vocab_size, (RANKS, PROMPT))
    after = rng.integers(0, cfg.vocab_size, (RANKS, B, S + 1)).astype(np.int32)
    places = np.concatenate([np.arange(n) for n in (*PROMPTS, ROWS - PROMPT)])
    own = np.tile(np.arange(B, dtype=np.int32), (RANKS, 1))
    of_rank = dict(page_table=own[..., None], window_table=own[..., None], slots=own)
    cu_lengths, lengths = np.cumsum((0, *PROMPTS)), np.array(PROMPTS) + S
    positions, cu_lengths, lengths = (np.tile(a.astype(np.int32), (RANKS, 1)) for a in (places, cu_lengths, lengths))
    chunks = PrefillBatch(first, positions, cu_lengths, np.zeros((RANKS, B), np.int32), **of_rank)
    return chunks, DecodeBatch(after[:, :, :S], lengths, **of_rank), after[:, :, 1:]


def run(functions: StepFunctions, cfg: ModelConfig, params: Any, given: Any) -> Any:
    """Two steps of one rank, and the module behind the second."""
    first, second, following = given
    live = jnp.arange(ROWS)[:, None] < PROMPT
    pool = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), layout.pool(cfg, "float32", 2, 2, 2))
    before = functions.prefill(params, cfg, first, pool)
    after = functions.decode(params, cfg, second, before.pages)
    shifted = dataclasses.replace(second, tokens=following)
    last = functions.draft.predict(params, cfg, shifted, after.pages, after.draft_input)
    found, outs = [jnp.where(live, before.hidden, 0), after.hidden, last.hidden], (before, after, last)
    return found, [out.expert_counts for out in outs], [out.overflows for out in outs]


def run_blocks(functions: StepFunctions, cfg: ModelConfig, params: Any, given: Any) -> Any:
    """A step of one rank, and the block behind it."""
    first, second, following = given
    pool = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), layout.pool(cfg, "float32", 2, 2, 2))
    before, draft, vocabulary = functions.prefill(params, cfg, first, pool), functions.draft, functions.vocabulary
    pool = draft.write(params, cfg, first, before.pages, before.draft_input)
    last = dataclasses.replace(second, tokens=following[:, :1], lengths=second.lengths - (S - 1))
    out = draft.propose(params, cfg, last, pool)
    scores = functions.scores(params, cfg, out.hidden)
    best = lambda scores: best_tokens(vocabulary, scores).tokens  # noqa: E731
    tokens, confidence = draft.choose(params, vocabulary, best, scores, out.draft_input, last.tokens[:, 0])
    return [out.hidden, confidence], [out.expert_counts, tokens], [before.overflows, out.overflows]


@functools.cache
def alone(run: Any) -> Any:
    params, cfg = parameters(run)
    functions = model_functions(drafts=cfg.dspark is None, blocks=cfg.dspark is not None)
    one = jax.jit(functools.partial(run, functions, cfg))
    results = [one(params, jax.tree.map(lambda a, r=rank: a[r], batches(cfg))) for rank in range(RANKS)]
    return jax.tree.map(lambda *parts: np.stack(parts), *results)


def spread(run: Any, schedule: Schedule, transport: str, shards: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(Communication, "schedule", lambda _, tokens, __: schedule if tokens > 1 else HOOKED)
    params, cfg = parameters(run)
    mesh = rank_mesh(jax.devices()[: RANKS * shards], tensor_parallel_size=shards)
    functions = expert_parallel_functions(cfg, mesh, REDUNDANT, transport=transport, dtype=jnp.float32, fp8=False)

    def body(params: SpreadParams, given: Any) -> Any:
        out = run(functions, cfg, params, jax.tree.map(lambda a: a[0], given))
        return jax.tree.map(lambda a: a[None], out)

    specs = functions.param_specs, RANK_SPEC
    step = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=RANK_SPEC, check_vma=False))
    return step(spread_experts(params, cfg, mesh, REDUNDANT), batches(cfg))


def test_every_rank_gets_the_result_of_local_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of three ratios in two micro-batches, experts chosen by token in the first; two devices share a rank."""
    found, counts, overflows = spread(run, OVERLAPPED, "all_to_all", 2, monkeypatch)
    wanted, wanted_counts, _ = alone(run)
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-4 * np.abs(theirs).max())
    assert [count.shape[1:] for count in counts] == [(2, 8), (2, 8), (1, 8)]
    for mine, theirs in zip(counts, wanted_counts, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert not np.asarray(overflows).any()


def test_blocks_of_every_rank_are_those_of_local_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices share a rank, and the words are divided among all four."""
    found, counts, overflows = spread(run_blocks, HOOKED, "ring", 2, monkeypatch)
    wanted, wanted_counts, _ = alone(run_blocks)
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-4 * np.abs(theirs).max())
    assert [count.shape[1:] for count in counts] == [(3, 8), (2, 5)]
    for mine, theirs in zip(counts, wanted_counts, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert not np.asarray(overflows).any()


def test_groups_of_heads_are_not_cut() -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size 4 does not divide o_groups 2"):
        check_shards(dataclasses.replace(parameters()[1], num_attention_heads=8), 4, fp8=False)
