"""The engine on models with sparse attention: transformers' texts in chunks, from pages and tiers, drafted, spread."""

import dataclasses
import functools
from pathlib import Path

import jax
import numpy as np
import pytest

from configs.deepseek_v3 import DEEPSEEK_V32
from dsv3.checkpoint import save_hf
from dsv3.config.options import EngineOptions
from dsv3.engine.build import build_engine
from dsv3.engine.description import describe
from dsv3.engine.dtypes import EngineDtypes
from dsv3.engine.engine import Engine
from dsv3.engine.jobs import decode, draft_module, prefill
from dsv3.kv_cache.layout import gather_pages, payload_shape, scatter_pages
from dsv3.kv_cache.tiers import tiers
from dsv3.model import AttentionForm, forms
from pallas_kernels.backend import Backend
from tests.dsv3.engine.driving import request, run
from tests.dsv3.engine.fewer import one_bucket
from tests.dsv3.model.golden import DIRECTORY, data, model, with_module

LIMITS = {"dtype": "float32", "max_num_seqs": 4, "max_model_len": 256, "max_num_batched_tokens": 64}
LONG = np.random.default_rng(0).integers(4, 48, 200).tolist()


def engine(family: str, **options) -> Engine:
    return build_engine(DIRECTORY / family, EngineOptions(**(LIMITS | options)), progress=False)


def texts(of: Engine, prompts: list[list[int]], length: int = 16) -> list[list[int]]:
    found = run(of, *(request(str(i), p, max_tokens=length, ignore_eos=True) for i, p in enumerate(prompts)))
    assert (of.stats().pages_in_use, of.stats().recompilations) == (0, 0)
    return [found[str(i)].tokens for i in range(len(prompts))]


def prompts(family: str) -> list[list[int]]:
    return [row[row >= 0].tolist() for row in data(family)["prompts"]]


def test_two_ranks_of_two_devices_give_transformers_tokens() -> None:
    """A rank has one row, which its two devices share."""
    spread = {"data_parallel_size": 2, "tensor_parallel_size": 2, "enable_expert_parallel": True}
    of = engine("glm_moe_dsa", max_num_seqs=1, **spread)
    assert texts(of, prompts("glm_moe_dsa")) == data("glm_moe_dsa")["greedy"].tolist()


def test_drafts_give_transformers_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts come in chunks of 16 tokens; the module has an indexer of its own.

    All steps use top-k: other tests cover the programs without.
    """
    for module, phase in ((decode, "decode"), (draft_module, "decode"), (prefill, "prefill")):
        monkeypatch.setattr(module, f"{phase}_forms", lambda *_: [AttentionForm.TOPK])
        monkeypatch.setattr(module, f"{phase}_form", lambda *_: AttentionForm.TOPK)
    params, cfg = with_module("deepseek_v32")
    save_hf(tmp_path / "drafting", cfg, params)
    drafts = {"method": "mtp", "num_speculative_tokens": 2}
    limits = LIMITS | {"max_num_batched_tokens": 16, "speculative_config": drafts}
    with one_bucket():
        of = build_engine(tmp_path / "drafting", EngineOptions(**limits), progress=False)
    asked, wanted = prompts("deepseek_v32"), data("deepseek_v32")["greedy"].tolist()
    for row in range(0, 32, 4):
        assert texts(of, asked[row : row + 4]) == wanted[row : row + 4]
    stats = of.stats().jobs["draft"]
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.fixture(scope="module")
def built() -> list[Engine]:
    """The engine below, once a test has built it."""
    return []


@pytest.fixture
def reading(built: list[Engine], monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Drafts by prompt lookup, with programs for steps with top-k and without, as on a GPU.

    Texts begin below the 16 tokens of top-k, and grow beyond. Prompts with top-k are masked up to 128 tokens. It
    offloads pages to the host's memory, and waits for them.
    """
    monkeypatch.setattr(forms, "DYNAMIC_PLATFORMS", ())
    row = dataclasses.replace(forms.FORMS[AttentionForm.TOPK_MATERIALIZED], capacity=lambda *_: 128)
    monkeypatch.setitem(forms.FORMS, AttentionForm.TOPK_MATERIALIZED, row)
    for name in ("LOOKUP_S", "LOAD_S"):
        monkeypatch.setattr(tiers, name, 60.0)
    monkeypatch.setattr(tiers, "is_loading_faster", lambda *_: True)
    if not built:
        drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}
        built.append(engine("glm_moe_dsa", max_num_seqs=1, speculative_config=drafts, kv_offloading_size=4e-3))
    return built[0]


def test_drafts_from_the_text_give_transformers_tokens(reading: Engine) -> None:
    assert texts(reading, prompts("glm_moe_dsa")[:12]) == data("glm_moe_dsa")["greedy"][:12].tolist()
    drafts, used = reading.stats().jobs["draft"], reading.executor.devices.programs.keys()
    assert 0 < drafts.num_accepted_tokens < drafts.num_draft_tokens
    assert {key.variant for key in used if key.kind == "decode"} == {AttentionForm.ABSORBED, AttentionForm.TOPK}


def test_a_prompt_from_the_cache_and_from_the_host_goes_on_alike(reading: Engine) -> None:
    """Index keys come with the latents: lost or stale ones would select other tokens among the 192."""
    first = texts(reading, [LONG])
    used = reading.executor.devices.programs.keys()
    assert {key.variant for key in used if key.kind == "prefill"} >= {
        AttentionForm.TOPK,
        AttentionForm.TOPK_MATERIALIZED,
    }
    before = reading.stats()
    assert texts(reading, [LONG]) == first
    assert reading.stats().prefix_hits - before.prefix_hits == 192
    for cache in reading.scheduler.caches:
        while any(reading.scheduler.tiers._backlog.values()):
            pass
        cache.clear()
    devices = reading.executor.devices
    devices.pages = jax.tree.map(lambda leaf: leaf.at[:].set(np.nan), devices.pages)
    hits = reading.stats().jobs["pages"].tiers["host"].hits
    assert texts(reading, [LONG]) == first
    assert reading.stats().jobs["pages"].tiers["host"].hits - hits == 192


def test_the_description_says_how_tokens_are_chosen() -> None:
    served = dataclasses.replace(DEEPSEEK_V32, num_nextn_predict_layers=0)
    line = describe(served, EngineDtypes(jax.numpy.dtype("bfloat16"), "fp8"), Backend.MOSAIC)
    assert "family deepseek_v32, 672 billion parameters" in line and "48,068 bytes of cache per token (fp8)" in line
    assert line.endswith("by Mosaic GPU kernels; each token attends to 2,048 at most")
    triton = describe(served, EngineDtypes(jax.numpy.dtype("bfloat16"), "bfloat16"), Backend.TRITON)
    assert triton.endswith("by Triton kernels; each token attends to 2,048 at most")


def test_a_value_has_latents_and_keys_of_all_layers() -> None:
    _, cfg = model("glm_moe_dsa")
    shape, num_pages = payload_shape(cfg, "bfloat16"), 5
    assert shape.shape == (64 * 2 * (3 * cfg.latent_dim + 2 * cfg.indexer.head_dim),)
    rng = np.random.default_rng(0)
    layers = {"latents": (3, cfg.latent_dim), "index_keys": (2, cfg.indexer.head_dim)}
    full = {name: rng.normal(size=(count * num_pages, 64, width)) for name, (count, width) in layers.items()}
    pool = {name: jax.numpy.asarray(array, "bfloat16") for name, array in full.items()}
    pages = np.array([3, -1, 0], np.int32)
    groups = cfg.cache_groups("bfloat16")
    out, into = (jax.jit(functools.partial(body, groups)) for body in (gather_pages, scatter_pages))
    values = out(pool, pages)
    assert values.shape == (3, *shape.shape) and not values[1].any()
    stored = [np.asarray(pool[name])[3::num_pages].tobytes() for name in ("latents", "index_keys")]
    assert np.asarray(values[0]).tobytes() == b"".join(stored), "tiers and other instances know this order"
    empty, _ = into(jax.tree.map(np.zeros_like, pool), pages, values)
    for before, after in zip(jax.tree.leaves(pool), jax.tree.leaves(empty), strict=True):
        kept = np.isin(np.arange(len(before)) % num_pages, [0, 3])
        np.testing.assert_array_equal(after, np.where(kept[:, None, None], before, 0))
