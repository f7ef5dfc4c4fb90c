"""Plans in which devices divide pages, and the GPU programs that they are read from."""

import dataclasses
import re

import pytest

from configs.deepseek_v3 import DEEPSEEK_V3
from configs.deployments import H200
from dsv3.engine.device.programs import Key
from dsv3.model.batch import AttentionForm
from tools.plan.deployment import Deployment, DeploymentError, PlannedBatch, kernel_rates
from tools.plan.hlo import collectives, parse
from tools.plan.memory import memory_of
from tools.plan.programs import PlannedModel, compile_run, lay_out, runs
from tools.plan.roofline import decode_stages

HEADS, LATENT, TOKENS = 128, 576, 4096
DRAFTS = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}, "acceptance": 0.8}
SIZES = {"prefill_tokens": TOKENS, "decode_requests": 8, "context_length": 2**17, "prefix_hit_rate": 0.9}
DIVIDED = Deployment("divided", H200, 1, tensor_parallel=8, decode_context_parallel=8, **SIZES, **DRAFTS)
SMALL = dataclasses.replace(DEEPSEEK_V3, num_hidden_layers=2, first_k_dense_replace=1, n_routed_experts=16)


@pytest.fixture(scope="module")
def planned() -> PlannedModel:
    return lay_out(SMALL, DIVIDED)


@pytest.mark.aot
def test_cache_per_token_and_device_falls_by_the_groups_size() -> None:
    replicated = memory_of(lay_out(DEEPSEEK_V3, dataclasses.replace(DIVIDED, decode_context_parallel=1)))
    divided = memory_of(lay_out(DEEPSEEK_V3, DIVIDED))
    assert divided.token * 8 == replicated.token
    assert divided.account.weights == replicated.account.weights
    assert divided.tokens_left == pytest.approx(8 * replicated.tokens_left, rel=0.01)


@pytest.mark.aot
def test_a_decode_step_exchanges_queries_and_parts_and_reads_local_pages(planned: PlannedModel) -> None:
    """Two tokens per request: they share one read of the cache, with the heads of all devices."""
    compiled = compile_run(planned, "decode", runs(planned, "decode")[0])
    found = [c for c in collectives(parse(compiled.text), 8) if c.role == "attention"]
    shapes = {c.kind: c.shape for c in found if c.kind != "all-reduce"}
    assert set(shapes) == {"all-gather", "all-to-all"}
    assert shapes["all-gather"] == f"bf16[{HEADS},16,{LATENT}]"
    assert shapes["all-to-all"] == f"u16[8,16,{HEADS // 8},{512 + 2}]"
    pages = planned.layout.pages["latents"].sharding.shard_shape(planned.layout.pages["latents"].shape)
    assert pages[2] == 64
    pool = rf"bf16\[(?:1,)?{pages[1]},64,{LATENT}\]"
    assert re.search(pool, compiled.text) and not re.search(rf"{pool}\S* copy\(", compiled.text)


@pytest.mark.aot
def test_a_prefill_step_exchanges_queries_with_cached_tokens(planned: PlannedModel) -> None:
    text = planned.programs.get(Key("prefill", TOKENS, AttentionForm.ABSORBED)).as_text()
    found = {c.shape for c in collectives(parse(text), 8) if c.role == "attention" and c.kind == "all-gather"}
    assert found == {f"bf16[{TOKENS},{HEADS},{LATENT}]"}


def test_devices_read_their_share_of_the_cache() -> None:
    rates = kernel_rates(H200, DEEPSEEK_V3)
    batch = PlannedBatch(1, 2**20, experts=32, split=8)
    whole, share = (decode_stages(DEEPSEEK_V3, rates, dataclasses.replace(batch, context_split=n)) for n in (1, 8))
    saved = 7 / 8 * 2**20 * 1152 / rates.hbm
    assert 0.8 * saved < whole["attention"] - share["attention"] < saved, "what remains is bound by products"


def test_a_size_that_does_not_divide_is_refused() -> None:
    with pytest.raises(DeploymentError, match="decode_context_parallel 3 must divide tensor_parallel 8"):
        dataclasses.replace(DIVIDED, decode_context_parallel=3)
