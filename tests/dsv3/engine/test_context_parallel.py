"""Engines whose devices divide the pages of the cache give the texts of the model, with all that moves pages."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv3.checkpoint import load_params
from dsv3.config.engine import EngineConfig
from dsv3.config.hugging_face import load_config
from dsv3.config.options import EngineOptions
from dsv3.engine.build import build_engine, served
from dsv3.engine.components import EngineComponents
from dsv3.engine.engine import Engine
from dsv3.engine.expert_parallel import expert_parallel_functions, spread_experts
from dsv3.engine.memory import local_bytes
from dsv3.kv_cache.tiers import tiers
from dsv3.llm import LLM
from dsv3.model import AttentionForm, forms
from sharding.mesh import rank_mesh
from tests.dsv3.engine.driving import request, run
from tests.dsv3.engine.fewer import one_bucket
from tests.dsv3.model import golden

LIMITS = {"dtype": "float32", "max_num_seqs": 4, "max_model_len": 512, "max_num_batched_tokens": 64}
TWO = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
PROMPTS = [np.random.default_rng(n).integers(4, 48, n).tolist() for n in (300, 129, 120, 70)]
LENGTH = 16


def texts(of: Engine, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    found = run(of, *(request(str(i), p, max_tokens=LENGTH, ignore_eos=True) for i, p in enumerate(prompts)))
    assert (of.stats().pages_in_use, of.stats().recompilations) == (0, 0)
    return [found[str(i)].tokens for i in range(len(prompts))]


def check(answers: list[list[int]], directory: Path, prompts: list[list[int]] = PROMPTS) -> None:
    """Each token is the likeliest of the training pass, which has no cache."""
    cfg = load_config(directory)
    params = load_params(directory, cfg, dtype=jnp.float32, progress=False)
    rows = np.zeros((len(prompts), max(map(len, prompts)) + LENGTH), np.int32)
    for row, prompt, answer in zip(rows, prompts, answers, strict=True):
        row[: len(prompt) + LENGTH] = prompt + answer
    best = np.asarray(golden.run(params, cfg, rows).logits).argmax(-1)
    assert answers == [b[len(p) - 1 :][:LENGTH].tolist() for b, p in zip(best, prompts, strict=True)]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOOKUP_S", "LOAD_S"):
        monkeypatch.setattr(tiers, name, 60.0)
    monkeypatch.setattr(tiers, "is_loading_faster", lambda *_: True)


def build(member: str, **options: object) -> Engine:
    with one_bucket():
        return build_engine(golden.DIRECTORY / member, EngineOptions(**(LIMITS | TWO | options)), progress=False)


def test_drafts_chunks_prefixes_and_tiers_on_two_devices(patient: None) -> None:
    """A page has 128 tokens, of which each device holds 64."""
    drafts = {"method": "mtp", "num_speculative_tokens": 2}
    of = build("glm4_moe_lite", speculative_config=drafts, kv_offloading_size=4e-3)
    first = texts(of)
    check(first, golden.DIRECTORY / "glm4_moe_lite")
    stats = of.stats()
    assert stats.jobs["draft"].num_draft_tokens > 0 and stats.jobs["draft"].num_drafts
    assert texts(of) == first
    assert of.stats().prefix_hits - stats.prefix_hits == 256 + 128
    pages = of.executor.devices.pages["latents"]
    assert pages.shape[2] == of.executor.devices.layout.cfg.page_size == 128
    assert {shard.data.shape[2] for shard in pages.addressable_shards} == {64}
    assert 2 * local_bytes(of.executor.devices.layout.pages) == pages.nbytes
    for cache in of.scheduler.caches:
        while any(of.scheduler.tiers._backlog.values()):
            time.sleep(0.001)
        cache.clear()
    devices = of.executor.devices
    devices.pages = jax.tree.map(lambda leaf: leaf.at[:].set(np.nan), devices.pages)
    hits = of.stats().jobs["pages"].tiers["host"].hits
    assert texts(of) == first
    assert of.stats().jobs["pages"].tiers["host"].hits - hits == 256 + 128


def programs_of_a_gpu(monkeypatch: pytest.MonkeyPatch, form: AttentionForm, capacity: int) -> None:
    """Gives steps the programs of a GPU, which have one form each; `form` materializes up to `capacity` tokens."""
    monkeypatch.setattr(forms, "DYNAMIC_PLATFORMS", ())
    changes = {"capacity": lambda *_: capacity, "is_faster": lambda *_: True}
    monkeypatch.setitem(forms.FORMS, form, dataclasses.replace(forms.FORMS[form], **changes))


def used_forms(of: Engine) -> set[int]:
    return {key.variant for key in of.executor.devices.programs._compiled if key.kind == "prefill"}


def test_top_k_tokens_on_two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The indexer chooses 16 of up to 316 tokens. Short prompts are masked, the rows of longer ones copied."""
    programs_of_a_gpu(monkeypatch, AttentionForm.TOPK_MATERIALIZED, 256)
    of = build("deepseek_v32")
    check(texts(of), golden.DIRECTORY / "deepseek_v32")
    assert used_forms(of) == {AttentionForm.TOPK, AttentionForm.TOPK_MATERIALIZED}


def test_preempted_requests_where_pairs_of_four_devices_divide_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompts have a page each, and their answers go on in a second one: together they need more than there are.

    Keys and values of cached tokens are materialized.
    """
    programs_of_a_gpu(monkeypatch, AttentionForm.MATERIALIZED, 512)
    directory = golden.DIRECTORY / "kimi_k25"
    options = {"tensor_parallel_size": 4, "decode_context_parallel_size": 2, "max_num_batched_tokens": 64}
    cfg, used = served(load_config(directory), EngineOptions(**options)), jax.devices()[:4]
    limits = EngineConfig(max_model_len=400, num_pages=4, max_num_seqs=4, page_size=cfg.page_size, **options)
    mesh = rank_mesh(used, 1, 4, 2)
    functions = expert_parallel_functions(cfg, mesh, 0, dtype=jnp.float32)
    params = load_params(directory, cfg, dtype=jnp.float32, progress=False)
    with one_bucket():
        of = Engine(EngineComponents.on_devices(functions, spread_experts(params, cfg, mesh, 0), cfg, limits, used))
    prompts = [PROMPTS[0][n : n + 120] for n in range(4)]
    check(texts(of, prompts), directory, prompts)
    assert of.stats().preemptions > 0 and AttentionForm.MATERIALIZED in used_forms(of)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: LLM(tensor_parallel_size=4, decode_context_parallel_size=3, progress=False),
            "decode_context_parallel_size: 3 does not divide tensor_parallel_size 4; use a divisor of it",
        ),
        (lambda: EngineOptions(decode_context_parallel_size=2), "2 does not divide tensor_parallel_size 1"),
        (lambda: EngineOptions(decode_context_parallel_size=0), "0 is not at least 1"),
        (lambda: build("deepseek_v4"), "2 is not supported with compressed attention"),
    ],
)
def test_a_size_that_cannot_be_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
