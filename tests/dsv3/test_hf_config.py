"""config.json: what is published is read exactly, and nothing is silently ignored."""

import copy
import dataclasses
import json
import os
import pathlib
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from configs.deepseek_v2 import DEEPSEEK_V2, DEEPSEEK_V2_LITE
from configs.deepseek_v3 import DEEPSEEK_V3, DEEPSEEK_V31
from configs.kimi import KIMI_K2, MOONLIGHT_16B_A3B
from dsv3.config.hugging_face import ConfigError, from_hf, load_config, to_hf
from dsv3.config.model import ModelConfig, YarnConfig

FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
COMMON = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekConfig"},
    "ep_size": 1,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "kv_lora_rank": 512,
    "moe_layer_freq": 1,
    "pretraining_tp": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "seq_aux": True,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
}
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
V3 = COMMON | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "quantization_config": FP8,
    "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
V31 = V3 | {"quantization_config": FP8 | {"scale_fmt": "ue8m0"}}
V2 = COMMON | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1536,
    "n_group": 8,
    "n_routed_experts": 160,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 128,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 60,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "rope_theta": 10000,
    "routed_scaling_factor": 16.0,
    "scoring_func": "softmax",
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
    "vocab_size": 102400,
}
V2_LITE = V2 | {
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "topk_method": "greedy",
}
MOONLIGHT = V3 | {
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": None,
    "rms_norm_eps": 1e-05,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.446,
    "topk_group": 1,
    "vocab_size": 163840,
}
del MOONLIGHT["rope_scaling"], MOONLIGHT["quantization_config"]
K2 = V3 | {
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "model_type": "kimi_k2",
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": YARN | {"factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
PUBLISHED = {
    "V3": (V3, DEEPSEEK_V3),
    "R1": (V3, DEEPSEEK_V3),
    "V3.1": (V31, DEEPSEEK_V31),
    "V2": (V2, DEEPSEEK_V2),
    "V2-Lite": (V2_LITE, DEEPSEEK_V2_LITE),
    "Moonlight": (MOONLIGHT, MOONLIGHT_16B_A3B),
    "Kimi-K2": (K2, KIMI_K2),
}


@pytest.mark.parametrize("member", PUBLISHED)
def test_published_files_give_the_committed_configurations(member: str) -> None:
    published, cfg = PUBLISHED[member]
    assert from_hf(published) == cfg
    assert hash(cfg) == hash(from_hf(published))


@pytest.mark.parametrize("member", PUBLISHED)
def test_round_trip_through_json(member: str) -> None:
    _, cfg = PUBLISHED[member]
    assert from_hf(json.loads(json.dumps(to_hf(cfg)))) == cfg


def new_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """The same file as transformers 5 writes it."""
    config = copy.deepcopy(config)
    rope = config.pop("rope_scaling", None) or {"type": "default"}
    rope |= {"rope_type": rope["type"], "rope_theta": config.pop("rope_theta")}
    own = {"head_dim": 64, "qk_head_dim": 192, "rope_interleave": True, "output_router_logits": False}
    return config | own | {"rope_parameters": rope, "dtype": "bfloat16", "pad_token_id": None}


@pytest.mark.parametrize("member", PUBLISHED)
def test_the_spelling_of_transformers_5(member: str) -> None:
    published, cfg = PUBLISHED[member]
    assert from_hf(new_spelling(published)) == cfg


def test_defaults_follow_the_model_type() -> None:
    for config in (V3, V2_LITE, K2):
        short = {k: v for k, v in config.items() if k not in ("scoring_func", "topk_method", "norm_topk_prob")}
        if config is V2_LITE:
            short |= {"n_group": None, "topk_group": None}
        assert from_hf(short) == from_hf(config)


def test_settings_that_carry_no_meaning_are_accepted() -> None:
    extra = {"pad_token_id": 5, "num_beams": 1, "temperature": 1.0, "_name_or_path": "x", "torchscript": False}
    assert from_hf(V3 | extra) == DEEPSEEK_V3
    assert from_hf(V3 | {"eos_token_id": [1, 7]}).eos_token_ids == (1, 7)
    assert from_hf(V3 | {"eos_token_id": None, "bos_token_id": None}).eos_token_ids == ()


REFUSED = [
    ({"attention_bias": True}, "attention_bias is True, but must be False"),
    ({"mlp_bias": True}, "mlp_bias"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu', but must be 'silu'"),
    ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
    ({"ep_size": 8}, "ep_size"),
    ({"pretraining_tp": 2}, "pretraining_tp"),
    ({"rope_interleave": False}, "rope_interleave"),
    ({"model_type": "deepseek_v9"}, "model_type is 'deepseek_v9'"),
    ({"model_type": None}, "model_type"),
    ({"scoring_func": "softmax"}, "scoring_func is 'softmax', but must be 'sigmoid'"),
    ({"topk_method": "greedy"}, "topk_method"),
    ({"num_key_value_heads": 8}, "num_key_value_heads is 8, but must be 128"),
    ({"head_dim": 128}, "head_dim"),
    ({"qk_head_dim": 64}, "qk_head_dim"),
    ({"qk_rope_head_dim": 63}, "qk_rope_head_dim is 63, but must be even"),
    ({"hidden_size": "7168"}, "hidden_size is '7168', but must be an integer"),
    ({"hidden_size": 7168.0}, "hidden_size"),
    ({"hidden_size": True}, "hidden_size"),
    ({"hidden_size": 0}, "hidden_size"),
    ({"hidden_size": None}, "hidden_size is None"),
    ({"hidden_size": 2**20 + 1}, "hidden_size is 1048577, but must be an integer of at least 1 and at most 1048576"),
    ({"vocab_size": 10**30}, "vocab_size is 1000000000000000000000000000000, but must be an integer"),
    ({"num_hidden_layers": 10**4000}, "num_hidden_layers is 1000"),
    ({"n_routed_experts": 2**13}, "n_routed_experts"),
    ({"routed_scaling_factor": 10**400}, "but must be a number of at most 1e+12"),
    ({"rope_theta": 1e300}, "rope_theta is 1e+300"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ({"routed_scaling_factor": -1}, "routed_scaling_factor"),
    ({"norm_topk_prob": 1}, "norm_topk_prob is 1, but must be true or false"),
    ({"n_group": 7}, "n_group is 7, but must be a divisor"),
    ({"n_group": 256, "topk_group": 8}, "n_group"),
    ({"topk_group": 9}, "topk_group is 9, but must be at most n_group, 8"),
    ({"num_experts_per_tok": 200}, "num_experts_per_tok is 200, but must be at most the 128"),
    ({"first_k_dense_replace": 62}, "first_k_dense_replace"),
    ({"eos_token_id": 129280}, "eos_token_id is 129280, but must be below vocab_size"),
    ({"eos_token_id": "1"}, "eos_token_id"),
    ({"bos_token_id": [0, 1]}, "bos_token_id"),
    ({"hiden_size": 7168}, "hiden_size is not a known field (did you mean hidden_size?)"),
    ({"sliding_window": 4096}, "sliding_window is not a known field"),
    ({"index_topk": 2048}, "index_topk is not a known field"),
    ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling.type is 'linear', but must be 'yarn' or"),
    ({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 4096}}, "rope_scaling.factor is 'absent'"),
    ({"rope_scaling": YARN | {"factors": 1}}, "rope_scaling.factors is not a known field (did you mean factor?)"),
    ({"rope_scaling": YARN | {"attention_factor": 0.5}}, "rope_scaling.attention_factor"),
    ({"rope_scaling": YARN | {"truncate": False}}, "rope_scaling.truncate"),
    ({"rope_scaling": YARN | {"rope_type": "default"}}, "rope_scaling.type is 'yarn', but must be 'default'"),
    ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn', but must be an object or null"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1.0}}, "rope_parameters"),
    ({"rope_scaling": YARN | {"rope_theta": 5.0}}, "rope_theta is 10000, but must be equal to"),
    ({"rope_theta": None}, "rope_theta"),
    ({"quantization_config": FP8 | {"quant_method": "awq"}}, "quantization_config.quant_method is 'awq'"),
    ({"quantization_config": FP8 | {"weight_block_size": [64, 128]}}, "weight_block_size is [64, 128], but must be"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config.weight_block_size is 'absent'"),
    ({"quantization_config": FP8 | {"scale_fmt": "e5m2"}}, "quantization_config.scale_fmt"),
    ({"quantization_config": FP8 | {"activation_scheme": "static"}}, "quantization_config.activation_scheme"),
    ({"quantization_config": FP8 | {"bits": 8}}, "quantization_config.bits is not a known field"),
]


@pytest.mark.parametrize("change, text", REFUSED, ids=[json.dumps(c)[:60] for c, _ in REFUSED])
def test_refusals_name_the_field(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_hf(V3 | change)
    assert text in str(error.value)


@pytest.mark.parametrize("name", ["q_lora_rank", "hidden_size", "rms_norm_eps", "first_k_dense_replace", "model_type"])
def test_what_has_no_safe_default_must_be_stated(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        from_hf({k: v for k, v in V3.items() if k != name})


def test_v2_with_renormalisation_is_refused() -> None:
    with pytest.raises(ConfigError, match="norm_topk_prob"):
        from_hf(V2 | {"norm_topk_prob": True})


def test_what_the_format_cannot_say_is_refused() -> None:
    with pytest.raises(ConfigError, match="latent_norm_eps"):
        to_hf(dataclasses.replace(DEEPSEEK_V3, latent_norm_eps=1e-5))


def test_yarn_defaults() -> None:
    cfg = from_hf(V3 | {"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 2048}})
    assert cfg.yarn == YarnConfig(4.0, 2048, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=0.0)


def tiny(**changes: Any) -> tuple[ModelConfig, dict[str, Any]]:
    cfg = dataclasses.replace(MOONLIGHT_16B_A3B, num_hidden_layers=2, **changes)
    return cfg, to_hf(cfg)


def test_load_config_adds_the_end_tokens_of_generation(tmp_path: pathlib.Path) -> None:
    cfg, config = tiny()
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_config(tmp_path) == cfg
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [163585, 163586], "max_length": 9}))
    assert load_config(str(tmp_path)).eos_token_ids == (163586, 163585)


def test_load_config_leaves_out_mtp_modules_that_are_not_there(tmp_path: pathlib.Path) -> None:
    cfg, config = tiny(num_nextn_predict_layers=1)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_config(tmp_path) == cfg, "without weights to look at the file is believed"
    save_file({"model.layers.1.input_layernorm.weight": np.zeros(1)}, tmp_path / "model.safetensors")
    assert load_config(tmp_path).num_nextn_predict_layers == 0
    save_file({"model.layers.2.enorm.weight": np.zeros(1)}, tmp_path / "more.safetensors")
    assert load_config(tmp_path) == cfg
    index = {"weight_map": {"model.layers.2.enorm.weight": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load_config(tmp_path) == cfg
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    assert load_config(tmp_path).num_nextn_predict_layers == 0


@pytest.mark.parametrize("content", [None, "{", "[]", '"x"', "\xff", "[" * 200_000, '{"a":' * 200_000])
def test_load_config_refuses_what_is_no_object(tmp_path: pathlib.Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_config(tmp_path)


@pytest.mark.parametrize("header", [b"[" * 200_000, b"[[1]]", b"5", None])
def test_load_config_leaves_weights_that_are_none_to_the_loader(tmp_path: pathlib.Path, header: bytes | None) -> None:
    """The header of a file that is no safetensors file, or a pipe, which nobody would ever write to."""
    cfg, config = tiny(num_nextn_predict_layers=1)
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = tmp_path / "model.safetensors"
    if header is None:
        os.mkfifo(path)
    else:
        path.write_bytes(len(header).to_bytes(8, "little") + header)
    assert load_config(tmp_path) == dataclasses.replace(cfg, num_nextn_predict_layers=0)


@pytest.mark.parametrize("weight_map", [5, [[1]], [1]])
def test_load_config_leaves_an_index_that_is_none_to_the_loader(tmp_path: pathlib.Path, weight_map: Any) -> None:
    cfg, config = tiny(num_nextn_predict_layers=1)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert load_config(tmp_path) == dataclasses.replace(cfg, num_nextn_predict_layers=0)
