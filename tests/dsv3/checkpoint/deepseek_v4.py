"""Small DeepSeek-V4 checkpoints in each published form, and what their parameters must be: written from the format's
description, apart from `dsv3.checkpoint.tables`."""

from typing import Any

import ml_dtypes
import numpy as np

from dsv3.config.hugging_face import from_hf
from dsv3.config.model import ModelConfig
from tests.dsv3.checkpoint.deepseek_v4_tensors import stored_tensors
from tests.dsv3.checkpoint.hf import E4M3, Tensors
from tests.dsv3.deepseek_v4 import FLASH, FLASH_0731

E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
_WIDTHS: dict[str, Any] = {
    "compress_ratios": [0, 4, 128, 4, 128, 0],
    "head_dim": 128,
    "hidden_size": 256,
    "index_head_dim": 64,
    "index_n_heads": 4,
    "index_topk": 8,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 256,
    "n_routed_experts": 4,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hash_layers": 2,
    "num_hidden_layers": 5,
    "o_groups": 2,
    "o_lora_rank": 128,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 32,
    "sliding_window": 8,
    "vocab_size": 40,
}
PREVIEW = FLASH | _WIDTHS
"""With an MTP module."""
DSPARK = FLASH_0731 | _WIDTHS | {"compress_ratios": [0, 4, 128, 4, 128, 0, 0, 0], "dspark_target_layer_ids": [2, 3, 4]}
DSPARK |= {"dspark_markov_rank": 4, "dspark_noise_token_id": 39}


def config(published: dict[str, Any], **changes: Any) -> ModelConfig:
    return from_hf(published | changes)


def base(published: dict[str, Any]) -> dict[str, Any]:
    """The file of a Base checkpoint, whose experts are FP8 and whose scales are float32."""
    return published | {"expert_dtype": "fp8"}


def plain(published: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in published.items() if name not in ("quantization_config", "expert_dtype")}


def random_tensors(cfg: ModelConfig, seed: int = 0) -> Tensors:
    """Random codes, and scales of a few powers of two that make values of a product's size."""
    rng = np.random.default_rng(seed)
    return {name: _random(rng, cfg, name, dtype, shape) for name, dtype, shape in stored_tensors(cfg)}


def _random(
    rng: np.random.Generator, cfg: ModelConfig, name: str, dtype: np.dtype, shape: tuple[int, ...]
) -> np.ndarray:
    if dtype == np.int64:
        return np.stack([rng.permutation(cfg.n_routed_experts)[: shape[1]] for _ in range(shape[0])])
    if dtype == np.int8:
        return rng.integers(-128, 128, shape, np.int8)
    if name.endswith(".scale"):
        return np.exp2(rng.integers(-8, -3, shape)).astype(dtype)
    values = rng.normal(0, 1 if dtype == E4M3 else 0.1, shape) + ("norm" in name)
    return values.astype(dtype)


def real(tensors: Tensors, name: str) -> np.ndarray:
    """float32 values of a tensor, scales multiplied in the plainest way."""
    values, scale = tensors[name], tensors.get(name.removesuffix("weight") + "scale")
    if scale is None:
        return values.astype(np.int32 if values.dtype == np.int64 else np.float32)
    rows, columns = (128, 128) if values.dtype == E4M3 else (1, 32)
    if values.dtype == np.int8:
        raw = values.view(np.uint8)
        values = E2M1[np.stack([raw & 15, raw >> 4], axis=-1)].reshape(len(raw), -1)
    spread = np.repeat(np.repeat(scale.astype(np.float32), rows, 0), columns, 1)
    return values.astype(np.float32) * spread[: values.shape[0], : values.shape[1]]


def expected(cfg: ModelConfig, tensors: Tensors) -> dict[str, np.ndarray]:
    """float32 values, and the table's int32 ones, of every leaf by dotted path."""
    top = {"embed": "embed.weight", "norm": "norm.weight", "head": "head.weight"} | _mixing("head_mixing.", "hc_head")
    result = {path: real(tensors, name) for path, name in top.items()}
    layers = [_expected_layer(cfg, tensors, f"layers.{i}.") for i in range(cfg.num_hidden_layers)]
    result |= {f"moe.{path}": stack for path, stack in _stacked(layers).items()}
    if cfg.dspark is not None:
        stages = [_expected_layer(cfg, tensors, f"mtp.{i}.") for i in range(cfg.dspark.stages)]
        last = f"mtp.{cfg.dspark.stages - 1}."
        result |= {f"mtp.layers.{path}": stack for path, stack in _stacked(stages).items()}
        result |= {path: real(tensors, name) for path, name in _mixing("mtp.head_mixing.", f"{last}hc_head").items()}
        result |= {
            "mtp.main_proj": real(tensors, "mtp.0.main_proj.weight")[None],
            "mtp.main_norm": real(tensors, "mtp.0.main_norm.weight")[None],
            "mtp.norm": real(tensors, f"{last}norm.weight")[None],
            "mtp.markov_embed": real(tensors, f"{last}markov_head.markov_w1.weight"),
            "mtp.markov_head": real(tensors, f"{last}markov_head.markov_w2.weight"),
            "mtp.confidence": real(tensors, f"{last}confidence_head.proj.weight"),
        }
    modules = []
    for i in range(cfg.num_nextn_predict_layers):
        prefix = f"mtp.{i}."
        own = {"embed_norm": "enorm.weight", "hidden_norm": "hnorm.weight", "norm": "norm.weight"}
        own |= _mixing("head_mixing.", "hc_head")
        module = {path: real(tensors, prefix + name) for path, name in own.items()}
        projections = [real(tensors, f"{prefix}{name}.weight") for name in ("e_proj", "h_proj")]
        module["proj"] = np.concatenate(projections, axis=1)
        layer = _expected_layer(cfg, tensors, prefix)
        modules.append(module | {f"layers.{path}": values for path, values in layer.items()})
    return result | {f"mtp.{path}": stack for path, stack in _stacked(modules).items()}


def _stacked(layers: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Stacks of each leaf, over the layers that have it."""
    paths = dict.fromkeys(path for layer in layers for path in layer)
    return {path: np.stack([layer[path] for layer in layers if path in layer]) for path in paths}


def _mixing(path: str, name: str) -> dict[str, str]:
    return {f"{path}weight": f"{name}_fn", f"{path}base": f"{name}_base", f"{path}scale": f"{name}_scale"}


def _expected_layer(cfg: ModelConfig, tensors: Tensors, prefix: str) -> dict[str, np.ndarray]:
    def get(*names: str) -> np.ndarray:
        return np.concatenate([real(tensors, prefix + name) for name in names])

    def compressor(path: str, part: str) -> dict[str, np.ndarray]:
        return {
            f"{path}.value_score": get(f"{part}.wkv.weight", f"{part}.wgate.weight"),
            f"{path}.position": get(f"{part}.ape"),
            f"{path}.norm": get(f"{part}.norm.weight"),
        }

    groups = cfg.compressed.output_groups
    o_a = get("attn.wo_a.weight")
    leaf = {
        "input_norm": get("attn_norm.weight"),
        "post_norm": get("ffn_norm.weight"),
        "attention.qkv_a": get("attn.wq_a.weight", "attn.wkv.weight"),
        "attention.q_norm": get("attn.q_norm.weight"),
        "attention.q_b": get("attn.wq_b.weight"),
        "attention.kv_norm": get("attn.kv_norm.weight"),
        "attention.sink": get("attn.attn_sink"),
        "attention.o_a": o_a.reshape(groups, -1, o_a.shape[1]),
        "attention.o_b": get("attn.wo_b.weight"),
        "moe.router": get("ffn.gate.weight"),
        "moe.shared.gate_up": get("ffn.shared_experts.w1.weight", "ffn.shared_experts.w3.weight"),
        "moe.shared.down": get("ffn.shared_experts.w2.weight"),
    }
    for path, name in (_mixing("attention_mixing.", "hc_attn") | _mixing("moe_mixing.", "hc_ffn")).items():
        leaf[path] = get(name)
    if f"{prefix}attn.indexer.wq_b.weight" in tensors:
        leaf["attention.indexer.q_b"] = get("attn.indexer.wq_b.weight")
        leaf["attention.indexer.weights"] = get("attn.indexer.weights_proj.weight")
        leaf |= compressor("attention.indexer.compressor", "attn.indexer.compressor")
        leaf |= compressor("attention.sparse", "attn.compressor")
    elif f"{prefix}attn.compressor.ape" in tensors:
        leaf |= compressor("attention.heavy", "attn.compressor")
    by_id = f"{prefix}ffn.gate.tid2eid" in tensors
    leaf["moe.by_token" if by_id else "moe.router_bias"] = get(f"ffn.gate.{'tid2eid' if by_id else 'bias'}")
    experts = [
        (get(f"ffn.experts.{e}.w1.weight", f"ffn.experts.{e}.w3.weight"), get(f"ffn.experts.{e}.w2.weight"))
        for e in range(cfg.n_routed_experts)
    ]
    leaf["moe.gate_up"], leaf["moe.down"] = (np.stack(part) for part in zip(*experts, strict=True))
    return leaf
