"""Engines whose devices divide the pages of the cache give the texts of the model, with all that moves pages."""

import dataclasses
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from dsv3.config.engine import EngineConfig
from dsv3.config.hugging_face import load_config
from dsv3.config.identity import model_identity
from dsv3.config.options import EngineOptions
from dsv3.engine.build import build_engine, served
from dsv3.engine.components import EngineComponents
from dsv3.engine.engine import Engine
from dsv3.engine.expert_parallel import expert_parallel_functions
from dsv3.engine.memory import local_bytes
from dsv3.kv_cache.layout import window_pages, window_size
from dsv3.kv_cache.tiers import tiers
from dsv3.llm import LLM
from dsv3.model import AttentionForm, forms
from dsv3.model.forward import forward
from sharding.mesh import rank_mesh
from tests.dsv3.engine.driving import request, run
from tests.dsv3.engine.fewer import one_bucket
from tests.dsv3.engine.spread import spread_experts
from tests.dsv3.model import golden
from tests.dsv3.model.deepseek_v4 import with_module

LIMITS = {"dtype": "float32", "max_num_seqs": 4, "max_model_len": 512, "max_num_batched_tokens": 64}
TWO = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
PROMPTS = [np.random.default_rng(n).integers(4, 48, n).tolist() for n in (300, 129, 120, 70)]
LENGTH, REDUNDANT = 16, 2
MODULE = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}, "tokens_per_row": 3}


def texts(of: Engine, prompts: list[list[int]] = PROMPTS, pages_from: str | None = None) -> list[list[int]]:
    items = [request(str(i), p, max_tokens=LENGTH, ignore_eos=True) for i, p in enumerate(prompts)]
    found = run(of, *(msgspec.structs.replace(item, pages_from=pages_from) for item in items))
    assert (of.stats().pages_in_use, of.stats().recompilations) == (0, 0)
    return [found[str(i)].tokens for i in range(len(prompts))]


def check(answers: list[list[int]], member: str, prompts: list[list[int]] = PROMPTS) -> None:
    """Each token is the likeliest of the training pass, which has no cache."""
    params, cfg = golden.model(member)
    rows = np.zeros((len(PROMPTS), len(PROMPTS[0]) + LENGTH), np.int32)  # one shape for all prompts
    for row, prompt, answer in zip(rows[: len(prompts)], prompts, answers, strict=True):
        row[: len(prompt) + LENGTH] = prompt + answer
    best = np.asarray(golden.run(params, cfg, rows).logits).argmax(-1)
    assert answers == [b[len(p) - 1 :][:LENGTH].tolist() for b, p in zip(best[: len(prompts)], prompts, strict=True)]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOOKUP_S", "LOAD_S", "FETCH_S"):
        monkeypatch.setattr(tiers, name, 60.0)
    monkeypatch.setattr(tiers, "is_loading_faster", lambda *_: True)


def build(member: str, **options: object) -> Engine:
    with one_bucket():
        return build_engine(golden.DIRECTORY / member, EngineOptions(**(LIMITS | TWO | options)), progress=False)


def clear(of: Engine) -> None:
    """Forgets cached pages and overwrites them: what a request finds then comes from another tier."""
    for cache in of.scheduler.caches:
        while any(of.scheduler.tiers._backlog.values()):
            time.sleep(0.001)
        cache.clear()
    devices = of.executor.devices
    devices.pages = jax.tree.map(lambda leaf: leaf.at[:].set(np.nan), devices.pages)


def test_deepseek_v4_continues_pages_of_an_instance_on_two_devices(patient: None, tmp_path: Path) -> None:
    """A page has 512 tokens: 64 entries of each device, and 2 where all are seen. Both have window and state.

    One instance computes a prompt, in chunks, and another continues it. Of the next prompts some are pre-empted. Both
    instances have drafts. The second one moves experts from device to device meanwhile: of a layer whose experts are
    chosen by token, of another, and of the module.
    """
    (tmp_path / "key").write_text("k" * 40)
    (tmp_path / "key").chmod(0o600)
    params, cfg = with_module("deepseek_v4", 1, 2)
    cfg, mesh = dataclasses.replace(cfg, context_shards=2), rank_mesh(jax.devices()[:2], 1, 2, 2)
    functions = expert_parallel_functions(cfg, mesh, REDUNDANT, dtype=jnp.float32)
    components = functions, spread_experts(params, cfg, mesh, REDUNDANT), cfg
    given = {
        "num_window_pages": window_pages(cfg, "float32", 4, 4),
        "kv_offloading_size": 1e-3,
        "transfer_key_file": str(tmp_path / "key"),
        "identity": "equal",
    }

    def engine(**role: object) -> Engine:
        limits = {"max_model_len": 600, "num_pages": 4, "max_num_seqs": 4, "max_num_batched_tokens": 300}
        limits |= {"page_size": cfg.page_size, "window_size": window_size(cfg), "cache_dtype": "float32"}
        with one_bucket():
            every = EngineConfig(**limits | TWO | MODULE | given | role)
            return Engine(EngineComponents.on_devices(*components, every, jax.devices()[:2]))

    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 64, n).tolist() for n in (520, 505, 503, 507, 504)]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    balancing = {"eplb_interval": 4, "eplb_threshold": 1.0}
    prefill, decode = engine(role="prefill", transfer_address=address), engine(role="decode", **balancing)
    balancer = decode.planners["experts"]
    start = balancer.expert_map
    prefill.executor.devices.programs = decode.executor.devices.programs
    run(prefill, request("first", prompts[0], max_tokens=1, ignore_eos=True))
    first = texts(decode, prompts[:1], address) + texts(decode, prompts[1:])
    whole = np.zeros((len(prompts), 520 + LENGTH), np.int32)
    for row, prompt, answer in zip(whole, prompts, first, strict=True):
        row[: len(prompt) + LENGTH] = prompt + answer
    best = np.asarray(jax.jit(forward, static_argnums=1)(params, cfg, whole).logits).argmax(-1)
    assert first == [b[len(p) - 1 :][:LENGTH].tolist() for b, p in zip(best, prompts, strict=True)]
    stats = decode.stats()
    assert stats.jobs["pages"].tiers["peer"].hits == 512 and stats.preemptions > 0
    assert stats.jobs["draft"].num_drafts > 0
    sizes = {
        n: a.addressable_shards[0].data.shape[2] * 2 // a.shape[2] for n, a in decode.executor.devices.pages.items()
    }
    lasting = {"sparse_entries", "index_keys", "heavy_entries"}
    assert {name for name, share in sizes.items() if share == 1} == lasting and cfg.page_size == 512
    clear(decode)
    hits = stats.jobs["pages"].tiers["host"].hits
    assert texts(decode, prompts[:1]) == first[:1]
    assert decode.stats().jobs["pages"].tiers["host"].hits - hits == 512
    moved, balance = (balancer.expert_map.phy2log != start.phy2log).any(axis=1), decode.stats().jobs["experts"]
    assert moved.tolist() == [True, True, True] and balance.checksum_failures == 0 < balance.rebalances


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
    check(texts(of), "deepseek_v32")
    assert used_forms(of) == {AttentionForm.TOPK, AttentionForm.TOPK_MATERIALIZED}
    whole = model_identity(served(load_config(golden.DIRECTORY / "deepseek_v32"), EngineOptions()))
    found = json.loads(of.cfg.identity)
    assert (found["model"], found["page_size"]) == (whole, 128), "what refuses an instance of another size names pages"


def test_drafts_and_preempted_requests_where_pairs_of_four_devices_divide_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A page has 128 tokens, of which each device of a pair holds 64. Keys and values are materialized.

    The prompts have a page each, and their answers go on in a second one: together they need more than there are.
    """
    programs_of_a_gpu(monkeypatch, AttentionForm.MATERIALIZED, 512)
    options = {"tensor_parallel_size": 4, "decode_context_parallel_size": 2, "max_num_batched_tokens": 64}
    (params, cfg), used = golden.with_module("kimi_k25"), jax.devices()[:4]
    cfg, mesh = dataclasses.replace(cfg, context_shards=2), rank_mesh(used, 1, 4, 2)
    limits = EngineConfig(max_model_len=400, num_pages=4, max_num_seqs=4, page_size=cfg.page_size, **options, **MODULE)
    functions = expert_parallel_functions(cfg, mesh, 0, dtype=jnp.float32)
    with one_bucket():
        of = Engine(EngineComponents.on_devices(functions, spread_experts(params, cfg, mesh, 0), cfg, limits, used))
    pages = of.executor.devices.pages["latents"]
    assert pages.shape[2] == 128 and {shard.data.shape[2] for shard in pages.addressable_shards} == {64}
    assert 2 * local_bytes(of.executor.devices.layout.pages) == pages.nbytes
    prompts = [PROMPTS[0][n : n + 120] for n in range(4)]
    check(texts(of, prompts), "kimi_k25", prompts)
    stats = of.stats()
    assert stats.preemptions > 0 and AttentionForm.MATERIALIZED in used_forms(of)
    assert stats.jobs["draft"].num_drafts > 0
    long = PROMPTS[:2]
    first = texts(of, long)
    check(first, "kimi_k25", long)
    assert of.stats().prefix_hits == stats.prefix_hits
    assert texts(of, long) == first and of.stats().prefix_hits - stats.prefix_hits > 128


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: LLM(tensor_parallel_size=4, decode_context_parallel_size=3, progress=False),
            "decode_context_parallel_size: 3 does not divide tensor_parallel_size 4; use a divisor of it",
        ),
        (lambda: EngineOptions(decode_context_parallel_size=2), "2 does not divide tensor_parallel_size 1"),
        (lambda: EngineOptions(decode_context_parallel_size=0), "0 is not at least 1"),
    ],
)
def test_a_size_that_cannot_be_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
