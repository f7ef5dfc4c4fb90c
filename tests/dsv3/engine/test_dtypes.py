"""Dtypes of activations and pages: how names are resolved, what is refused, and a float16 engine over FP8 pages."""

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from configs.deepseek_v3 import DEEPSEEK_V3
from dsv3.config.hugging_face import from_hf, load_config, stored_dtype
from dsv3.config.model import FP8, PAGE_SIZE, ModelConfig
from dsv3.config.options import EngineOptions
from dsv3.engine.build import build_engine, bundled_model, load_components
from dsv3.engine.description import describe
from dsv3.engine.dtypes import fp8_experts, packed_mode, resolve_dtypes
from dsv3.engine.executor import lay_out
from dsv3.engine.jobs import JOB_KINDS
from dsv3.engine.memory import DeviceMemory, account
from dsv3.kv_cache.layout import page_bytes, pool
from pallas_kernels import native
from pallas_kernels.backend import Backend
from pallas_kernels.mla import PAGE_SIZE as KERNEL_PAGE_SIZE
from tests.dsv3 import deepseek_v4
from tests.dsv3.engine.driving import request, run
from tests.dsv3.engine.fewer import one_bucket

CPU = SimpleNamespace(platform="cpu", device_kind="cpu")
H200 = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")
A100 = SimpleNamespace(platform="gpu", device_kind="NVIDIA A100", compute_capability="8.0")
PLAIN = dataclasses.replace(DEEPSEEK_V3, fp8=None)


def resolved(device: SimpleNamespace, stored: str | None = None, **options) -> tuple[str, str]:
    dtypes = resolve_dtypes(PLAIN, EngineOptions(**options), device, stored)
    return dtypes.compute.name, dtypes.cache


def test_the_device_and_the_checkpoint_decide_what_auto_is() -> None:
    assert resolved(CPU, "float16") == ("float32", "float32")
    assert resolved(H200) == resolved(H200, "float32") == ("bfloat16", "bfloat16")
    assert resolved(H200, "float16") == ("float16", "float16")
    assert resolved(H200, "bfloat16", dtype="float16") == ("float16", "float16")


def test_a_cpu_that_multiplies_bfloat16_gets_it_for_a_model_that_is_not_small(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_cpu(model: ModelConfig, stored: str | None, *, multiplies: bool = True) -> tuple[str, str, str]:
        monkeypatch.setattr(native, "library", lambda: native.Library({}, "", multiplies))
        dtypes = resolve_dtypes(model, EngineOptions(), CPU, stored)
        return dtypes.compute.name, dtypes.cache, dtypes.reason

    why = "this CPU multiplies it and reads half the bytes"
    assert on_cpu(PLAIN, "bfloat16") == on_cpu(DEEPSEEK_V3, "bfloat16") == ("bfloat16", "bfloat16", why)
    line = describe(PLAIN, resolve_dtypes(PLAIN, EngineOptions(), CPU, "bfloat16"), Backend.NATIVE)
    assert line.endswith(f"; bfloat16, because {why}")
    exact = {
        "no kernel multiplies bfloat16": on_cpu(PLAIN, "bfloat16", multiplies=False),
        "would round a checkpoint of no stated type": on_cpu(PLAIN, None),
        "would round a checkpoint of float32": on_cpu(PLAIN, "float32"),
        "INT4 experts were not measured": on_cpu(dataclasses.replace(PLAIN, int4_experts=True), "bfloat16"),
        "million parameters per token are few": on_cpu(load_config(bundled_model()), "bfloat16"),
    }
    for reason, (compute, cache, said) in exact.items():
        assert (compute, cache) == ("float32", "float32") and reason in said, said


def test_pages_may_have_a_type_of_their_own() -> None:
    for pages in ("float32", "bfloat16", "float16", FP8):
        assert resolved(CPU, dtype="float16", kv_cache_dtype=pages) == ("float16", pages)
    assert resolved(H200, kv_cache_dtype=FP8) == ("bfloat16", FP8)
    assert resolved(H200, dtype="float32", kv_cache_dtype="bfloat16") == ("float32", "bfloat16")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float16", "kv_cache_dtype": FP8}, "'fp8' has no attention kernel .* set .* to auto or float16"),
        ({"kv_cache_dtype": "float16"}, "'float16' has no attention kernel for dtype bfloat16"),
    ],
)
def test_pages_that_no_kernel_reads_are_refused(options: dict, message: str) -> None:
    for device in (H200, A100):
        with pytest.raises(ValueError, match=f"kv_cache_dtype: {message}"):
            resolve_dtypes(PLAIN, EngineOptions(**options), device)


def test_impossible_combinations_are_refused() -> None:
    half = EngineOptions(dtype="float16")
    with pytest.raises(ValueError, match="'float16' does not go with FP8 weights"):
        resolve_dtypes(DEEPSEEK_V3, half, CPU)
    multiplied_out = dataclasses.replace(half, fp8="dequantize")
    assert resolve_dtypes(DEEPSEEK_V3, multiplied_out, CPU).compute == jnp.float16
    with pytest.raises(ValueError, match="'float16' does not go with FP8 weights"):
        build_engine(bundled_model(), dataclasses.replace(half, fp8="quantize"), progress=False)
    for model, fp8 in ((DEEPSEEK_V3, "keep"), (PLAIN, "quantize")):
        with pytest.raises(ValueError, match="'float32' does not go with FP8 weights on this GPU"):
            resolve_dtypes(model, EngineOptions(dtype="float32", fp8=fp8), H200)
        assert resolve_dtypes(model, EngineOptions(dtype="float32", fp8=fp8), CPU).compute == jnp.float32
    odd = dataclasses.replace(PLAIN, kv_lora_rank=200)
    with pytest.raises(ValueError, match="kv_lora_rank is 200"):
        resolve_dtypes(odd, EngineOptions(kv_cache_dtype=FP8), CPU)


@pytest.mark.parametrize(
    ("device", "options", "message"),
    [
        (CPU, {"dtype": "float16"}, "products of float16 .* set dtype to float32 or bfloat16"),
        (
            CPU,
            {"dtype": "float32", "kv_cache_dtype": "fp8"},
            "attention to a cache of fp8 .* set kv_cache_dtype to auto",
        ),
        (H200, {"dtype": "float32"}, "products of float32 .* set dtype to bfloat16 or float16"),
    ],
)
def test_what_xla_computes_is_not_batch_invariant(device: SimpleNamespace, options: dict, message: str) -> None:
    assert resolved(device, batch_invariant=True)
    with pytest.raises(ValueError, match=f"batch_invariant: {message}"):
        resolved(device, batch_invariant=True, **options)


def test_a_checkpoint_declares_its_dtype(tmp_path: Path) -> None:
    config = json.loads((bundled_model() / "config.json").read_text()) | {"torch_dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert (stored_dtype(bundled_model()), stored_dtype(tmp_path)) == ("bfloat16", "float16")
    assert load_config(tmp_path) == dataclasses.replace(load_config(bundled_model()), num_nextn_predict_layers=1)


def test_fp8_pages_hold_more_of_them() -> None:
    pages = {}
    for name in ("bfloat16", FP8):
        cache = resolve_dtypes(PLAIN, EngineOptions(kv_cache_dtype=name), H200).cache
        memory = DeviceMemory(100 * 2**30, 100 * 2**30)
        pages[name] = account(
            memory, 0.9, weights=0, state=0, working=0, page=page_bytes(PLAIN, cache), page_size=64
        ).pages
    assert pages[FP8] / pages["bfloat16"] == pytest.approx(1152 / 656, rel=1e-3)


def test_kernels_and_engine_count_the_same_tokens_per_page() -> None:
    assert KERNEL_PAGE_SIZE == PAGE_SIZE


def test_a_float16_engine_over_fp8_pages_serves() -> None:
    """Options to tokens: a prompt of two chunks, then the same again from cached pages."""
    limits = {"max_num_seqs": 1, "max_model_len": 256, "max_num_batched_tokens": 64}
    options = EngineOptions(dtype="float16", kv_cache_dtype=FP8, **limits)
    with one_bucket():
        engine = build_engine(bundled_model(), options, progress=False)
    pages = engine.executor.devices.pages["latents"]
    one = pool(engine.model_cfg, FP8, engine.cfg.num_pages)["latents"]
    assert engine.cfg.cache_dtype == FP8 and (pages.shape, pages.dtype) == ((1, *one.shape), jnp.uint8)
    assert pages.size == engine.cfg.num_pages * page_bytes(engine.model_cfg, FP8)
    prompt = [100 + i % 90 for i in range(2 * PAGE_SIZE + 7)]
    first, second = (
        run(engine, request(name, prompt, max_tokens=4, ignore_eos=True))[name] for name in ("first", "second")
    )
    assert len(first.tokens) == 4 and first.tokens == second.tokens
    assert engine.stats().prefix_hits == 2 * PAGE_SIZE


def precisions(**options: Any) -> dict[str, set[str]]:
    """The precision of the products in each program that has some; programs of one token have none, but C++ kernels."""
    small = EngineOptions(max_model_len=64, max_num_seqs=1, max_num_batched_tokens=64, **options)
    _, programs = lay_out(load_components(bundled_model(), small, progress=False, shapes=True), JOB_KINDS)
    kinds = ("prefill", "prompt_logprobs", "mtp prefill")
    texts = {key.kind: programs._lower(key).as_text() for key in programs.keys() if key.kind in kinds}  # noqa: SIM118
    found = {kind: set(re.findall(r"precision = \[(\w+), \w+\]", text)) for kind, text in texts.items()}
    assert all(found.values())
    return found


def test_float32_is_float32_on_a_gpu_too() -> None:
    """A GPU's default is TF32, so a float32 engine requests more for its products."""
    exact, drafts = {"HIGHEST"}, {"method": "mtp", "num_speculative_tokens": 1}
    assert precisions(dtype="float32", speculative_config=drafts) == dict.fromkeys(
        ("prefill", "prompt_logprobs", "mtp prefill"), exact
    )
    spread = precisions(dtype="float32", enable_expert_parallel=True, data_parallel_size=1)
    assert spread == dict.fromkeys(("prefill", "prompt_logprobs"), exact)
    assert "DEFAULT" in precisions(dtype="bfloat16")["prefill"]


FLASH = dataclasses.replace(from_hf(deepseek_v4.FLASH), num_nextn_predict_layers=0)


def test_experts_of_four_bits_are_served_as_options_say() -> None:
    int4 = dataclasses.replace(PLAIN, int4_experts=True)
    assert packed_mode(PLAIN, EngineOptions()) is packed_mode(DEEPSEEK_V3, EngineOptions()) is None
    assert [packed_mode(int4, EngineOptions(int4=mode)) for mode in ("keep", "fp8", "dequantize")] == [
        "keep",
        "fp8",
        "dequantize",
    ]
    assert [packed_mode(FLASH, EngineOptions(fp4=mode)) for mode in ("keep", "fp8")] == ["keep", "fp8"]
    assert packed_mode(FLASH, EngineOptions(fp4="keep", fp8="dequantize")) == "dequantize"


def test_rows_travel_as_fp8_to_experts_of_e4m3_values() -> None:
    int4 = dataclasses.replace(PLAIN, int4_experts=True)
    assert [fp8_experts(int4, EngineOptions(int4=mode)) for mode in ("keep", "fp8", "dequantize")] == [
        False,
        True,
        False,
    ]
    assert all(fp8_experts(FLASH, EngineOptions(fp4=mode)) for mode in ("keep", "fp8"))
    assert fp8_experts(DEEPSEEK_V3, EngineOptions()) and not fp8_experts(PLAIN, EngineOptions())
    assert not any(fp8_experts(cfg, EngineOptions(fp8="dequantize")) for cfg in (FLASH, DEEPSEEK_V3))


def test_windows_and_entries_may_be_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their rows have scales of their own, unlike latents of other models."""
    monkeypatch.setattr("dsv3.engine.description.has_jax_triton", lambda: True)
    found = resolve_dtypes(FLASH, EngineOptions(kv_cache_dtype=FP8), H200)
    assert (found.compute.name, found.cache) == ("bfloat16", FP8)
    line = describe(FLASH, found, Backend.MOSAIC, "keep")
    assert line.startswith("family deepseek_v4, 284 billion parameters, 13.3 billion of them per token")
    seen = "each token attends to 128 tokens and, of entries that are chosen, 512 at most"
    assert line.endswith(f"; FP4 experts stay FP4; {seen}")
    assert "; FP4 experts as FP8; " in describe(FLASH, found, Backend.TRITON, "fp8")
    assert "; FP4 experts stay FP4; " in describe(FLASH, found, Backend.TRITON, "keep")
    monkeypatch.setattr("dsv3.engine.description.has_jax_triton", lambda: False)
    absent = "; mixing of streams and norm of queries by jax.numpy, because jax-triton is not installed"
    assert absent in describe(FLASH, found, Backend.MOSAIC) and absent not in describe(PLAIN, found, Backend.MOSAIC)
