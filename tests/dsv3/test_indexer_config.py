"""What files say of sparse attention: DeepSeek-V3.2's and GLM-5's are understood, and odd ones refused."""

import dataclasses
from typing import Any

import pytest

from configs.deepseek_v3 import DEEPSEEK_V32
from configs.glm import GLM_5
from dsv3.config.hugging_face import ConfigError, from_hf, to_hf
from dsv3.config.model import ModelConfig, sizes_of
from tools.plan.attention import attended_keys, index_share


def v32(**changes: Any) -> dict[str, Any]:
    """The published file of DeepSeek-V3.2, as far as it differs from what `to_hf` writes of DeepSeek-V3.1."""
    plain = to_hf(dataclasses.replace(DEEPSEEK_V32, indexer=None))
    own = {"model_type": "deepseek_v32", "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
    return plain | own | changes


def glm(**changes: Any) -> dict[str, Any]:
    """A file like GLM-5.2's, of which every fourth layer has an indexer."""
    own = {
        "head_dim": 192,
        "index_share_for_mtp_iteration": True,
        "index_skip_topk_offset": 3,
        "index_topk_freq": 4,
        "index_topk_pattern": None,
        "indexer_rope_interleave": True,
    }
    return to_hf(GLM_5) | own | changes


def shared(cfg: ModelConfig) -> tuple[int, ...]:
    assert cfg.indexer is not None
    return cfg.indexer.shared_layers


def test_published_files() -> None:
    assert from_hf(v32()) == DEEPSEEK_V32
    cfg = from_hf(glm())
    full = [layer for layer in range(78) if layer not in shared(cfg)]
    assert full == [0, 1, 2, *range(6, 78, 4)] and len(full) == 21
    assert cfg.index_layers == (*full, 78)  # the MTP module's own
    assert cfg.indexer is not None and cfg.indexer.interleaved
    without = dataclasses.replace(cfg.indexer, shared_layers=())
    assert dataclasses.replace(cfg, indexer=without) == GLM_5


@pytest.mark.parametrize(
    "said",
    [
        {"index_topk_pattern": "F" * 3 + ("SSSF" * 19)[:75]},
        {"indexer_types": ["full"] * 3 + (["shared"] * 3 + ["full"]) * 18 + ["shared"] * 3},
        {"indexer_types": ["full" if max(i - 2, 0) % 4 == 0 else "shared" for i in range(78)], "index_topk_freq": 1},
    ],
)
def test_three_ways_to_say_which_layers_share(said: dict[str, Any]) -> None:
    assert shared(from_hf(glm(**said))) == shared(from_hf(glm()))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (v32(index_topk=0), "index_topk is 0"),
        (v32(index_n_heads=None), "index_n_heads is None"),
        (v32(index_head_dim=32), "index_head_dim is 32, but must be at least qk_rope_head_dim, 64"),
        (v32(q_lora_rank=None), "q_lora_rank is None, but must be given"),
        (v32(layer_types=["indexed_attention"] * 60 + ["full_attention"]), "layer_types .* 61 times"),
        (v32(layer_types=["deepseek_sparse_attention"] * 60), "layer_types .* 61 times"),
        (v32(layer_types="indexed_attention"), "layer_types .* 61 times"),
        (v32(index_kpool=4), "index_kpool is not a known field"),
        (glm(indexer_types=["shared"] * 78), "indexer_types .* such that the first layer has an indexer"),
        (glm(indexer_types=["full"] * 77), "indexer_types .* 78 layers"),
        (glm(index_topk_pattern="FX" * 39), "index_topk_pattern .* each 'full' or 'shared'"),
        (glm(indexer_rope_interleave=1), "indexer_rope_interleave is 1, but must be true or false"),
    ],
)
def test_what_is_not_supported_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_hf(config)


@pytest.mark.parametrize("cfg", [DEEPSEEK_V32, GLM_5, from_hf(glm())])
def test_what_is_written_says_the_same(cfg: ModelConfig) -> None:
    assert from_hf(to_hf(cfg)) == cfg


def test_halves_with_shared_layers_cannot_be_written() -> None:
    indexer = dataclasses.replace(DEEPSEEK_V32.indexer, shared_layers=(1,))
    with pytest.raises(ConfigError, match=r"indexer is .* which a config.json of model_type deepseek_v32 cannot say"):
        to_hf(dataclasses.replace(DEEPSEEK_V32, indexer=indexer))


def test_a_plan_counts_indexers_and_the_tokens_that_are_attended_to() -> None:
    assert sizes_of(DEEPSEEK_V32).indexer == 64 * 128 * 1536 + 128 * 7168 + 64 * 7168
    assert (attended_keys(DEEPSEEK_V32, 1000.0), attended_keys(DEEPSEEK_V32, 9000.0)) == (1000.0, 2048)
    assert (index_share(DEEPSEEK_V32), index_share(from_hf(glm()))) == (1.0, 21 / 78)
