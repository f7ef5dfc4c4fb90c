"""DeepSeek-V4 in the engine: its greedy texts, however they are cut, batched, drafted and found again."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zmq

from dsv3.config.engine import EngineConfig
from dsv3.config.model import ModelConfig
from dsv3.config.options import EngineOptions
from dsv3.engine.build import build_engine
from dsv3.engine.components import EngineComponents
from dsv3.engine.engine import Engine
from dsv3.engine.functions import BlockFunctions, in_full_precision, model_functions
from dsv3.kv_cache.events import hash_of
from dsv3.kv_cache.layout import window_pages, window_size
from dsv3.kv_cache.page_keys import extend_keys
from dsv3.model.forward import forward
from dsv3.model.params import Params
from dsv3.scheduler.request import join_routed_experts
from tests.dsv3.engine import fewer
from tests.dsv3.engine.driving import Gathered, request, run
from tests.dsv3.engine.test_kv_events import Router, eventually
from tests.dsv3.model import golden
from tests.dsv3.model.deepseek_v4 import model, with_module, with_stages
from tests.dsv3.model.golden import DIRECTORY

MEMBER = "deepseek_v4"
LAYERS = (2,)
"""The layer before drafters, of the heavy ratio.

`test_context_parallel` has an engine's drafts behind the sparse ratio too, `test_deepseek_v4_steps` rejected ones with
all ratios, and `test_deepseek_v4_experts` blocks behind the sparse one.
"""
LIMITS = {"max_model_len": 512, "num_pages": 16, "max_num_seqs": 4, "max_num_batched_tokens": 300}


def parts(served: tuple[Params, ModelConfig], **changes: object) -> EngineComponents:
    params, cfg = served
    modules, blocks = bool(cfg.num_nextn_predict_layers), cfg.dspark is not None
    limits = LIMITS | {"page_size": cfg.page_size, "window_size": window_size(cfg), "cache_dtype": "float32"} | changes
    limits["draft_block"] = cfg.dspark.block_size if blocks else 0
    limits["num_window_pages"] = window_pages(cfg, "float32", limits["num_pages"], limits["max_num_seqs"])
    functions = in_full_precision(model_functions(drafts=modules, blocks=blocks))
    return EngineComponents.on_devices(functions, params, cfg, EngineConfig(**limits))


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Where the engine publishes its events."""
    sockets = f"ipc://{tmp_path_factory.mktemp('kv')}"
    return {
        "enable_kv_cache_events": True,
        "endpoint": f"{sockets}/events",
        "replay_endpoint": f"{sockets}/replay",
        "topic": "kv@here",
    }


@pytest.fixture(scope="module")
def engine(published: dict) -> Iterator[Engine]:
    """Serves the published form of a checkpoint, in float32."""
    options = EngineOptions(
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=300,
        dtype="float32",
        fp8="dequantize",
        enable_return_routed_experts=True,
        kv_events_config=published,
    )
    with fewer.one_bucket(), fewer.greedy_samplers():
        engine = build_engine(DIRECTORY / MEMBER, options, progress=False)
        engine.warm_up()
    yield engine
    assert engine.events is not None
    engine.events.close()


PROMPTS = [prompt[prompt >= 0].tolist() for prompt in golden.data(MEMBER)["prompts"]]
SOME = PROMPTS[::4]
COUNT = 16


def generated(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """Generates `COUNT` tokens for all prompts at once."""
    found = run(engine, *(request(f"{i}", p, max_tokens=COUNT, ignore_eos=True) for i, p in enumerate(prompts)))
    return [found[f"{i}"].tokens for i in range(len(prompts))]


def test_golden_texts(engine: Engine) -> None:
    assert generated(engine, PROMPTS) == golden.data(MEMBER)["greedy"].tolist()


@functools.partial(jax.jit, static_argnums=1)
def run_again(params: Params, cfg: ModelConfig, text: np.ndarray, routed_experts: np.ndarray) -> jax.Array:
    """The logits of a text with given experts."""
    return forward(params, cfg, text, routed_experts=routed_experts).logits


def check_experts(got: Gathered, params: Params, cfg: ModelConfig, text: np.ndarray, logits: np.ndarray) -> None:
    """A request's experts are the forward pass's own; those of the first layers follow from its tokens."""
    parts = [output.routed_experts for output in got.outputs if output.routed_experts is not None]
    ids = join_routed_experts(parts, text.size)
    every = np.full((1, text.size, *ids.shape[1:]), -1)
    every[0, : len(ids)] = ids
    np.testing.assert_array_equal(run_again(params, cfg, text, every), logits)
    hashed = np.asarray(params.moe.moe.by_token)[:, text[0, : len(ids)]]
    assert len(hashed) == cfg.num_hash_layers > 0
    np.testing.assert_array_equal(ids[:, : len(hashed)], hashed.swapaxes(0, 1))


def check(engine: Engine, prompts: dict[str, list[int]], tokens: int = 40) -> dict[str, int]:
    """Generates answers, compares them with the forward pass over each whole text; returns the cached tokens."""
    how = {"max_tokens": tokens, "ignore_eos": True, "return_routed_experts": True}
    gathered = run(engine, *(request(n, p, **how) for n, p in prompts.items()))
    params, cfg = model(MEMBER)
    for name, prompt in prompts.items():
        text = np.array([[*prompt, *gathered[name].tokens]], np.int32)
        text = np.pad(text, ((0, 0), (0, LIMITS["max_model_len"] - text.shape[1])))
        whole = np.asarray(run_again(params, cfg, text, np.full((1, text.size, cfg.num_moe_layers, 2), -1)))
        logits = whole[0, len(prompt) - 1 :][:tokens]
        chosen = logits[np.arange(tokens), gathered[name].tokens]
        assert np.all(chosen > logits.max(-1) - 1e-4)
        check_experts(gathered[name], params, cfg, text, whole)
    assert engine.stats().recompilations == 0
    return {name: max(output.num_cached_tokens for output in gathered[name].outputs) for name in prompts}


def test_long_prompts_share_a_prefix(engine: Engine) -> None:
    rng = np.random.default_rng(0)
    first, *tails = (rng.integers(2, 64, n).tolist() for n in (290, 180, 60, 150))
    assert check(engine, {"a": [*first, *tails[0]]}) == {"a": 0}
    assert check(engine, {"b": [*first, *tails[1]], "c": [*first, *tails[2]]}) == {"b": 256, "c": 256}


def test_a_router_knows_the_pages_of_256_tokens(engine: Engine, published: dict) -> None:
    """Its key follows from its tokens. Pages of the window, and the state, are in no event."""
    prompt = np.random.default_rng(3).integers(2, 64, 250).tolist()
    answer = run(engine, request("known", prompt, max_tokens=20, ignore_eos=True))["known"].tokens
    keys: list[bytes] = []
    extend_keys(engine.rules.root(""), keys, np.array(prompt + answer, np.int32), 256)
    [cache] = engine.scheduler.caches
    with zmq.Context() as context:
        router = Router(published, 0, context, page_size=256)
        eventually(lambda: router.catch_up() or router.held["GPU"] == {hash_of(key) for key in cache.index._page_of})
        context.destroy(linger=0)
    assert router.spells(hash_of(keys[0])) == (prompt + answer)[:256]
    assert hash_of(keys[0]) in router.held["GPU"]


@pytest.fixture(scope="module")
def drafting() -> Engine:
    """Drafts with the module."""
    given = {"method": "mtp", "num_speculative_tokens": 2}
    with fewer.one_bucket(), fewer.greedy_samplers():
        engine = Engine(parts(with_module(MEMBER, *LAYERS), speculative_config=given, tokens_per_row=3))
        engine.warm_up()
    return engine


@pytest.fixture(scope="module")
def texts(drafting: Engine) -> list[list[int]]:
    return generated(drafting, SOME)


def test_drafts_of_the_module_change_no_text(drafting: Engine, texts: list[list[int]]) -> None:
    """Each token is the likeliest of the forward pass."""
    drafts = drafting.stats().jobs["draft"]
    assert 0 < drafts.num_accepted_tokens < drafts.num_draft_tokens
    rows = np.zeros((len(texts), max(map(len, SOME)) + COUNT), np.int32)
    for row, prompt, text in zip(rows, SOME, texts, strict=True):
        row[: len(prompt) + COUNT] = prompt + text
    logits = np.asarray(golden.run(*model(MEMBER, *LAYERS), rows).logits)
    for found, prompt, text in zip(logits, SOME, texts, strict=True):
        likely = found[len(prompt) - 1 :][:COUNT]
        assert np.all(likely[np.arange(COUNT), text] > likely.max(-1) - 1e-4)


class Blocks:
    """An engine whose stages know what often follows a token in `texts`, and the drafts that they chose."""

    def __init__(self, texts: list[list[int]]) -> None:
        params, cfg = with_stages(MEMBER, markov_rank=64, layers=LAYERS)
        follows = np.zeros((64, 64), np.float32)
        for text in texts:
            np.add.at(follows, (text[1:], text[:-1]), 10)
        mtp = dataclasses.replace(params.mtp, markov_embed=jnp.eye(64), markov_head=jnp.asarray(follows))
        served = dataclasses.replace(params, mtp=mtp), cfg
        components = parts(served, speculative_config={"method": "dspark"}, tokens_per_row=6)
        draft = components.functions.draft
        assert isinstance(draft, BlockFunctions)
        recorded = dataclasses.replace(draft, choose=functools.partial(self._choose, draft.choose))
        functions = dataclasses.replace(components.functions, draft=recorded)
        with fewer.one_bucket(), fewer.greedy_samplers():
            self.engine = Engine(dataclasses.replace(components, functions=functions))
            self.engine.warm_up()
        self.drafts: list[list[int]] = []

    def _choose(self, choose: Any, *arguments: Any) -> Any:
        drafts, confidence = choose(*arguments)
        jax.debug.callback(lambda row: self.drafts.append(row.tolist()), drafts[0], ordered=False)
        return drafts, confidence

    def of_alone(self, prompt: list[int]) -> tuple[int, list[list[int]]]:
        """Generates a few tokens for a prompt; returns how many of its tokens are cached, and all drafts."""
        jax.effects_barrier()
        self.drafts.clear()
        found = run(self.engine, request("alone", prompt, max_tokens=4, ignore_eos=True))["alone"]
        jax.effects_barrier()
        return found.outputs[0].num_cached_tokens, list(self.drafts)


@pytest.fixture(scope="module")
def blocks(texts: list[list[int]]) -> Blocks:
    return Blocks(texts)


def test_drafts_of_blocks_change_no_text(blocks: Blocks, texts: list[list[int]]) -> None:
    assert generated(blocks.engine, SOME) == texts
    drafts = blocks.engine.stats().jobs["draft"]
    assert 0 < drafts.num_accepted_tokens < drafts.num_draft_tokens < 5 * drafts.num_drafts  # some rows are cut
    assert blocks.engine.stats().recompilations == 0


def test_blocks_see_the_window_of_a_prefix_that_is_found_again(blocks: Blocks) -> None:
    """The last tokens of the cached page are within the window of the first blocks."""
    prompts = [np.random.default_rng(seed).integers(2, 64, 258).tolist() for seed in range(3)]
    cold = [blocks.of_alone(prompt) for prompt in prompts]
    assert [cached for cached, _ in cold] == [0, 0, 0]
    assert [blocks.of_alone(prompt) for prompt in prompts] == [(256, drafts) for _, drafts in cold]
