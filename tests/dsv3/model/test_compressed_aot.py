"""Steps of DeepSeek-V4 compiled for an H200: the cache is read and written in place, and the host never waits."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest

from dsv3.config.model import FP8, ModelConfig
from dsv3.kv_cache.layout import pool
from dsv3.model import DecodeBatch, PrefillBatch
from dsv3.model.params import abstract
from pallas_kernels import aot, backend, bodies
from pallas_kernels.backend import Backend
from tests.dsv3.model.deepseek_v4 import model
from tests.dsv3.model.deepseek_v4_steps import step
from tools.plan import hlo

pytestmark = pytest.mark.aot
N, TABLE, PAGES, WINDOW_PAGES = 64, 32, 4096, 256
ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
WINDOW = {"window_table": ints((N, TABLE)), "slots": ints((N,))}
DECODE = DecodeBatch(ints((N, 1)), ints((N,)), ints((N, TABLE)), **WINDOW)
PREFILL = PrefillBatch(ints((256,)), ints((256,)), ints((N + 1,)), ints((N,)), ints((N, TABLE)), **WINDOW)


def small() -> ModelConfig:
    """Returns a model of one layer of each ratio, whose attention has the published widths."""
    cfg = model("deepseek_v4")[1]
    assert cfg.compressed is not None
    indexer = dataclasses.replace(cfg.compressed.indexer, num_heads=64, head_dim=128, topk=512)
    compressed = dataclasses.replace(cfg.compressed, ratios=(0, 4, 128), window=128, indexer=indexer)
    widths = {"hidden_size": 256, "moe_intermediate_size": 256, "q_lora_rank": 128, "num_attention_heads": 64}
    latent = {"kv_lora_rank": 448, "qk_nope_head_dim": 448, "qk_rope_head_dim": 64, "v_head_dim": 512}
    return dataclasses.replace(cfg, **widths, **latent, num_hidden_layers=3, compressed=compressed, fp8=None)


@pytest.mark.parametrize("batch", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_a_step_reads_listed_rows_where_they_are(batch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_on_cpu", lambda: (Backend.MOSAIC, "a test compiles for Hopper"))
    cfg = small()
    pages = pool(cfg, FP8, PAGES, WINDOW_PAGES, N)
    with bodies.left_out():
        lowered = aot.lower_for(step, abstract(cfg, jnp.bfloat16), cfg, batch, pages)
    compiled = aot.compile_to_read(lowered)
    text, held = compiled.as_text(), sum(math.prod(a.shape) * a.dtype.itemsize for a in pages.values())
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == held, "the pool is updated in place"
    assert memory.temp_size_in_bytes < held // 2
    module = hlo.parse(text)
    assert module.host_waits == ()
    counts = hlo.kernels(module)
    assert counts["mixing"] <= 6 * 3 + 4 and sum(counts.values()) <= 124, f"many small kernels: {counts}"
    n = batch.tokens.size
    attended = rf"\(bf16\[{n},64,512\]\S*, f32\[{n},64\]\S*\) custom-call\(.*mosaic_gpu"
    assert len(re.findall(attended, text)) == 3, "a kernel in each layer"
    row = pages["window_latents"].shape[2]
    assert not re.findall(rf"= u8\[[\d,]+,{row}\]\S* (?:gather|copy)\(", text)
