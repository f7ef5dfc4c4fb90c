"""DeepSeek's spelling of a model's sizes, which most of the family share, with what each `model_type` varies."""

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any

from dsv3.config.hugging_face import deepseek_v4
from dsv3.config.hugging_face.fields import MEANINGLESS, ConfigError, Fields, Wrapper, end_tokens, text_config
from dsv3.config.hugging_face.quantization import read_quantization
from dsv3.config.hugging_face.rotary import read_mistral_rotary, read_rotary
from dsv3.config.model import IndexerConfig, ModelConfig
from pallas_kernels.int4 import RUN

_log = logging.getLogger(__name__)

Routers = tuple[tuple[str, str], ...]
V2_ROUTERS: Routers = (("softmax", "greedy"), ("softmax", "group_limited_greedy"))
V3_ROUTERS: Routers = (("sigmoid", "noaux_tc"),)

# Fields with one supported value. None also means "not set" where the Hugging Face default is that value.
_FIXED: dict[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "moe_layer_freq": 1,
    "ep_size": 1,
    "pretraining_tp": 1,
    "rope_interleave": True,
}


_INTEGERS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim"),
    *("qk_rope_head_dim", "v_head_dim", "intermediate_size", "moe_intermediate_size", "n_routed_experts"),
    *("num_experts_per_tok", "max_position_embeddings"),
)
"""Fields of `ModelConfig` that a file must have under the same names."""


@dataclasses.dataclass(frozen=True)
class Family:
    """How the config.json of one `model_type` is read.

    `members` names published models. `routers` are the (scoring_func, topk_method) that it may have, the first of them
    its default; `renormalizes` says whether weights sum to 1 where the file does not say. `one_group` forbids expert
    groups. `rotary` reads the settings of positions. `fixed` are further fields with one supported value.
    `indexer_interleaved` is None for dense attention; a family whose attention is sparse says by it how the indexer
    rotates where the file does not.
    """

    members: str
    routers: Routers = V3_ROUTERS
    renormalizes: bool = True
    may_renormalize: bool = True
    one_group: bool = False
    rotary: Callable[[Fields], dict[str, Any]] = read_rotary
    per_tensor_fp8: bool = False
    post_moe_norm: bool = False
    indexer_interleaved: bool | None = None
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def read(fields: Fields, family: Family) -> ModelConfig:
    """Returns the `ModelConfig` that `fields` describe; its `family` is left to the caller.

    Raises:
      ConfigError: a field is missing, unknown, of the wrong type, or has a value that is not supported.
    """
    for name, value in (_FIXED | dict(family.fixed)).items():
        fields.one_of(name, (value,), value)
    rotary, interleaved = family.rotary(fields), family.indexer_interleaved
    same: dict[str, Any] = {name: fields.integer(name) for name in _INTEGERS}
    cfg = ModelConfig(
        **same,
        q_lora_rank=fields.explicit_null_or_integer("q_lora_rank"),
        n_shared_experts=fields.integer("n_shared_experts", 0, least=0),
        n_group=fields.integer("n_group", 1),
        topk_group=fields.integer("topk_group", 1),
        routed_scaling_factor=fields.number("routed_scaling_factor"),
        first_k_dense_replace=_dense_layers(fields),
        num_nextn_predict_layers=fields.integer("num_nextn_predict_layers", 0, least=0),
        rms_norm_eps=fields.number("rms_norm_eps"),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        bos_token_id=fields.token_ids("bos_token_id", single=True)[0] if fields.has("bos_token_id") else None,
        eos_token_ids=fields.token_ids("eos_token_id"),
        post_moe_norm=family.post_moe_norm,
        indexer=None if interleaved is None else read_indexer(fields, interleaved=interleaved),
        **rotary,
        **read_quantization(fields, per_tensor=family.per_tensor_fp8),
        **_router(fields, family),
    )
    _check_consistent(fields, cfg)
    if family.one_group and cfg.n_group > 1:
        raise fields.fail("n_group", "1: implementations disagree on how groups without a bias are ranked")
    fields.get("bos_token_id")
    fields.get("model_type")
    fields.finish(MEANINGLESS)
    return cfg


def _router(fields: Fields, family: Family) -> dict[str, Any]:
    routers = family.routers
    scoring = fields.one_of("scoring_func", tuple({scoring for scoring, _ in routers}), routers[0][0])
    method = fields.one_of("topk_method", tuple(method for _, method in routers), routers[0][1])
    norm = fields.boolean("norm_topk_prob", family.renormalizes)
    if norm and not family.may_renormalize:
        raise fields.fail("norm_topk_prob", "false for deepseek_v2, whose implementations disagree on true")
    return {"scoring_func": scoring, "topk_method": method, "norm_topk_prob": norm}


def _dense_layers(fields: Fields) -> int:
    """Returns the number of leading dense layers, which transformers may list one by one."""
    types = fields.get("mlp_layer_types")
    if types is None:
        return fields.integer("first_k_dense_replace", least=0)
    count = fields.integer("num_hidden_layers")
    dense = types.count("dense") if isinstance(types, list) else -1
    if types != ["dense"] * dense + ["sparse"] * (count - dense):
        raise fields.fail("mlp_layer_types", f"{count} layers, 'dense' ones first and then 'sparse' ones")
    if fields.integer("first_k_dense_replace", dense, least=0) != dense:
        raise fields.fail("first_k_dense_replace", f"{dense}, as mlp_layer_types says")
    return dense


def _check_consistent(fields: Fields, cfg: ModelConfig) -> None:
    heads, group_size = cfg.num_attention_heads, cfg.n_routed_experts // cfg.n_group
    fields.one_of("num_key_value_heads", (heads,), heads)
    # Implementations mean the rotated part by it, or all of a query, GLM-5.2 the other part; no shape follows from it.
    glm = (cfg.qk_nope_head_dim,) if cfg.indexer else ()
    widths = (cfg.qk_rope_head_dim, cfg.qk_head_dim, *glm)
    fields.one_of("head_dim", widths, cfg.qk_rope_head_dim)
    fields.one_of("qk_head_dim", (cfg.qk_head_dim,), cfg.qk_head_dim)
    for name in ("hidden_size", "moe_intermediate_size") if cfg.int4_experts else ():
        if getattr(cfg, name) % RUN:
            raise fields.fail(name, f"a multiple of {RUN}, which INT4 experts are served in")
    if cfg.qk_rope_head_dim % 2:
        raise fields.fail("qk_rope_head_dim", "even")
    if cfg.n_routed_experts % cfg.n_group:
        raise fields.fail("n_group", f"a divisor of n_routed_experts, {cfg.n_routed_experts}")
    if cfg.topk_group > cfg.n_group:
        raise fields.fail("topk_group", f"at most n_group, {cfg.n_group}")
    if cfg.topk_method == "noaux_tc" and cfg.n_group > 1 and group_size < 2:
        raise fields.fail("n_group", "such that a group has two experts, whose scores rank it")
    if cfg.num_experts_per_tok > cfg.topk_group * group_size:
        raise fields.fail("num_experts_per_tok", f"at most the {cfg.topk_group * group_size} experts within reach")
    if cfg.first_k_dense_replace > cfg.num_hidden_layers:
        raise fields.fail("first_k_dense_replace", f"at most num_hidden_layers, {cfg.num_hidden_layers}")
    for name, ids in (("bos_token_id", (cfg.bos_token_id or 0,)), ("eos_token_id", cfg.eos_token_ids)):
        if any(i >= cfg.vocab_size for i in ids):
            raise fields.fail(name, f"below vocab_size, {cfg.vocab_size}")


_FULL, _SHARED = "full", "shared"
_LETTERS = {"F": _FULL, "S": _SHARED}
_ATTENTION = ("deepseek_sparse_attention", "indexed_attention")  # DeepSeek's word, and transformers' alias since 5.23


def read_indexer(fields: Fields, *, interleaved: bool) -> IndexerConfig:
    """Reads the indexer of a model; `interleaved` is how it rotates where the file does not say.

    Raises:
      ConfigError: a field is missing or not supported, or the indexer does not fit the model around it.
    """
    layers = fields.integer("num_hidden_layers")
    types = fields.get("layer_types", [])
    if types and not (isinstance(types, list) and len(types) == layers and all(each in _ATTENTION for each in types)):
        raise fields.fail("layer_types", f"{layers} times {' or '.join(map(repr, _ATTENTION))}")
    fields.boolean("index_share_for_mtp_iteration", False)  # of drafts alone: each of ours makes a choice of its own
    indexer = IndexerConfig(
        num_heads=fields.integer("index_n_heads"),
        head_dim=fields.integer("index_head_dim"),
        topk=fields.integer("index_topk"),
        interleaved=fields.boolean("indexer_rope_interleave", interleaved),
        shared_layers=tuple(i for i, kind in enumerate(_kinds(fields, layers)) if kind == _SHARED),
    )
    if not fields.has("q_lora_rank"):
        raise fields.fail("q_lora_rank", "given: the indexer's queries come from the query latent")
    rotated = fields.integer("qk_rope_head_dim")
    if indexer.head_dim < rotated:
        raise fields.fail("index_head_dim", f"at least qk_rope_head_dim, {rotated}")
    return indexer


def indexer_to_hf(cfg: ModelConfig) -> dict[str, Any]:
    """Returns the fields that `read_indexer` reads; none for a model without an indexer."""
    indexer = cfg.indexer
    if indexer is None:
        return {}
    fields: dict[str, Any] = {
        "index_n_heads": indexer.num_heads,
        "index_head_dim": indexer.head_dim,
        "index_topk": indexer.topk,
        "indexer_rope_interleave": indexer.interleaved,
    }
    if indexer.shared_layers:
        shared = set(indexer.shared_layers)
        fields["indexer_types"] = [_SHARED if i in shared else _FULL for i in range(cfg.num_hidden_layers)]
    return fields


def _kinds(fields: Fields, layers: int) -> list[str]:
    """Returns which layers have an indexer; of three ways to say it, a list counts before a pattern and a period."""
    types, pattern = fields.get("indexer_types"), fields.get("index_topk_pattern")
    period, offset = fields.integer("index_topk_freq", 1), fields.integer("index_skip_topk_offset", 2, least=0)
    name = "indexer_types" if types is not None else "index_topk_pattern"
    kinds = types if types is not None else pattern
    if isinstance(kinds, str):
        kinds = [_LETTERS.get(letter, letter) for letter in kinds]
    if kinds is None:
        name = "index_skip_topk_offset"
        kinds = [_SHARED if max(i - offset + 1, 0) % period else _FULL for i in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in (_FULL, _SHARED) for kind in kinds):
        raise fields.fail(name, f"{layers} layers, each {_FULL!r} or {_SHARED!r}")
    if kinds[0] != _FULL:
        raise fields.fail(name, "such that the first layer has an indexer")
    return kinds


_MISTRAL = Family(
    members="",
    routers=(("softmax", "greedy"),),
    one_group=True,
    rotary=read_mistral_rotary,
    per_tensor_fp8=True,
    fixed={"sliding_window": None},
)

FAMILIES: dict[str, Family] = {
    "deepseek_v2": Family("DeepSeek-V2, V2-Lite", V2_ROUTERS, renormalizes=False, may_renormalize=False),
    "deepseek_v3": Family("DeepSeek-V3, R1, V3.1, Moonlight"),
    "deepseek_v32": Family("DeepSeek-V3.2", indexer_interleaved=False),
    "glm_moe_dsa": Family("GLM-5, 5.1, 5.2", indexer_interleaved=True, fixed={"partial_rotary_factor": 1.0}),
    "kimi_k2": Family("Kimi-K2"),
    "glm4_moe_lite": Family("GLM-4.7-Flash", fixed={"partial_rotary_factor": 1.0}),
    "axk1": Family("A.X-K1", post_moe_norm=True),
    "mistral4": dataclasses.replace(_MISTRAL, members="Mistral Small 4"),
    "mistral_large_3": dataclasses.replace(_MISTRAL, members="Mistral Large 3"),
}
"""Families whose file describes the language model alone."""

WRAPPERS: dict[str, Wrapper] = {
    "kimi_k25": Wrapper("Kimi-K2.5, K2.6 (text)", ("deepseek_v3", "kimi_k2")),
    "mistral3": Wrapper("Mistral Small 4 (text)", ("mistral4",)),
}
"""Families whose file has the language model's under `text_config`."""

OF_MISTRAL = ("mistral3", "mistral4")
"""Families whose directories may have Mistral's own file beside config.json."""


def from_hf(config: Mapping[str, Any], file: str = "config.json") -> ModelConfig:
    """Returns the `ModelConfig` of a parsed config.json of one of `FAMILIES` or `WRAPPERS`.

    Rotary settings may be spelled as `rope_theta` and `rope_scaling`, or as transformers 5's `rope_parameters`.
    `file` is the name of the file in messages.

    Raises:
      ConfigError: a field is missing, unknown, of the wrong type, or has a value that is not supported; the text
        names the field, its value and what is supported.
    """
    fields = Fields(config, file=file)
    family = fields.get("model_type")
    if family == deepseek_v4.MODEL_TYPE:
        return deepseek_v4.read(fields)
    if family == "deepseek_v41":
        raise ConfigError(
            f"{file}: model_type is 'deepseek_v41': this is DeepSeek-V4.1, which is not served. Its layers share four "
            "caches of ratio 1 and 2, and it reads tables of n-grams; DeepSeek-V4 ('deepseek_v4') does neither. "
            "docs/deepseek_v41.md says what is missing"
        )
    if family not in (*FAMILIES, *WRAPPERS):
        known = (f"{name!r} ({each.members})" for name, each in (FAMILIES | WRAPPERS).items())
        raise fields.fail("model_type", " or ".join(known))
    if family in FAMILIES:
        return dataclasses.replace(read(fields, FAMILIES[family]), family=family)
    text = text_config(config, fields, WRAPPERS[family])
    cfg = read(text, FAMILIES[text.get("model_type")])
    _log.info("%s: only the language model is served; images and other media are not", family)
    return dataclasses.replace(cfg, family=family, eos_token_ids=end_tokens(fields, cfg))
