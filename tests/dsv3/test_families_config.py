"""Configuration files of the families beside DeepSeek's: what they say is understood, and nothing silently ignored."""

import copy
import dataclasses
import json
import pathlib
from typing import Any

import pytest

from configs.axk1 import AXK1
from configs.glm import GLM_4_7_FLASH
from configs.kimi import KIMI_K2_THINKING, KIMI_K25
from configs.mistral import MISTRAL_LARGE_3, MISTRAL_SMALL_4
from dsv3.config.hugging_face import ConfigError, from_hf, has_config, load_config, stored_dtype, to_hf
from dsv3.config.hugging_face.deepseek import FAMILIES, WRAPPERS
from dsv3.config.hugging_face.directory import as_config
from dsv3.config.hugging_face.names import is_of_other_media, text_name
from dsv3.config.model import QueryScaling
from tests.dsv3.model.golden import DIRECTORY

GLM = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "eos_token_id": [154820, 154827, 154829],
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "model_type": "glm4_moe_lite",
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 154820,
    "partial_rotary_factor": 1.0,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "transformers_version": "5.0.0rc0",
    "v_head_dim": 256,
    "vocab_size": 154880,
}
LARGE = {
    "activation": "silu",
    "dim": 7168,
    "head_dim": 128,
    "hidden_dim": 16384,
    "kv_lora_rank": 512,
    "llama_4_scaling": {"beta": 0.1, "original_max_position_embeddings": 8192},
    "max_position_embeddings": 294912,
    "moe": {
        "expert_hidden_dim": 4096,
        "expert_model_parallel": 1,
        "expert_parallel": 1,
        "first_k_dense_replace": 3,
        "num_expert_groups": 1,
        "num_expert_groups_per_tok": 1,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "num_shared_experts": 1,
        "route_every_n": 1,
        "routed_scale": 1.0,
    },
    "n_heads": 128,
    "n_kv_heads": 128,
    "n_layers": 61,
    "norm_eps": 1e-06,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"},
    "rope_theta": 10000.0,
    "tied_embeddings": False,
    "v_head_dim": 128,
    "vision_encoder": {"hidden_size": 1664},
    "vocab_size": 131072,
    "yarn": {"alpha": 1, "apply_scale": False, "beta": 32, "factor": 36, "original_max_position_embeddings": 8192},
}
ALL = {"GLM": GLM_4_7_FLASH, "A.X-K1": AXK1, "K2.5": KIMI_K25, "Small 4": MISTRAL_SMALL_4, "Large 3": MISTRAL_LARGE_3}


def changed(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The file with other values; a name with "__" reaches into an object, DELETE takes a field away."""
    config = copy.deepcopy(config)
    for name, value in changes.items():
        *path, last = name.split("__")
        place = config
        for part in path:
            place = place[part]
        if value is DELETE:
            del place[last]
        else:
            place[last] = value
    return config


DELETE = object()


def golden(family: str) -> dict[str, Any]:
    return json.loads((DIRECTORY / family / "config.json").read_text())


def test_published_files_give_the_committed_configurations() -> None:
    assert from_hf(GLM) == GLM_4_7_FLASH
    assert from_hf(as_config(LARGE)) == MISTRAL_LARGE_3
    assert (from_hf(GLM).family, from_hf(as_config(LARGE)).family) == ("glm4_moe_lite", "mistral_large_3")


@pytest.mark.parametrize("member", ALL)
def test_round_trip_through_json(member: str) -> None:
    assert from_hf(json.loads(json.dumps(to_hf(ALL[member])))) == ALL[member]


@pytest.mark.parametrize("family", ["glm4_moe_lite", "axk1", "kimi_k25", "mistral4", "mistral_large_3"])
def test_the_golden_directories(family: str, tmp_path: pathlib.Path) -> None:
    cfg = load_config(DIRECTORY / family)
    assert cfg.family == ("mistral3" if family == "mistral4" else family)
    (tmp_path / "config.json").write_text(json.dumps(to_hf(cfg)))
    assert load_config(tmp_path) == cfg
    assert has_config(tmp_path) and has_config(DIRECTORY / family)
    assert stored_dtype(DIRECTORY / "kimi_k25") == "bfloat16"
    assert stored_dtype(DIRECTORY / "mistral_large_3") is None


def test_int4_experts_as_kimi_publishes_them() -> None:
    assert from_hf(K2) == KIMI_K2_THINKING
    wrapped = changed(golden("kimi_k25"), quantization_config=INT4)
    for width in ("hidden_size", "moe_intermediate_size"):
        wrapped["text_config"][width] = 256
    assert from_hf(wrapped).int4_experts


def test_layers_may_be_listed_one_by_one() -> None:
    listed = changed(GLM, first_k_dense_replace=DELETE, mlp_layer_types=["dense"] + ["sparse"] * 46)
    assert from_hf(listed) == GLM_4_7_FLASH
    for types in (["sparse"] * 46 + ["dense"], ["dense"] * 46, "dense", [1] * 47):
        with pytest.raises(ConfigError, match="mlp_layer_types"):
            from_hf(changed(listed, mlp_layer_types=types))
    with pytest.raises(ConfigError, match="first_k_dense_replace is 2"):
        from_hf(changed(listed, first_k_dense_replace=2))


def test_an_unknown_family_is_told_all_that_are_known() -> None:
    with pytest.raises(ConfigError) as error:
        from_hf({"model_type": "llama"})
    assert "model_type is 'llama', but must be" in str(error.value)
    known = {**FAMILIES, **WRAPPERS}
    assert all(f"{name!r} ({family.members})" in str(error.value) for name, family in known.items())
    for odd in (None, 5, [], {}, ["deepseek_v3"]):
        with pytest.raises(ConfigError, match="model_type"):
            from_hf({"model_type": odd})


MISTRAL = changed(golden("mistral4"), text_config__rope_parameters__llama_4_scaling_beta=0.25)
INT4 = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
K2 = to_hf(dataclasses.replace(KIMI_K2_THINKING, int4_experts=False)) | {"quantization_config": INT4}


def int4(value: Any, *path: str) -> dict[str, Any]:
    """Kimi-K2-Thinking with another value in its quantization; "weights" lie where the file has them."""
    shorter = {"group": ("config_groups", "group_0"), "weights": ("config_groups", "group_0", "weights")}
    first, *rest = path
    return changed(K2, **{"__".join(("quantization_config", *shorter.get(first, (first,)), *rest)): value})


REFUSED = [
    (changed(GLM, partial_rotary_factor=0.5), "partial_rotary_factor is 0.5, but must be 1.0"),
    (changed(GLM, head_dim=128), "head_dim is 128, but must be 64 or 256"),
    (changed(GLM, scoring_func="softmax"), "scoring_func"),
    (changed(golden("axk1"), topk_method="greedy"), "topk_method"),
    (changed(golden("kimi_k25"), text_config=DELETE), "text_config is 'absent', but must be an object"),
    (changed(golden("kimi_k25"), text_config__model_type="llama"), "text_config.model_type is 'llama'"),
    (changed(golden("kimi_k25"), text_config__hidden_size="24"), "text_config.hidden_size is '24'"),
    (changed(golden("kimi_k25"), tie_word_embeddings=1), "tie_word_embeddings is 1, but must be true or false"),
    (changed(golden("kimi_k25"), logit_scale=2.0), "logit_scale is not a known field"),
    (int4("int-quantized", "format"), "format is 'int-quantized', but must be 'float-quantized' or 'pack-quantized'"),
    (int4({}, "config_groups"), "quantization_config.config_groups is {}"),
    (int4({}, "config_groups", "group_1"), "quantization_config.config_groups.group_1 is not a known field"),
    (int4(["MoE"], "group", "targets"), "group_0.targets is ['MoE'], but must be ['Linear']"),
    (int4({"num_bits": 8}, "group", "input_activations"), "group_0.input_activations is {'num_bits': 8}, but must be"),
    (int4(8, "weights", "num_bits"), "weights.num_bits is 8, but must be 4"),
    (int4("float", "weights", "type"), "weights.type is 'float', but must be 'int'"),
    (int4(False, "weights", "symmetric"), "weights.symmetric is False, but must be True"),
    (int4("channel", "weights", "strategy"), "weights.strategy is 'channel', but must be 'group'"),
    (int4(128, "weights", "group_size"), "weights.group_size is 128, but must be 32"),
    (int4("group", "weights", "actorder"), "weights.actorder is 'group', but must be None"),
    (int4(1, "weights", "levels"), "weights.levels is not a known field"),
    (int4("lm_head", "ignore"), "quantization_config.ignore is 'lm_head', but must be a list"),
    (int4("frozen", "quantization_status"), "quantization_status is 'frozen', but must be 'compressed'"),
    (int4({"format": "sparse"}, "sparsity_config"), "sparsity_config is {'format': 'sparse'}, but must be {}"),
    (int4({"num_bits": 8}, "kv_cache_scheme"), "kv_cache_scheme is {'num_bits': 8}, but must be None"),
    (changed(K2, moe_intermediate_size=1920), "moe_intermediate_size is 1920, but must be a multiple of 256"),
    (changed(MISTRAL, text_config__n_group=2, text_config__topk_group=2), "text_config.n_group is 2, but must be 1:"),
    (changed(MISTRAL, text_config__sliding_window=4096), "text_config.sliding_window"),
    (changed(MISTRAL, text_config__rope_parameters__partial_rotary_factor=1.0), "partial_rotary_factor"),
    (changed(MISTRAL, text_config__rope_parameters__attention_factor=1.0), "mscale is 1.0, but must be None"),
    (changed(MISTRAL, quantization_config__weight_block_size=[64, 64]), "activation_scheme is 'static', but must be"),
]  # fmt: skip


@pytest.mark.parametrize("config, text", REFUSED, ids=[text[:50] for _, text in REFUSED])
def test_refusals_name_the_field(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_hf(config)
    assert text in str(error.value)


def test_queries_that_grow() -> None:
    assert from_hf(MISTRAL).query_scaling == QueryScaling(0.25, 8)
    assert from_hf(changed(MISTRAL, text_config__rope_parameters__llama_4_scaling_beta=DELETE)).query_scaling is None


BLOCKS = json.loads((DIRECTORY / "mistral_large_3" / "params.json").read_text())
WEIGHTS = "quantization_config__config_groups__group_0__weights"
REFUSED_PARAMS = [
    (changed(LARGE, moe=DELETE), "only Mistral's models with kv_lora_rank and moe"),
    (changed(LARGE, kv_lora_rank=DELETE), "only Mistral's models with kv_lora_rank and moe"),
    (changed(LARGE, moe__use_load_balancing_bias=True), "params.json: moe.use_load_balancing_bias"),
    (changed(LARGE, moe__capacity=2), "params.json: moe.capacity is not a known field"),
    (changed(LARGE, use_biases=True), "params.json: use_biases is not a known field"),
    (changed(LARGE, yarn__apply_scale=True), "params.json: yarn.apply_scale is True, but must be False"),
    (changed(LARGE, llama_4_scaling__original_max_position_embeddings=4096), "must be that of yarn"),
    (changed(LARGE, quantization__qformat_weight="nvfp4"), "params.json: quantization.qformat_weight is 'nvfp4'"),
    (changed(BLOCKS, quantization_config__transform_config={"R1": 1}), "transform_config is {'R1': 1}, but must be {}"),
    (changed(BLOCKS, **{f"{WEIGHTS}__symmetric": False}), "weights.symmetric is False, but must be True"),
    (changed(BLOCKS, **{f"{WEIGHTS}__levels": 1}), "weights.levels is not a known field"),
    (changed(LARGE, dim="7168"), "params.json: hidden_size is '7168'"),
    (changed(LARGE, moe__num_expert_groups=2, moe__num_expert_groups_per_tok=2), "n_group is 2, but must be 1"),
]


@pytest.mark.parametrize("params, text", REFUSED_PARAMS, ids=[text[:50] for _, text in REFUSED_PARAMS])
def test_refusals_of_params(params: dict[str, Any], text: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "params.json").write_text(json.dumps(params))
    with pytest.raises(ConfigError) as error:
        load_config(tmp_path)
    assert text in str(error.value)


def test_mistrals_own_file_counts_where_both_are(tmp_path: pathlib.Path) -> None:
    """config.json has mscale_all_dim 1, which transformers takes for a temperature; params.json denies it."""
    (tmp_path / "config.json").write_text(json.dumps(to_hf(MISTRAL_LARGE_3)))
    (tmp_path / "params.json").write_text(json.dumps(changed(LARGE, rope_theta=5.0)))
    cfg = load_config(tmp_path)
    assert (cfg.rope_theta, cfg.family) == (5.0, "mistral4")
    (tmp_path / "config.json").write_text(json.dumps(GLM))
    assert load_config(tmp_path) == GLM_4_7_FLASH


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("language_model.model.layers.3.mlp.gate.weight", "model.layers.3.mlp.gate.weight"),
        ("language_model.model.blocks.3.mlp.gate.weight", "model.layers.3.mlp.gate.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.language_model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("layers.12.experts.7.w3.qscale_weight", "model.layers.12.mlp.experts.7.up_proj.weight_scale_inv"),
        ("layers.0.feed_forward.w2.weight", "model.layers.0.mlp.down_proj.weight"),
        ("layers.5.shared_experts.w1.qscale_act", "model.layers.5.mlp.shared_experts.gate_proj.activation_scale"),
        ("layers.5.attention.wkv_a_with_mqa.weight", "model.layers.5.self_attn.kv_a_proj_with_mqa.weight"),
        ("layers.5.gate.weight", "model.layers.5.mlp.gate.weight"),
        ("tok_embeddings.weight", "model.embed_tokens.weight"),
        ("model.layers.1.mlp.down_proj.weight_scale", "model.layers.1.mlp.down_proj.weight_scale_inv"),
        ("model.layers.61.eh_proj.weight", "model.layers.61.eh_proj.weight"),
        ("layers.5.other.weight", "layers.5.other.weight"),
        ("unknown", "unknown"),
    ],
)
def test_names_of_tensors(theirs: str, ours: str) -> None:
    assert text_name(theirs) == ours


def test_tensors_of_other_media() -> None:
    assert is_of_other_media("vision_tower.encoder.blocks.0.wqkv.weight")
    assert is_of_other_media("model.multi_modal_projector.linear_1.weight")
    assert not is_of_other_media("language_model.model.vision_tower.weight")
    assert not is_of_other_media("model.layers.0.mlp.gate.weight")
