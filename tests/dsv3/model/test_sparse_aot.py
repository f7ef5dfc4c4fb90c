"""Steps with sparse attention compiled for an H200 never wait for the host."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from configs.deepseek_v3 import DEEPSEEK_V32
from dsv3.config.model import FP8, IndexerConfig
from dsv3.kv_cache.layout import pool
from dsv3.model import AttentionForm, DecodeBatch, PrefillBatch, decode, prefill
from dsv3.model.params import abstract
from pallas_kernels import bodies
from pallas_kernels.aot import compile_to_read, lower_for
from pallas_kernels.backend import Backend
from pallas_kernels.dsa import attend
from tools.plan import hlo

pytestmark = pytest.mark.aot
# The smallest shapes that the kernels take. The second layer shares the indexer of the first.
CFG = dataclasses.replace(
    DEEPSEEK_V32,
    **{"vocab_size": 256, "hidden_size": 256, "num_hidden_layers": 2, "first_k_dense_replace": 2, "fp8": None},
    **{"num_attention_heads": 16, "q_lora_rank": 128, "intermediate_size": 256, "num_nextn_predict_layers": 0},
    indexer=IndexerConfig(num_heads=8, head_dim=128, topk=64, shared_layers=(1,)),
)
POOL, TABLE = 8, 4

ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
PREFILL = PrefillBatch(ints((64,)), ints((64,)), ints((3,)), ints((2,)), ints((2, TABLE)), AttentionForm.TOPK)
MASKED = dataclasses.replace(PREFILL, form=AttentionForm.TOPK_MATERIALIZED, kv_capacity=128)
DECODE = DecodeBatch(ints((4, 1)), ints((4,)), ints((4, TABLE)), AttentionForm.TOPK)


def step(which, params, batch, pages):
    out = which(params, CFG, batch, pages, backend=Backend.MOSAIC)
    return out.hidden, out.pages


@pytest.mark.parametrize(
    ("which", "batch", "kernel"),
    [(prefill, PREFILL, "mla_decode"), (prefill, MASKED, "mla_prefill_topk"), (decode, DECODE, "mla_decode")],
    ids=["prefill", "masked", "decode"],
)
def test_topk_steps_do_not_wait_for_the_host(which, batch, kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill rows are grouped, and some groups are padding; the second layer shares the top-k of the first."""
    pages = pool(CFG, FP8, POOL)
    assert list(pages) == ["latents", "index_keys"]
    monkeypatch.setattr(attend, "BYTES_AT_ONCE", 4 * 64 * 656)
    program = jax.jit(functools.partial(step, which), donate_argnums=2)
    with bodies.left_out():
        lowered = lower_for(program, abstract(CFG, jnp.bfloat16), batch, pages)
    text = compile_to_read(lowered).as_text()
    assert "dsa_scores" in text and kernel in text and text.count("triton_kernel_call") >= (1 if batch is MASKED else 2)
    assert hlo.parse(text).host_waits == ()


def test_a_step_without_topk_is_dense() -> None:
    """It has no scores and no conditions; a step in form ANY, as on a CPU, has conditions in each layer."""

    def traced(form: AttentionForm) -> Any:
        arguments = abstract(CFG, jnp.bfloat16), dataclasses.replace(DECODE, form=form), pool(CFG, FP8, POOL)
        return jax.make_jaxpr(functools.partial(step, decode))(*arguments).jaxpr

    dense, dynamic = traced(AttentionForm.ABSORBED), traced(AttentionForm.ANY)
    assert "dsa_scores" not in str(dense) and conditions(dense) == 0
    assert "dsa_scores" in str(dynamic) and conditions(dynamic) == 2


def conditions(jaxpr: Any) -> int:
    """Counts the conditions of a step, but not those inside of its Mosaic kernels."""
    inner = [
        getattr(value, "jaxpr", value)
        for equation in jaxpr.eqns
        if equation.primitive.name != "mpmd_map"
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr"))
        if hasattr(value, "jaxpr") or hasattr(value, "eqns")
    ]
    return sum(equation.primitive.name == "cond" for equation in jaxpr.eqns) + sum(map(conditions, inner))
