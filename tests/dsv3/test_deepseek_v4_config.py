"""What files say of DeepSeek-V4: the published form and transformers' are understood, and odd ones refused."""

import json
import pathlib
import re
from typing import Any

import pytest

from dsv3.config.hugging_face import ConfigError, from_hf, load_config, to_hf
from dsv3.config.model import CompressedAttention, DSparkConfig, Fp8Config, HyperConnections, IndexerConfig, YarnConfig
from tests.dsv3.deepseek_v4 import FLASH, FLASH_0731, PRO, PRO_0813
from tests.dsv3.model.golden import DIRECTORY

YARN = FLASH["rope_scaling"]
KINDS = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}


def saved(published: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """What transformers writes of a published file."""
    layers, hashed = published["num_hidden_layers"], published["num_hash_layers"]
    plain = {"partial_rotary_factor": 0.125}
    own = {
        "layer_types": [KINDS[ratio] for ratio in published["compress_ratios"][:layers]],
        "compress_rates": {KINDS[4]: 4, KINDS[128]: 128},
        "mlp_layer_types": ["hash_moe"] * hashed + ["moe"] * (layers - hashed),
        "rope_parameters": {
            "main": plain | {"rope_type": "default", "rope_theta": 10000},
            "compress": plain | YARN | {"rope_type": "yarn", "rope_theta": 160000, "attention_factor": 1.0},
        },
        "mlp_bias": False,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
        "output_router_logits": False,
    } | plain
    left = {k: v for k, v in published.items() if k not in ("compress_ratios", "num_hash_layers", "rope_scaling")}
    return {k: v for k, v in (left | own | changes).items() if v is not None}


def golden(member: str) -> dict[str, Any]:
    return json.loads((DIRECTORY / member / "config.json").read_text())


def test_flash() -> None:
    cfg = from_hf(FLASH)
    assert cfg.family == "deepseek_v4" and hash(cfg) == hash(from_hf(dict(FLASH)))
    assert cfg.compressed == CompressedAttention(
        ratios=(0, 0, *(4, 128) * 20, 4),
        sparse_ratio=4,
        window=128,
        indexer=IndexerConfig(num_heads=64, head_dim=128, topk=512, interleaved=True),
        rope_theta=160000.0,
        yarn=YarnConfig(16.0, 65536, mscale=0.0, mscale_all_dim=0.0),
        output_groups=8,
        output_rank=1024,
    )
    assert [cfg.compressed.ratios.count(ratio) for ratio in (0, 4, 128)] == [2, 21, 20]
    assert cfg.hyper_connections == HyperConnections(streams=4, sinkhorn_iterations=20, eps=1e-6)
    assert (cfg.latent_dim, cfg.v_head_dim, cfg.qk_rope_head_dim) == (512, 512, 64)
    assert cfg.softmax_scale == 512**-0.5 and cfg.yarn is None and cfg.rope_theta == 10000.0
    assert (cfg.scoring_func, cfg.num_hash_layers, cfg.swiglu_limit) == ("sqrtsoftplus", 3, 10.0)
    assert cfg.fp8 == Fp8Config("ue8m0") and cfg.fp4_experts
    assert (cfg.num_nextn_predict_layers, cfg.dspark) == (1, None)


def test_pro() -> None:
    cfg = from_hf(PRO)
    assert cfg.compressed is not None
    assert [cfg.compressed.ratios.count(ratio) for ratio in (0, 4, 128)] == [0, 30, 31]
    assert (cfg.compressed.indexer.topk, cfg.compressed.output_groups, cfg.num_experts_per_tok) == (1024, 16, 6)


@pytest.mark.parametrize(("config", "layers", "rank"), [(FLASH_0731, (40, 41, 42), 256), (PRO_0813, (58, 59, 60), 512)])
def test_final_checkpoints_have_stages_of_dspark_and_no_mtp_module(
    config: dict[str, Any], layers: tuple[int, ...], rank: int
) -> None:
    cfg = from_hf(config)
    assert cfg.dspark == DSparkConfig(3, 5, 128799, layers, rank)
    assert cfg.num_nextn_predict_layers == 0
    assert from_hf(saved(config)).dspark is None  # transformers writes no stages


@pytest.mark.parametrize("layers", [[], [41, 40, 42], [40, 40, 42], "40"])
def test_layers_that_stages_read_are_in_their_order(layers: Any) -> None:
    with pytest.raises(ConfigError, match="dspark_target_layer_ids"):
        from_hf(FLASH_0731 | {"dspark_target_layer_ids": layers})


@pytest.mark.parametrize("published", [FLASH, PRO])
def test_both_forms_say_the_same(published: dict[str, Any]) -> None:
    assert from_hf(saved(published)) == from_hf(published)
    assert from_hf(saved(published, qk_rope_head_dim=None)) == from_hf(published)
    assert from_hf(saved(published) | {"compress_ratios": published["compress_ratios"]}) == from_hf(published)


def test_the_form_that_transformers_has_written() -> None:
    cfg = from_hf(golden("deepseek_v4_plain"))
    assert cfg.compressed is not None and cfg.compressed.ratios == (8, 4, 0, 4)
    assert (cfg.num_hash_layers, cfg.fp8, cfg.fp4_experts) == (1, None, False)


def test_types_of_experts() -> None:
    inside = FLASH["quantization_config"] | {"expert_dtype": "fp8"}
    assert from_hf(FLASH | {"expert_dtype": "fp4"}) == from_hf(FLASH)
    for base in ({"expert_dtype": "fp8"}, {"quantization_config": inside}):
        cfg = from_hf(FLASH | base)
        assert cfg.fp8 == Fp8Config("ue8m0") and not cfg.fp4_experts
    with pytest.raises(ConfigError, match=r"quantization_config\.expert_dtype is 'int4'"):
        from_hf(FLASH | {"quantization_config": inside | {"expert_dtype": "int4"}})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"compress_ratios": [0, 0, *[4, 64] * 20, 4, 0]}, "compress_ratios"),
        ({"compress_ratios": [0, 0, 4]}, "compress_ratios"),
        ({"compress_ratios": [*FLASH["compress_ratios"][:43], 4]}, "compress_ratios"),
        ({"compress_ratios": [True, 0, *[4, 128] * 20, 4]}, "compress_ratios"),
        ({"compress_ratios": None}, "compress_ratios"),
        ({"compress_ratios": [0] * 44}, "compress_ratios.* at least one layer"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers"),
        ({"layer_types": [KINDS[4]] * 43}, "layer_types"),
        ({"mlp_layer_types": ["moe", "hash_moe"] + ["moe"] * 41}, "mlp_layer_types"),
        ({"mlp_layer_types": ["hash_moe"] * 2 + ["moe"] * 41}, "num_hash_layers is 3"),
        ({"num_hash_layers": 44}, "num_hash_layers"),
        ({"compress_rate_csa": 128}, "compress_rates"),
        ({"compress_rate_hca": 96, "compress_ratios": [0, 0, *[4, 96] * 20, 4, 0]}, "compress_rates"),
        ({"sliding_window": 257}, "sliding_window"),
        ({"rope_scaling": YARN | {"mscale": 1.0}}, r"rope_scaling\.mscale is 1\.0"),
        ({"rope_scaling": YARN | {"attention_factor": 1.277}}, r"rope_scaling\.attention_factor"),
        ({"rope_scaling": YARN | {"type": "linear"}}, r"rope_scaling\.type"),
        ({"rope_parameters": saved(FLASH)["rope_parameters"]}, "rope_scaling"),
        ({"rope_scaling": None, "rope_parameters": YARN}, r"rope_parameters\.main"),
        ({"scoring_func": "sigmoid"}, "scoring_func"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"attention_bias": True}, "attention_bias"),
        ({"num_key_value_heads": 64}, "num_key_value_heads"),
        ({"n_shared_experts": 2}, "n_shared_experts"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"qk_rope_head_dim": 512}, "qk_rope_head_dim"),
        ({"index_head_dim": 32}, "index_head_dim"),
        ({"o_groups": 7}, "o_groups"),
        ({"intermediate_size": 18432}, "intermediate_size"),
        ({"num_experts_per_tok": 257}, "num_experts_per_tok"),
        ({"dspark_target_layer_ids": [40, 41, 43]}, "dspark_target_layer_ids|dspark_block_size"),
        ({"eos_token_id": 129280}, "eos_token_id"),
        ({"n_group": 8}, "n_group is not a known field"),
        ({"kv_lora_rank": 512}, "kv_lora_rank is not a known field"),
        ({"engram_layer_ids": [1, 14]}, "engram_layer_ids is not a known field"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, r"quantization_config\.quant_method"),
    ],
)
def test_what_is_not_understood_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        from_hf(FLASH | changes)


def test_deepseek_v41_is_refused_for_what_it_is(tmp_path: pathlib.Path) -> None:
    """The error names the model and a page that exists."""
    config = {"model_type": "deepseek_v41", "text_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for read, of in ((from_hf, config), (load_config, tmp_path)):
        with pytest.raises(ConfigError, match=r"DeepSeek-V4\.1, which is not served.*n-grams") as error:
            read(of)  # type: ignore[operator]
        [page] = re.findall(r"docs/\w+\.md", str(error.value))
        assert (pathlib.Path(__file__).parents[2] / page).is_file()


@pytest.mark.parametrize(
    "config", [FLASH, PRO, FLASH_0731, FLASH | {"expert_dtype": "fp8"}, golden("deepseek_v4_plain")]
)
def test_a_written_configuration_says_the_same(config: dict[str, Any]) -> None:
    assert from_hf(to_hf(from_hf(config))) == from_hf(config)
