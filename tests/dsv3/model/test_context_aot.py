"""Prefill in expanded form compiled for an H200: it waits for no host, and a long context takes little memory."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from configs.deepseek_v3 import DEEPSEEK_V3
from dsv3.kv_cache.layout import pool
from dsv3.model import AttentionForm, PrefillBatch, prefill
from dsv3.model.layers import expanded
from dsv3.model.params import abstract
from pallas_kernels import bodies
from pallas_kernels.aot import compile_to_read, lower_for
from pallas_kernels.backend import Backend
from tools.plan import hlo

pytestmark = pytest.mark.aot
CFG = dataclasses.replace(
    DEEPSEEK_V3,
    **{"vocab_size": 256, "hidden_size": 256, "num_hidden_layers": 2, "first_k_dense_replace": 2, "fp8": None},
    **{"num_attention_heads": 64, "q_lora_rank": 128, "intermediate_size": 256, "num_nextn_predict_layers": 0},
)
T, ROOM, POOL = 1024, 131_072, 2048


def test_a_step_over_131072_tokens_makes_keys_and_values_of_a_few_heads() -> None:
    """16 of 64 heads: those of all would take 4.3 GB. A product and attention run once per group, in a counted loop."""
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    form = {"form": AttentionForm.MATERIALIZED, "room": ROOM}
    batch = PrefillBatch(ints((T,)), ints((T,)), ints((3,)), ints((2,)), ints((2, POOL)), **form)

    def step(params, batch, pages):
        out = prefill(params, CFG, batch, pages, backend=Backend.MOSAIC)
        return out.hidden, out.pages

    program = jax.jit(step, donate_argnums=2)
    with bodies.left_out():
        lowered = lower_for(program, abstract(CFG, jnp.bfloat16), batch, pool(CFG, "bfloat16", POOL))
    compiled = compile_to_read(lowered)
    text = compiled.as_text()
    assert text.count("mla_prefill") and "mla_decode" not in text
    assert hlo.parse(text).host_waits == ()
    latents = ROOM * CFG.latent_dim * 2
    own = T * CFG.num_attention_heads * 2 * (2 * CFG.qk_head_dim + 2 * CFG.v_head_dim)
    assert compiled.memory_analysis().temp_size_in_bytes < expanded.BYTES_AT_ONCE + 2 * latents + 2 * own
