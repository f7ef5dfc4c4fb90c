"""Steps with sparse attention compiled for an H200: nothing in them waits for the host, whatever a layer has to do."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from configs.deepseek_v32 import DEEPSEEK_V32
from dsv3.cache.layout import FP8, IndexedPages, pool
from dsv3.config import IndexerConfig
from dsv3.model import DecodeBatch, PrefillBatch, decode, prefill
from dsv3.model.params import abstract
from dsv3.plan import hlo
from pallas_kernels.aot import compile_for
from pallas_kernels.backend import Backend
from pallas_kernels.dsa import attend

pytestmark = pytest.mark.aot
# The smallest shapes that the kernels take. The last of two layers with experts shares the indexer of the first.
CFG = dataclasses.replace(
    DEEPSEEK_V32,
    **{"vocab_size": 256, "hidden_size": 256, "num_hidden_layers": 2, "first_k_dense_replace": 0},
    **{"num_attention_heads": 16, "q_lora_rank": 128, "moe_intermediate_size": 128, "n_shared_experts": 0},
    **{"n_routed_experts": 4, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "fp8": None},
    num_nextn_predict_layers=0,
    indexer=IndexerConfig(num_heads=8, head_dim=128, topk=64, shared_layers=(1,)),
)
POOL, TABLE = 8, 4

ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
PREFILL = PrefillBatch(ints((64,)), ints((64,)), ints((3,)), ints((2,)), ints((2, TABLE)), chooses=True)
DECODE = DecodeBatch(ints((4, 1)), ints((4,)), ints((4, TABLE)), chooses=True)


def step(which, params, batch, pages):
    out = which(params, CFG, batch, pages, backend=Backend.MOSAIC)
    return out.hidden, out.pages


@pytest.mark.parametrize(("which", "batch"), [(prefill, PREFILL), (decode, DECODE)], ids=["prefill", "decode"])
def test_no_step_that_chooses_waits_for_the_host(which, batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts' rows come in groups, of which some are padding; the other layer keeps the choice of the one before."""
    pages = pool(CFG, FP8, POOL)
    assert isinstance(pages, IndexedPages)
    monkeypatch.setattr(attend, "BYTES_AT_ONCE", 24 * 64 * 656)
    program = jax.jit(functools.partial(step, which), donate_argnums=2)
    text = compile_for(program, abstract(CFG, jnp.bfloat16), batch, pages).as_text()
    assert "dsa_scores" in text and text.count("triton_kernel_call") >= 2
    assert hlo.parse(text).host_waits == ()


@pytest.mark.parametrize(("which", "batch"), [(prefill, PREFILL), (decode, DECODE)], ids=["prefill", "decode"])
def test_a_step_that_need_not_choose_is_dense(which, batch) -> None:
    """It scores nothing and asks nothing; a step that looks while it runs, as on a CPU, would ask."""

    def traced(chooses: bool | None) -> str:
        return str(
            jax.make_jaxpr(functools.partial(step, which))(
                abstract(CFG, jnp.bfloat16), dataclasses.replace(batch, chooses=chooses), pool(CFG, FP8, POOL)
            )
        )

    dense, looking = traced(False), traced(None)
    assert "dsa_scores" not in dense and "triton_kernel_call" not in dense and " cond[" not in dense
    assert "dsa_scores" in looking and " cond[" in looking
