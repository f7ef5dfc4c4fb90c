"""Sizes of the latent cache against the published ones."""

from dsv3.config.engine import pages_for
from dsv3.kv_cache import layout
from tests.dsv3.engine.toy import toy_config

V3 = toy_config(num_hidden_layers=61, kv_lora_rank=512, qk_rope_head_dim=64)


def test_deepseek_v3_takes_70_kb_a_token():
    assert layout.token_bytes(V3, "bfloat16") == 70_272
    assert layout.page_bytes(V3, "bfloat16") == 64 * 70_272


def test_mtp_modules_own_pages_too():
    assert layout.token_bytes(toy_config(num_nextn_predict_layers=1), "float32") == 2 * 2 * 4


def test_a_budget_holds_whole_pages():
    page = layout.page_bytes(V3, "bfloat16")
    assert [layout.pages_within(V3, "bfloat16", n) for n in (-5, 0, page - 1, page, 10 * page + 7)] == [
        0,
        0,
        0,
        1,
        10,
    ]


def test_pages_for_tokens():
    assert [pages_for(n, 64) for n in (0, 1, 64, 65)] == [0, 1, 1, 2]
