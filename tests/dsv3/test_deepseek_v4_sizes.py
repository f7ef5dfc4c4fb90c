"""What a token of DeepSeek-V4 costs: weights that it meets, operations, and the attention form of its steps."""

import dataclasses

import pytest

from configs.deepseek_v3 import DEEPSEEK_V3
from configs.deepseek_v4 import DEEPSEEK_V4_FLASH, DEEPSEEK_V4_FLASH_0731, DEEPSEEK_V4_PRO, DEEPSEEK_V4_PRO_0813
from dsv3.config.hugging_face import from_hf
from dsv3.config.model import (
    ModelConfig,
    absorbed_operations,
    bounded_operations,
    common_weights,
    index_operations,
    key_operations,
    materialization_operations,
    sizes_of,
)
from dsv3.engine.dtypes import count_parameters
from dsv3.model.batch import AttentionForm
from dsv3.model.forms import applies
from dsv3.scheduler.cost import keys_per_token
from tests.dsv3 import deepseek_v4 as published


@pytest.mark.parametrize(
    ("cfg", "file"),
    [
        (DEEPSEEK_V4_FLASH, published.FLASH),
        (DEEPSEEK_V4_FLASH_0731, published.FLASH_0731),
        (DEEPSEEK_V4_PRO, published.PRO),
        (DEEPSEEK_V4_PRO_0813, published.PRO_0813),
    ],
)
def test_configurations_are_the_published_ones(cfg: ModelConfig, file: dict) -> None:
    assert cfg == from_hf(file)


@pytest.mark.parametrize(
    ("cfg", "total", "active", "head"),
    [(DEEPSEEK_V4_FLASH, 284.33e9, 12.74e9, 0.53e9), (DEEPSEEK_V4_PRO, 1573.0e9, 47.92e9, 0.927e9)],
    ids=["Flash", "Pro"],
)
def test_parameters_are_the_published_numbers(cfg: ModelConfig, total: float, active: float, head: float) -> None:
    """Norms, sinks, biases and tables, which the sizes leave out, are less than 0.01 % of the declared parameters."""
    sizes, L = sizes_of(cfg), cfg.num_hidden_layers
    shared = common_weights(cfg) + L * sizes.router
    assert shared + L * cfg.num_experts_per_tok * sizes.expert == pytest.approx(active, rel=5e-4)
    assert sizes.head == pytest.approx(head, rel=2e-3)
    found = shared + L * cfg.n_routed_experts * sizes.expert + 2 * sizes.head
    declared, _ = count_parameters(dataclasses.replace(cfg, num_nextn_predict_layers=0))
    assert found == pytest.approx(total, rel=1e-4) and found == pytest.approx(declared, rel=1e-4)


def test_an_entry_costs_what_a_token_costs() -> None:
    """512 values are key and value of all 64 heads; index scores have 64 heads of 128; nothing is materialized."""
    assert absorbed_operations(DEEPSEEK_V4_FLASH) == 2 * 64 * (512 + 512)
    assert index_operations(DEEPSEEK_V4_FLASH) == 2 * 64 * 128
    assert materialization_operations(DEEPSEEK_V4_FLASH) == 0


def test_operations_of_attention_over_a_long_context() -> None:
    """43 windows of 128 and 21 times 512 chosen entries at any length; a token more is a share of entries and keys."""
    cfg = DEEPSEEK_V4_FLASH
    assert bounded_operations(cfg) == (43 * 128 + 21 * 512) * 131_072
    assert key_operations(cfg) == 20 * 131_072 / 128 + 21 * 16_384 / 4
    assert (bounded_operations(DEEPSEEK_V3), key_operations(DEEPSEEK_V3)) == (0, 61 * 2 * 128 * 320)


def test_a_long_context_costs_25_times_less_than_that_of_deepseek_v3() -> None:
    assert keys_per_token(DEEPSEEK_V4_FLASH) == pytest.approx(82_748, rel=1e-3)
    assert keys_per_token(DEEPSEEK_V4_FLASH) > 25 * keys_per_token(DEEPSEEK_V3)


@pytest.mark.parametrize(("platform", "form"), [("cuda", AttentionForm.ABSORBED), ("cpu", AttentionForm.ANY)])
def test_steps_have_one_form(platform: str, form: AttentionForm) -> None:
    assert [each for each in AttentionForm if applies(each, DEEPSEEK_V4_FLASH, platform, 100_000)] == [form]
