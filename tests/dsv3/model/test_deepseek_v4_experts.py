"""DeepSeek-V4 with experts on several devices: each rank gets the result of local experts, and the same drafts."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv3.config.engine import ForwardProgram
from dsv3.config.model import ModelConfig
from dsv3.engine import communication
from dsv3.engine.communication import Communication
from dsv3.engine.device.sampling import best_tokens
from dsv3.engine.expert_parallel import SpreadParams, expert_parallel_functions, spread_experts
from dsv3.engine.functions import StepFunctions, model_functions
from dsv3.kv_cache import layout
from dsv3.model import DecodeBatch, Params, PrefillBatch, prefill
from dsv3.model.schedules import HOOKED, OVERLAPPED, PLAIN, Schedule
from dsv3.model.tensor_parallel import check_shards
from sharding.mesh import RANK_SPEC, rank_mesh
from sharding.wire.collectives import Overlap
from tests.dsv3.model import golden
from tests.dsv3.model.deepseek_v4 import with_module, with_stages

RANKS, REDUNDANT, ROWS, PROMPT, S = 2, 4, 48, 40, 2


@functools.cache
def parameters(run: Any = None) -> tuple[Params, ModelConfig]:
    """Layers with entries of both ratios, the first with experts chosen by token, and the drafter, without entries.

    The module stands behind a loop of two turns, DSpark's stages behind two target layers.
    """
    if run is run_blocks:
        params, cfg = with_stages("deepseek_v4", layers=(1, 2))
    else:
        params, cfg = with_module("deepseek_v4", 1, 2, 4)
    return jax.device_get(params), cfg


def batches(cfg: ModelConfig) -> tuple[PrefillBatch, DecodeBatch, Any]:
    """A request of 40 tokens per rank with 8 rows of padding, then two tokens; also those that follow these."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, cfg.vocab_size, (RANKS, PROMPT + S + 1)).astype(np.int32)
    first = np.full((RANKS, ROWS), -5, np.int32)
    first[:, :PROMPT] = tokens[:, :PROMPT]
    positions = np.tile(np.arange(ROWS, dtype=np.int32), (RANKS, 1))
    of_rank = dict(page_table=np.zeros((RANKS, 1, 1), np.int32), slots=np.zeros((RANKS, 1), np.int32))
    of_rank["window_table"] = of_rank["page_table"]
    cu_lengths = np.tile(np.array([0, PROMPT], np.int32), (RANKS, 1))
    chunk = PrefillBatch(first, positions, cu_lengths, np.zeros((RANKS, 1), np.int32), **of_rank)
    decode = DecodeBatch(tokens[:, None, PROMPT : PROMPT + S], np.full((RANKS, 1), PROMPT + S, np.int32), **of_rank)
    return chunk, decode, tokens[:, None, PROMPT + 1 :]


def run(functions: StepFunctions, cfg: ModelConfig, params: Any, given: Any) -> Any:
    """Two steps of one rank, and the module behind the second."""
    first, second, following = given
    live = jnp.arange(ROWS)[:, None] < PROMPT
    pool = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), layout.pool(cfg, "float32", 1, 1, 1))
    before = functions.prefill(params, cfg, first, pool)
    after = functions.decode(params, cfg, second, before.pages)
    shifted = dataclasses.replace(second, tokens=following)
    last = functions.draft.decode(params, cfg, shifted, after.pages, after.draft_input)
    found, outs = [jnp.where(live, before.hidden, 0), after.hidden, last.hidden], (before, after, last)
    return found, [out.expert_counts for out in outs], [out.overflows for out in outs]


def run_blocks(functions: StepFunctions, cfg: ModelConfig, params: Any, given: Any) -> Any:
    """A step of one rank, and the block behind it."""
    first, second, following = given
    pool = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), layout.pool(cfg, "float32", 1, 1, 1))
    before, draft, vocabulary = functions.prefill(params, cfg, first, pool), functions.draft, functions.vocabulary
    pool = draft.write(params, cfg, first, before.pages, before.draft_input)
    last = dataclasses.replace(second, tokens=following[:, :1], lengths=jnp.full(1, PROMPT + 1))
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
    monkeypatch.setattr(Communication, "schedule", lambda *_: schedule)
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
    """Layers of three ratios, experts chosen by token in the first; two devices share a rank."""
    found, counts, overflows = spread(run, HOOKED, "ring", 2, monkeypatch)
    wanted, wanted_counts, _ = alone(run)
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-4 * np.abs(theirs).max())
    assert [count.shape[1:] for count in counts] == [(3, 8), (3, 8), (1, 8)]
    for mine, theirs in zip(counts, wanted_counts, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert not np.asarray(overflows).any()


def test_blocks_of_every_rank_are_those_of_local_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices share a rank, and the words are divided among all four."""
    found, counts, overflows = spread(run_blocks, PLAIN, "ring", 2, monkeypatch)
    wanted, wanted_counts, _ = alone(run_blocks)
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-4 * np.abs(theirs).max())
    assert [count.shape[1:] for count in counts] == [(3, 8), (1, 5)]
    for mine, theirs in zip(counts, wanted_counts, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert not np.asarray(overflows).any()


def test_groups_of_heads_are_not_cut() -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size 4 does not divide o_groups 2"):
        check_shards(dataclasses.replace(parameters()[1], num_attention_heads=8), 4, fp8=False)


def test_layers_of_several_ratios_are_not_overlapped() -> None:
    params, cfg = parameters()
    batch, pool = jax.tree.map(lambda a: a[0], batches(cfg)[0]), layout.pool(cfg, "float32", 1, 1, 1)
    with pytest.raises(ValueError, match="several ratios cannot be overlapped"):
        jax.eval_shape(lambda p, b, g: prefill(p, cfg, b, g, schedule=OVERLAPPED), params, batch, pool)


def test_the_engine_never_splits_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = lambda platform, wanted=True: Overlap.HOOKS if wanted else Overlap.ORDER  # noqa: E731
    monkeypatch.setattr(communication, "resolve_overlap", on_gpu)
    cfg, mesh = parameters()[1], rank_mesh(jax.devices()[:RANKS])
    for other, splits in ((cfg, False), (golden.model("deepseek_v3")[1], True)):
        functions = expert_parallel_functions(other, mesh, 0, transport="all_to_all", fp8=False)
        assert (functions.overlaps(ForwardProgram("prefill", 4096, 4096)) > 0) == splits
