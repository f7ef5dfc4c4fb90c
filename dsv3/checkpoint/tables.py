"""Which tensors of a checkpoint fill which parameter leaf: DeepSeek-V3's names, and DeepSeek-V4's.

A leaf of `dsv3.model.params.Params` is a stack over layers (and experts). Its entry lists the tensors of one layer (one
expert), in the order of their rows. `dsv3.checkpoint.layout` expands a table for a configuration.
"""

import dataclasses
import re
from collections.abc import Iterable

from dsv3.config.model import ModelConfig

# In DeepSeek-V3's names, a layer after the last decoder layer is an MTP module if it has this tensor.
_MTP_MARK = "eh_proj.weight"
_MODULES = re.compile(r"model\.layers\.(\d+)\." + re.escape(_MTP_MARK))
_STAGES = re.compile(r"mtp\.(\d+)\..*")  # MTP modules of DeepSeek-V4's previews, later DSpark's


@dataclasses.dataclass(frozen=True)
class TensorRows:
    """One checkpoint tensor of a leaf: its name below the layer's prefix, and its rows in the leaf.

    `rows` None: the leaf is this tensor alone. Otherwise the tensor fills `rows` rows of the leaf. A tensor with more
    rows has `of` rows, and the leaf uses `rows` of them from row `skip` on. Example: kv_b_proj holds N key rows and V
    value rows per head; `k_up` uses N of N + V, `v_up` uses V and skips N. With `columns` the tensors of a leaf lie
    side by side instead, and this one fills so many columns.
    """

    name: str
    rows: int | None = None
    of: int | None = None
    skip: int = 0
    columns: int | None = None


Rows = tuple[TensorRows, ...]


@dataclasses.dataclass(frozen=True)
class TensorTable:
    """The tensors of a family's checkpoints, by leaf path.

    `top` has the leaves that occur once, `layer` those below `LayerParams`, `module` those that MTP modules have
    besides a layer. In names of `layer`, `{e}` stands for the expert's number.
    """

    top: dict[str, str]
    layer: dict[str, Rows]
    module: dict[str, Rows]


def table_of(cfg: ModelConfig) -> TensorTable:
    return _deepseek_v3(cfg) if cfg.compressed is None else _deepseek_v4(cfg)


def layer_prefix(cfg: ModelConfig, layer: int) -> str:
    """Returns the prefix of the names of a cache layer's tensors; MTP modules follow the decoder's layers."""
    if cfg.compressed is None:
        return f"model.layers.{layer}."
    modules = layer - cfg.num_hidden_layers
    return f"layers.{layer}." if modules < 0 else f"mtp.{modules}."


def layer_of(cfg: ModelConfig, name: str) -> int | None:
    """Returns the cache layer whose prefix a tensor's name has; None for the others."""
    if cfg.compressed is None:
        match = re.match(r"model\.layers\.(\d+)\.", name)
        return int(match[1]) if match else None
    match = re.match(r"(layers|mtp)\.(\d+)\.", name)
    if match is None:
        return None
    return int(match[2]) + (cfg.num_hidden_layers if match[1] == "mtp" else 0)


def modules_beyond(cfg: ModelConfig, names: Iterable[str]) -> set[int]:
    """Returns the layer numbers of a checkpoint's MTP modules, or DSpark stages, that `cfg` does not have."""
    pattern, first = (
        _MODULES if cfg.compressed is None else _STAGES,
        0 if cfg.compressed is None else cfg.num_hidden_layers,
    )
    found = {first + int(match[1]) for match in map(pattern.fullmatch, names) if match}
    return {layer for layer in found if layer >= cfg.num_cache_layers}


def scale_name(name: str) -> str:
    """Returns the name of the scales of a quantized tensor.

    DeepSeek-V4, whose names have no "model." in front, has `X.scale` beside `X.weight`, and the others
    `X.weight_scale_inv`.
    """
    return f"{name}{V3_SCALE}" if name.startswith(("model.", "lm_head.")) else f"{name.removesuffix('weight')}scale"


V3_SCALE = "_scale_inv"
"""What the name of scales ends with, in all families but DeepSeek-V4."""


def has_leaf(cfg: ModelConfig, path: str, layer: int) -> bool:
    """Returns whether a cache layer has the leaf at `path` below `LayerParams`; some layers lack some."""
    compressed = cfg.compressed
    if compressed is None:
        return not path.startswith("attention.indexer.") or layer in cfg.index_layers
    ratio = compressed.ratios[layer] if layer < cfg.num_hidden_layers else 0
    if path.startswith(("attention.sparse.", "attention.indexer.")):
        return ratio == compressed.sparse_ratio
    if path.startswith("attention.heavy."):
        return ratio not in (0, compressed.sparse_ratio)
    return path not in _OF_HASH_LAYERS or _OF_HASH_LAYERS[path] == (layer < cfg.num_hash_layers)


_OF_HASH_LAYERS = {"moe.by_token": True, "moe.router_bias": False}


def _deepseek_v3(cfg: ModelConfig) -> TensorTable:
    H, N, V = cfg.num_attention_heads, cfg.qk_nope_head_dim, cfg.v_head_dim
    queries = (
        TensorRows("self_attn.q_a_proj.weight", cfg.q_lora_rank)
        if cfg.q_lora_rank
        else TensorRows("self_attn.q_proj.weight", H * cfg.qk_head_dim)
    )
    projections = ("gate_proj", "up_proj", "down_proj")
    layer = {
        "input_norm": _one("input_layernorm.weight"),
        "post_norm": _one("post_attention_layernorm.weight"),
        "post_moe_norm": _one("post_mlp_layernorm.weight"),
        "attention.qkv_a": (queries, TensorRows("self_attn.kv_a_proj_with_mqa.weight", cfg.latent_dim)),
        "attention.q_norm": _one("self_attn.q_a_layernorm.weight"),
        "attention.q_b": _one("self_attn.q_b_proj.weight"),
        "attention.kv_norm": _one("self_attn.kv_a_layernorm.weight"),
        "attention.k_up": (TensorRows("self_attn.kv_b_proj.weight", N, of=N + V),),
        "attention.v_up": (TensorRows("self_attn.kv_b_proj.weight", V, of=N + V, skip=N),),
        "attention.o": _one("self_attn.o_proj.weight"),
        "attention.indexer.q_b": _one("self_attn.indexer.wq_b.weight"),
        "attention.indexer.k": _one("self_attn.indexer.wk.weight"),
        "attention.indexer.k_norm": _one("self_attn.indexer.k_norm.weight"),
        "attention.indexer.k_bias": _one("self_attn.indexer.k_norm.bias"),
        "attention.indexer.weights": _one("self_attn.indexer.weights_proj.weight"),
        "moe.router": _one("mlp.gate.weight"),
        "moe.router_bias": _one("mlp.gate.e_score_correction_bias"),
        **_swiglu("mlp", "mlp", projections, cfg.intermediate_size),
        **_swiglu("moe", "mlp.experts.{e}", projections, cfg.moe_intermediate_size),
        **_swiglu("moe.shared", "mlp.shared_experts", projections, cfg.n_shared_experts * cfg.moe_intermediate_size),
    }
    module = {
        "embed_norm": _one("enorm.weight"),
        "hidden_norm": _one("hnorm.weight"),
        "proj": _one(_MTP_MARK),
        "norm": _one("shared_head.norm.weight"),
    }
    return TensorTable(
        {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}, layer, module
    )


def _deepseek_v4(cfg: ModelConfig) -> TensorTable:
    assert cfg.compressed is not None and cfg.q_lora_rank is not None  # `table_of`, and every such configuration
    D, I, d = cfg.hidden_size, cfg.moe_intermediate_size, cfg.latent_dim  # noqa: E741
    projections = ("w1", "w3", "w2")
    layer = {
        "input_norm": _one("attn_norm.weight"),
        "post_norm": _one("ffn_norm.weight"),
        "attention.qkv_a": (TensorRows("attn.wq_a.weight", cfg.q_lora_rank), TensorRows("attn.wkv.weight", d)),
        "attention.q_norm": _one("attn.q_norm.weight"),
        "attention.q_b": _one("attn.wq_b.weight"),
        "attention.kv_norm": _one("attn.kv_norm.weight"),
        "attention.sink": _one("attn.attn_sink"),
        "attention.o_a": _one("attn.wo_a.weight"),
        "attention.o_b": _one("attn.wo_b.weight"),
        **_compressor("attention.sparse", "attn.compressor", 2 * d),
        **_compressor("attention.heavy", "attn.compressor", d),
        "attention.indexer.q_b": _one("attn.indexer.wq_b.weight"),
        "attention.indexer.weights": _one("attn.indexer.weights_proj.weight"),
        **_compressor("attention.indexer.compressor", "attn.indexer.compressor", 2 * cfg.compressed.indexer.head_dim),
        **{path: _one(name) for path, name in _mixing("attention_mixing", "hc_attn").items()},
        **{path: _one(name) for path, name in _mixing("moe_mixing", "hc_ffn").items()},
        "moe.router": _one("ffn.gate.weight"),
        "moe.router_bias": _one("ffn.gate.bias"),
        "moe.by_token": _one("ffn.gate.tid2eid"),
        **_swiglu("moe", "ffn.experts.{e}", projections, I),
        **_swiglu("moe.shared", "ffn.shared_experts", projections, cfg.n_shared_experts * I),
    }
    module = {
        "embed_norm": _one("enorm.weight"),
        "hidden_norm": _one("hnorm.weight"),
        "proj": (TensorRows("e_proj.weight", columns=D), TensorRows("h_proj.weight", columns=D)),
        "norm": _one("norm.weight"),
        **{path: _one(name) for path, name in _mixing("head_mixing", "hc_head").items()},
    }
    top = {"embed": "embed.weight", "norm": "norm.weight", "head": "head.weight", **_mixing("head_mixing", "hc_head")}
    if cfg.dspark is not None:
        top |= _dspark(cfg.dspark.stages - 1)
    return TensorTable(top, layer, module)


def _dspark(last: int) -> dict[str, str]:
    """Returns the tensors that DSpark's stages have once: some in the first, some in the one numbered `last`."""
    return {
        "mtp.main_proj": "mtp.0.main_proj.weight",
        "mtp.main_norm": "mtp.0.main_norm.weight",
        "mtp.norm": f"mtp.{last}.norm.weight",
        "mtp.markov_embed": f"mtp.{last}.markov_head.markov_w1.weight",
        "mtp.markov_head": f"mtp.{last}.markov_head.markov_w2.weight",
        "mtp.confidence": f"mtp.{last}.confidence_head.proj.weight",
        **_mixing("mtp.head_mixing", f"mtp.{last}.hc_head"),
    }


def _one(name: str) -> Rows:
    return (TensorRows(name),)


def _swiglu(path: str, prefix: str, projections: tuple[str, str, str], width: int) -> dict[str, Rows]:
    gate, up, down = (f"{prefix}.{projection}.weight" for projection in projections)
    return {f"{path}.gate_up": (TensorRows(gate, width), TensorRows(up, width)), f"{path}.down": _one(down)}


def _compressor(path: str, prefix: str, width: int) -> dict[str, Rows]:
    both = tuple(TensorRows(f"{prefix}.{name}.weight", width) for name in ("wkv", "wgate"))
    return {
        f"{path}.value_score": both,
        f"{path}.position": _one(f"{prefix}.ape"),
        f"{path}.norm": _one(f"{prefix}.norm.weight"),
    }


def _mixing(path: str, prefix: str) -> dict[str, str]:
    return {f"{path}.weight": f"{prefix}_fn", f"{path}.base": f"{prefix}_base", f"{path}.scale": f"{prefix}_scale"}
