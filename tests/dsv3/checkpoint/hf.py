"""Small Hugging Face checkpoints: an oracle with its own names and stacking, independent of `dsv3.checkpoint`."""

import json
import pathlib

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from dsv3.config.model import Fp8Config, ModelConfig

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
Tensors = dict[str, np.ndarray]

NOT_FP8 = ("norm", "embed_tokens", "head", "mlp.gate.", "eh_proj")


def config(**changes) -> ModelConfig:
    """A model with every kind of layer: two dense, two MoE, one MTP module, query latent, shared expert."""
    sizes = {
        "vocab_size": 40,
        "hidden_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 3,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 5,
        "intermediate_size": 20,
        "moe_intermediate_size": 12,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "q_lora_rank": 10,
        "first_k_dense_replace": 2,
        "num_nextn_predict_layers": 1,
    }
    return ModelConfig(**{**sizes, **changes})


def fp8_config(**changes) -> ModelConfig:
    """Partial blocks everywhere, and fused pairs whose first part is a whole number of blocks."""
    sizes = {
        "hidden_size": 200,
        "q_lora_rank": 128,
        "kv_lora_rank": 40,
        "qk_nope_head_dim": 50,
        "qk_rope_head_dim": 36,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "n_routed_experts": 2,
        "fp8": Fp8Config(),
    }
    return config(**{**sizes, **changes})


def shapes(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint, by the published names."""
    D, W = cfg.hidden_size, cfg.vocab_size
    result = {"model.embed_tokens.weight": (W, D), "model.norm.weight": (D,)}
    if not cfg.tie_word_embeddings:
        result["lm_head.weight"] = (W, D)
    for i in range(cfg.num_hidden_layers + cfg.num_nextn_predict_layers):
        layer = _layer(cfg, dense=i < cfg.first_k_dense_replace)
        if i >= cfg.num_hidden_layers:
            layer |= {"embed_tokens.weight": (W, D), "shared_head.head.weight": (W, D), "eh_proj.weight": (D, 2 * D)}
            layer |= {f"{norm}.weight": (D,) for norm in ("enorm", "hnorm", "shared_head.norm")}
        result |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return result


def _layer(cfg: ModelConfig, *, dense: bool) -> dict[str, tuple[int, ...]]:
    D, H, R, Q = cfg.hidden_size, cfg.num_attention_heads, cfg.kv_lora_rank, cfg.q_lora_rank
    queries = H * (cfg.qk_nope_head_dim + cfg.qk_rope_head_dim)
    layer = {
        "input_layernorm.weight": (D,),
        "post_attention_layernorm.weight": (D,),
        "self_attn.kv_a_proj_with_mqa.weight": (R + cfg.qk_rope_head_dim, D),
        "self_attn.kv_a_layernorm.weight": (R,),
        "self_attn.kv_b_proj.weight": (H * (cfg.qk_nope_head_dim + cfg.v_head_dim), R),
        "self_attn.o_proj.weight": (D, H * cfg.v_head_dim),
    }
    if Q:
        layer |= {"self_attn.q_a_proj.weight": (Q, D), "self_attn.q_a_layernorm.weight": (Q,)}
        layer |= {"self_attn.q_b_proj.weight": (queries, Q)}
    else:
        layer |= {"self_attn.q_proj.weight": (queries, D)}
    if dense:
        return layer | _mlp("mlp", D, cfg.intermediate_size)
    layer["mlp.gate.weight"] = (cfg.n_routed_experts, D)
    if cfg.topk_method == "noaux_tc":
        layer["mlp.gate.e_score_correction_bias"] = (cfg.n_routed_experts,)
    for e in range(cfg.n_routed_experts):
        layer |= _mlp(f"mlp.experts.{e}", D, cfg.moe_intermediate_size)
    if cfg.n_shared_experts:
        layer |= _mlp("mlp.shared_experts", D, cfg.n_shared_experts * cfg.moe_intermediate_size)
    return layer


def _mlp(prefix: str, D: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (width, D),
        f"{prefix}.up_proj.weight": (width, D),
        f"{prefix}.down_proj.weight": (D, width),
    }


def random_tensors(cfg: ModelConfig, seed: int = 0, dtype: np.dtype = BF16, scale_dtype=np.float32) -> Tensors:
    """Random values; FP8 with block scales where the published FP8 checkpoints have it and `cfg.fp8` is set."""
    rng = np.random.default_rng(seed)
    tensors: Tensors = {}
    for name, shape in shapes(cfg).items():
        values = rng.normal(size=shape).astype(np.float32)
        if cfg.fp8 is not None and len(shape) == 2 and not any(part in name for part in NOT_FP8):
            tensors[name] = values.astype(E4M3)
            exponents = rng.integers(-6, 6, size=[-(-n // 128) for n in shape])
            scale = np.exp2(exponents) * (1 if scale_dtype == E8M0 else rng.uniform(1, 2, size=exponents.shape))
            tensors[name + "_scale_inv"] = scale.astype(scale_dtype)
        else:
            tensors[name] = values.astype(np.float32 if "e_score" in name else dtype)
    for i in range(cfg.num_hidden_layers, cfg.num_hidden_layers + cfg.num_nextn_predict_layers):
        head = "model.embed_tokens.weight" if cfg.tie_word_embeddings else "lm_head.weight"
        tensors[f"model.layers.{i}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
        tensors[f"model.layers.{i}.shared_head.head.weight"] = tensors[head]
    return tensors


def save(path: pathlib.Path, tensors: Tensors) -> None:
    """A safetensors file, written by the safetensors package."""
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, path)


def write(directory: pathlib.Path, tensors: Tensors, shards: int = 3) -> pathlib.Path:
    """A checkpoint directory, the tensors dealt out to the shards in turn; one shard: a single file and no index."""
    directory.mkdir(parents=True, exist_ok=True)
    if shards == 1:
        save(directory / "model.safetensors", tensors)
        return directory
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    weight_map = {name: files[i % shards] for i, name in enumerate(tensors)}
    for file in files:
        save(directory / file, {name: array for name, array in tensors.items() if weight_map[name] == file})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def real(tensors: Tensors, name: str) -> np.ndarray:
    """float32 values of a tensor, block scales multiplied in the plainest way."""
    values = tensors[name].astype(np.float32)
    scale = tensors.get(name + "_scale_inv")
    if scale is not None:
        for n, k in np.ndindex(scale.shape):
            values[128 * n : 128 * n + 128, 128 * k : 128 * k + 128] *= np.float32(scale[n, k])
    return values


def expected(cfg: ModelConfig, tensors: Tensors) -> dict[str, np.ndarray]:
    """float32 values of every leaf by dotted path."""
    result = {"embed": real(tensors, "model.embed_tokens.weight"), "norm": real(tensors, "model.norm.weight")}
    if not cfg.tie_word_embeddings:
        result["head"] = real(tensors, "lm_head.weight")
    dense, layers = min(cfg.first_k_dense_replace, cfg.num_hidden_layers), cfg.num_hidden_layers
    for stack, numbers in (
        ("dense", range(dense)),
        ("moe", range(dense, layers)),
        ("mtp", range(layers, layers + cfg.num_nextn_predict_layers)),
    ):
        parts = [_expected_layer(cfg, tensors, f"model.layers.{i}.", moe=stack != "dense") for i in numbers]
        for path in parts[0] if parts else ():
            prefix = "mtp.layers." if stack == "mtp" and path not in MTP_NAMES else f"{stack}."
            result[prefix + path] = np.stack([part[path] for part in parts])
    return result


MTP_NAMES = {"embed_norm": "enorm", "hidden_norm": "hnorm", "proj": "eh_proj", "norm": "shared_head.norm"}


def _expected_layer(cfg: ModelConfig, tensors: Tensors, prefix: str, *, moe: bool) -> dict[str, np.ndarray]:
    def get(name: str) -> np.ndarray:
        return real(tensors, f"{prefix}{name}.weight")

    def swiglu(name: str) -> tuple[np.ndarray, np.ndarray]:
        return np.concatenate([get(f"{name}.gate_proj"), get(f"{name}.up_proj")]), get(f"{name}.down_proj")

    heads, N = cfg.num_attention_heads, cfg.qk_nope_head_dim
    kv_b = get("self_attn.kv_b_proj").reshape(heads, N + cfg.v_head_dim, -1)
    queries = "self_attn.q_a_proj" if cfg.q_lora_rank else "self_attn.q_proj"
    leaf = {
        "input_norm": get("input_layernorm"),
        "post_norm": get("post_attention_layernorm"),
        "attention.qkv_a": np.concatenate([get(queries), get("self_attn.kv_a_proj_with_mqa")]),
        "attention.kv_norm": get("self_attn.kv_a_layernorm"),
        "attention.k_up": kv_b[:, :N],
        "attention.v_up": kv_b[:, N:],
        "attention.o": get("self_attn.o_proj"),
    }
    if cfg.q_lora_rank:
        leaf |= {"attention.q_norm": get("self_attn.q_a_layernorm"), "attention.q_b": get("self_attn.q_b_proj")}
    if f"{prefix}eh_proj.weight" in tensors:
        leaf |= {ours: get(theirs) for ours, theirs in MTP_NAMES.items()}
    if not moe:
        leaf["mlp.gate_up"], leaf["mlp.down"] = swiglu("mlp")
        return leaf
    leaf["moe.router"] = get("mlp.gate")
    if cfg.topk_method == "noaux_tc":
        leaf["moe.router_bias"] = real(tensors, prefix + "mlp.gate.e_score_correction_bias")
    experts = [swiglu(f"mlp.experts.{e}") for e in range(cfg.n_routed_experts)]
    leaf["moe.gate_up"], leaf["moe.down"] = (np.stack(part) for part in zip(*experts, strict=True))
    if cfg.n_shared_experts:
        leaf["moe.shared.gate_up"], leaf["moe.shared.down"] = swiglu("mlp.shared_experts")
    return leaf
