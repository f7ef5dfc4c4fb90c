"""Makes the golden data of the families beside DeepSeek's: a small random checkpoint each, as published.

Run where transformers 5.23, a CPU torch and safetensors are installed (CI needs none of them):

    python tests/golden/make_families.py [FAMILY ...]

Each family becomes a directory with its configuration file, `model.safetensors` (or `consolidated.safetensors`), and
`golden.npz`: `input_ids`, float32 `logits`, and `greedy`, 16 tokens behind each of 32 prompts (`prompts`, padded with
-1). Glm4_moe_lite also has `mtp_logits_0`, and the two whose attention is sparse have `dense`: the logits where each
token attends to all before it. The oracle is transformers' own class of the family, in float32, on weights that the
files hold exactly.
"""

import copy
import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable

import numpy as np
import torch
import transformers
from make_golden import BLOCK, E4M3_MAX, HERE, hf_tensors, mtp_modules, mtp_results, published, randomise
from safetensors.torch import save_file

BATCH, LENGTH = 1, 48
PROMPTS, TOKENS = 32, 16
Tensors = dict[str, torch.Tensor]

SHAPE = {
    "vocab_size": 48,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "intermediate_size": 32,
    "moe_intermediate_size": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
# The original context is a sixth of the sequences: YaRN matters, and queries grow five times on the way.
MISTRAL_ROPE = {
    "type": "yarn",
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 8,
    "max_position_embeddings": 1024,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
    "partial_rotary_factor": 0.5,
}
# params.json with apply_scale false: YaRN changes frequencies alone.
NATIVE_ROPE = {k: v for k, v in MISTRAL_ROPE.items() if k not in ("mscale", "mscale_all_dim")} | {
    "attention_factor": 1.0
}
V3_ROUTER = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A family: its class in transformers, settings of the class, and what its directory looks like.

    `write` turns the model's tensors under DeepSeek's names and the published settings into files; it may round the
    model's weights on the way, in place.
    """

    oracle: str
    settings: dict
    write: Callable[[pathlib.Path, torch.nn.Module, dict], None]
    extra: dict = dataclasses.field(default_factory=dict)


def save(directory: pathlib.Path, tensors: Tensors, file: str = "model.safetensors") -> None:
    directory.mkdir(exist_ok=True)
    kept = ("bias", "weights_proj.weight")  # float32 in published files too
    exact = {n: t.bfloat16() if t.dtype == torch.float32 and not n.endswith(kept) else t for n, t in tensors.items()}
    save_file({n: t.contiguous().clone() for n, t in exact.items()}, directory / file, {"format": "pt"})


def save_json(path: pathlib.Path, content: dict) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def write_glm(directory: pathlib.Path, model: torch.nn.Module, config: dict) -> None:
    _, tensors = glm_module(model)
    save(directory, tensors | hf_tensors(model))
    save_json(directory / "config.json", config)


def glm_module(model: torch.nn.Module) -> tuple[torch.nn.Module, Tensors]:
    torch.manual_seed(7)
    model.config.num_mtp_layers, model.config.mtp_mlp_layer_types = 1, ["sparse"]
    return mtp_modules(model, 1)


def write_axk1(directory: pathlib.Path, model: torch.nn.Module, config: dict) -> None:
    """Writes the norm behind the experts beside the other norms of its layer, as released."""
    tensors = {name.replace("mlp.post_mlp_layernorm", "post_mlp_layernorm"): t for name, t in hf_tensors(model).items()}
    save(directory, tensors)
    save_json(directory / "config.json", config)


def write_sparse(directory: pathlib.Path, model: torch.nn.Module, config: dict) -> None:
    """Writes DeepSeek-V3.2 or GLM-5, whose indexers are under names of their own."""
    save(directory, hf_tensors(model))
    save_json(directory / "config.json", config)


def write_kimi(directory: pathlib.Path, model: torch.nn.Module, config: dict) -> None:
    """Writes a language model inside of one that sees: names and settings are one level down."""
    tensors = {f"language_model.{name}": t for name, t in hf_tensors(model).items()}
    tensors |= {"vision_tower.patch_embed.proj.weight": torch.ones(4, 3), "mm_projector.proj.0.bias": torch.ones(4)}
    save(directory, tensors)
    text = config | {"model_type": "kimi_k2"}
    outer = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": text,
        "vision_config": {"patch_size": 14, "vt_num_hidden_layers": 1},
        "media_placeholder_token_id": 5,
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "ignore_index": -100,
        "pad_token_id": 3,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    save_json(directory / "config.json", outer)


@torch.no_grad()
def write_mistral_small(directory: pathlib.Path, model: torch.nn.Module, config: dict) -> None:
    """Writes transformers' form of Mistral Small 4: experts in one tensor, and FP8 with one scale for each weight."""
    tensors: Tensors = {}
    for name, value in model.state_dict().items():
        ours = f"language_model.{name}"
        if value.ndim == 3:  # all experts of a layer
            parts = [round_whole(expert) for expert in value]
            tensors[ours] = torch.stack([data for data, _ in parts])
            tensors[f"{ours}_scale_inv"] = torch.stack([scale for _, scale in parts])[:, None, None]
            tensors[f"{ours}_activation_scale"] = torch.ones(len(parts))
        elif value.ndim == 2 and not name.endswith(("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")):
            tensors[ours], tensors[f"{ours}_scale_inv"] = round_whole(value)
            tensors[ours.removesuffix("weight") + "activation_scale"] = torch.tensor(1.0)
        else:
            tensors[ours] = value
    tensors["vision_tower.patch_conv.weight"] = torch.ones(4, 3)
    save(directory, tensors)
    text = {k: v for k, v in config.items() if k not in ("rope_theta", "rope_scaling", "architectures")}
    outer = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "text_config": text | {"rope_parameters": MISTRAL_ROPE, "head_dim": 16, "sliding_window": None},
        "vision_config": {"model_type": "pixtral"},
        "image_token_index": 10,
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
        "quantization_config": {
            "activation_scheme": "static",
            "quant_method": "fp8",
            "weight_block_size": None,
            "modules_to_not_convert": ["model.vision_tower", "lm_head"],
        },
        "dtype": "bfloat16",
    }
    save_json(directory / "config.json", outer)


def round_whole(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds a weight to FP8 with one bfloat16 scale, in place; returns both."""
    scale = torch.exp2(torch.ceil(torch.log2(weight.abs().max() / E4M3_MAX))).bfloat16()
    data = (weight / scale.float()).to(torch.float8_e4m3fn)
    weight.copy_(data.float() * scale.float())
    return data, scale


@torch.no_grad()
def write_mistral_large(directory: pathlib.Path, model: torch.nn.Module, config: dict) -> None:
    """Writes Mistral's own form: params.json, its names, and FP8 in blocks as compressed-tensors has them."""
    tensors: Tensors = {}
    for name, value in hf_tensors(model).items():
        ours = mistral_name(name)
        if value.ndim == 2 and not name.endswith(("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")):
            assert max(value.shape) <= BLOCK, "a weight of one block has one scale"
            tensors[ours], scale = round_whole(value)
            tensors[f"{ours}_scale"] = scale.float()[None, None]
        else:
            tensors[ours] = value
    tensors["vision_encoder.patch_conv.weight"] = torch.ones(4, 3)
    save_file({n: (t if n.endswith("_scale") or t.dtype != torch.float32 else t.bfloat16()).contiguous().clone()
               for n, t in tensors.items()}, directory / "consolidated.safetensors", {"format": "pt"})  # fmt: skip
    params = {
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "head_dim": config["v_head_dim"],
        "hidden_dim": config["intermediate_size"],
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_attention_heads"],
        "rope_theta": MISTRAL_ROPE["rope_theta"],
        "norm_eps": config["rms_norm_eps"],
        "vocab_size": config["vocab_size"],
        "tied_embeddings": False,
        "max_position_embeddings": config["max_position_embeddings"],
        "llama_4_scaling": {"original_max_position_embeddings": 8, "beta": MISTRAL_ROPE["llama_4_scaling_beta"]},
        "yarn": {
            "original_max_position_embeddings": 8,
            "factor": MISTRAL_ROPE["factor"],
            "apply_scale": False,
            "beta": 32,
            "alpha": 1,
        },
        "moe": {
            "expert_parallel": 1,
            "expert_model_parallel": 1,
            "route_every_n": 1,
            "first_k_dense_replace": config["first_k_dense_replace"],
            "num_experts": config["n_routed_experts"],
            "num_experts_per_tok": config["num_experts_per_tok"],
            "num_expert_groups": 1,
            "num_expert_groups_per_tok": 1,
            "routed_scale": config["routed_scaling_factor"],
            "expert_hidden_dim": config["moe_intermediate_size"],
            "num_shared_experts": 1,
        },
        "vision_encoder": {"image_token_id": 10, "hidden_size": 4},
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
                    "input_activations": {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "group"},
                }
            },
            "ignore": ["lm_head"],
        },
    }
    latents = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    save_json(directory / "params.json", params | {name: config[name] for name in latents})


def mistral_name(name: str) -> str:
    """Spells DeepSeek's name of a tensor as Mistral does."""
    swaps = {
        "model.embed_tokens": "tok_embeddings",
        "lm_head": "output",
        "model.norm": "norm",
        "model.layers": "layers",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_a_proj": "attention.wq_a",
        "self_attn.q_a_layernorm": "attention.q_a_norm",
        "self_attn.q_b_proj": "attention.wq_b",
        "self_attn.kv_a_proj_with_mqa": "attention.wkv_a_with_mqa",
        "self_attn.kv_a_layernorm": "attention.kv_a_norm",
        "self_attn.kv_b_proj": "attention.wkv_b",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate.": "gate.",
        "mlp.shared_experts": "shared_experts",
        "mlp.experts": "experts",
        ".mlp.": ".feed_forward.",
        "gate_proj": "w1",
        "down_proj": "w2",
        "up_proj": "w3",
    }
    for theirs, ours in swaps.items():
        name = name.replace(theirs, ours)
    return name


# A third of the 48 tokens are chosen; the first third choose all. Of few heads often none sees a token, and scores of 0
# tie, which torch breaks at random: with 16 heads there is no tie.
INDEXER = {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 16}
PLAIN_ROPE = {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
FAMILIES = {
    "glm4_moe_lite": Recipe(
        "Glm4MoeLite",
        {**SHAPE, **PLAIN_ROPE, "rms_norm_eps": 1e-5, "routed_scaling_factor": 1.8, "eos_token_id": [1, 2, 3]},
        write_glm,
        {"first_k_dense_replace": 1, "topk_method": "noaux_tc", "partial_rotary_factor": 1.0}
        | {"num_nextn_predict_layers": 1, "rope_theta": 10000.0},
    ),
    "axk1": Recipe(
        "AXK1",
        {**SHAPE, **PLAIN_ROPE, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
        write_axk1,
        {**V3_ROUTER, "first_k_dense_replace": 1, "rope_theta": 10000.0},
    ),
    "deepseek_v32": Recipe(
        "DeepseekV32",
        {**SHAPE, **INDEXER, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1}
        | {"rope_parameters": {k: v for k, v in MISTRAL_ROPE.items() if k not in
                               ("llama_4_scaling_beta", "partial_rotary_factor", "max_position_embeddings")}},
        write_sparse,
        {**V3_ROUTER, "rope_theta": 10000.0}
        | {"rope_scaling": {k: MISTRAL_ROPE[k] for k in ("type", "factor", "original_max_position_embeddings",
                                                         "beta_fast", "beta_slow", "mscale", "mscale_all_dim")}},
    ),
    # The second layer takes what the first has chosen, as most of GLM-5.2's do.
    "glm_moe_dsa": Recipe(
        "GlmMoeDsa",
        {**SHAPE, **INDEXER, **PLAIN_ROPE, "num_hidden_layers": 3, "rms_norm_eps": 1e-5, "n_group": 1, "topk_group": 1}
        | {"routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "eos_token_id": [1, 2, 3]}
        | {"indexer_types": ["full", "shared", "full"]},
        write_sparse,
        {**V3_ROUTER, "rope_theta": 10000.0, "indexer_rope_interleave": True},
    ),
    "kimi_k25": Recipe(
        "DeepseekV3",
        {**SHAPE, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827, "first_k_dense_replace": 1}
        | {"rope_parameters": {k: v for k, v in MISTRAL_ROPE.items() if k not in
                               ("llama_4_scaling_beta", "partial_rotary_factor", "max_position_embeddings")}},
        write_kimi,
        {**V3_ROUTER, "rope_theta": 10000.0}
        | {"rope_scaling": {k: MISTRAL_ROPE[k] for k in ("type", "factor", "original_max_position_embeddings",
                                                         "beta_fast", "beta_slow", "mscale", "mscale_all_dim")}},
    ),
    "mistral4": Recipe(
        "Mistral4",
        {**SHAPE, "rope_parameters": MISTRAL_ROPE, "routed_scaling_factor": 1.0, "first_k_dense_replace": 0},
        write_mistral_small,
    ),
    "mistral_large_3": Recipe(
        "Mistral4",
        {**SHAPE, "rope_parameters": NATIVE_ROPE, "routed_scaling_factor": 1.0, "first_k_dense_replace": 1}
        | {"bos_token_id": 1, "eos_token_id": 2},
        write_mistral_large,
    ),
}  # fmt: skip


SPARSE = ("deepseek_v32", "glm_moe_dsa")


def build(recipe: Recipe, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    config = getattr(transformers, f"{recipe.oracle}Config")(**copy.deepcopy(recipe.settings))
    config._experts_implementation = "eager"
    model = getattr(transformers, f"{recipe.oracle}ForCausalLM")(config).eval()
    randomise(model)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("indexer.k_norm.bias"):
                value.normal_(0, 0.3)
        model.lm_head.weight.mul_(8)  # clear winners, and exact in bfloat16
    return model


@torch.no_grad()
def greedy(model: torch.nn.Module) -> tuple[np.ndarray, np.ndarray, float]:
    """Returns prompts, what greedy decoding makes of them, and the smallest margin met on the way."""
    prompts, chosen, margin = np.full((PROMPTS, LENGTH), -1, np.int16), [], np.inf
    for row in range(PROMPTS):
        prompt = torch.randint(4, model.config.vocab_size, (1 + 5 * row % (LENGTH - 8),))
        prompts[row, : len(prompt)] = prompt.numpy()
        ids = prompt
        for _ in range(TOKENS):
            best = model(ids[None]).logits[0, -1].topk(2)
            margin = min(margin, float(best.values[0] - best.values[1]))
            ids = torch.cat([ids, best.indices[:1]])
        chosen.append(ids[-TOKENS:].numpy())
    return prompts, np.stack(chosen).astype(np.int16), margin


def settings_of(recipe: Recipe, model: torch.nn.Module) -> dict:
    settings = {k: v for k, v in recipe.settings.items() if k != "rope_parameters"}
    return published(settings, model, recipe.extra)


@torch.no_grad()
def make(name: str) -> None:
    recipe, directory = FAMILIES[name], HERE / name
    for seed in range(100):
        model = build(recipe, seed)
        directory.mkdir(exist_ok=True)
        recipe.write(directory, model, settings_of(recipe, model))  # rounds FP8 weights before the oracle runs
        prompts, chosen, margin = greedy(model)
        ids = torch.randint(0, SHAPE["vocab_size"], (BATCH, LENGTH))
        logits = model(ids).logits.numpy()
        golden = {"input_ids": ids.numpy().astype(np.int32), "logits": logits, "prompts": prompts, "greedy": chosen}
        if name == "glm4_moe_lite":
            golden["mtp_logits_0"] = mtp_results(model, glm_module(model)[0], ids)["mtp_logits_0"]
        if name in SPARSE:
            dense = copy.deepcopy(model)
            for module in dense.modules():
                if hasattr(module, "index_topk"):
                    module.index_topk = LENGTH
            golden["dense"] = dense(ids).logits.numpy()
        exact = copy.deepcopy(model).double()(ids).logits.numpy()
        error = np.abs(logits - exact).max() / np.abs(exact).max()
        if error < 1e-5 and margin > 1e-3:
            break
    else:
        raise SystemExit(f"{name}: no seed has clear winners")
    np.savez_compressed(directory / "golden.npz", **golden)
    distinct = len(np.unique(chosen))
    print(f"{name}: seed {seed}, |logits| <= {np.abs(exact).max():.1f}, float32 error {error:.1e}, smallest margin "
          f"{margin:.1e}, {distinct} distinct tokens")  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    for family in sys.argv[1:] or FAMILIES:
        make(family)
