"""The configuration of DeepSeek-V4 (`model_type` deepseek_v4), as published and as transformers 5 writes it.

The published file lists `compress_ratios` and has `rope_scaling`; transformers lists `layer_types` and
`mlp_layer_types`, with `compress_rates`, and keeps both rotations in `rope_parameters`.
"""

import dataclasses
from typing import Any

from dsv3.config.hugging_face.fields import MEANINGLESS, Fields
from dsv3.config.hugging_face.quantization import quantization_to_hf, read_quantization
from dsv3.config.hugging_face.rotary import frequencies_alone
from dsv3.config.model import (
    CompressedAttention,
    DSparkConfig,
    HyperConnections,
    IndexerConfig,
    ModelConfig,
    YarnConfig,
)

MODEL_TYPE = "deepseek_v4"

_FIXED: dict[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
_INTEGERS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "q_lora_rank", "n_routed_experts"),
    *("num_experts_per_tok", "max_position_embeddings"),
)
_NUMBERS = ("routed_scaling_factor", "rms_norm_eps", "swiglu_limit")
_ALSO = ("qk_rope_head_dim", "moe_intermediate_size", "num_hash_layers", "rope_theta", "bos_token_id")
"""Fields of `ModelConfig` that the published form has under the same names: these, which `read` checks otherwise."""

_OF_TRAINING = frozenset({"router_aux_loss_coef", "router_jitter_noise"})
_SPARSE, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
_RATES = {_SPARSE: 4, _HEAVY: 128}


def read(fields: Fields) -> ModelConfig:
    """Returns the `ModelConfig` that `fields` describe.

    Raises:
      ConfigError: a field is missing, unknown, of the wrong type, or has a value that is not supported.
    """
    for name, value in _FIXED.items():
        fields.one_of(name, (value,), value)
    rotated, width = _widths(fields)
    ratios, beyond, rates = _ratios(fields)
    theta, compressed_theta, yarn = _rotations(fields, rotated / width)
    dspark = _dspark(fields, beyond)
    moe_width = fields.integer("moe_intermediate_size")
    fields.one_of("intermediate_size", (moe_width,), moe_width)
    same: dict[str, Any] = {name: fields.integer(name) for name in _INTEGERS}
    same |= {name: fields.number(name) for name in _NUMBERS}
    cfg = ModelConfig(
        **same,
        kv_lora_rank=width - rotated,
        qk_nope_head_dim=width - rotated,
        qk_rope_head_dim=rotated,
        v_head_dim=width,
        intermediate_size=0,
        moe_intermediate_size=moe_width,
        scoring_func="sqrtsoftplus",
        first_k_dense_replace=0,
        num_nextn_predict_layers=_modules(fields, beyond, dspark),
        latent_norm_eps=fields.number("rms_norm_eps"),
        rope_theta=theta,
        bos_token_id=fields.token_ids("bos_token_id", single=True)[0] if fields.has("bos_token_id") else None,
        eos_token_ids=fields.token_ids("eos_token_id"),
        compressed=CompressedAttention(
            ratios=ratios,
            sparse_ratio=rates[_SPARSE],
            window=fields.integer("sliding_window"),
            indexer=IndexerConfig(
                num_heads=fields.integer("index_n_heads"),
                head_dim=fields.integer("index_head_dim"),
                topk=fields.integer("index_topk"),
                interleaved=True,
            ),
            rope_theta=compressed_theta,
            yarn=yarn,
            output_groups=fields.integer("o_groups"),
            output_rank=fields.integer("o_lora_rank"),
        ),
        hyper_connections=HyperConnections(
            streams=fields.integer("hc_mult"),
            sinkhorn_iterations=fields.integer("hc_sinkhorn_iters"),
            eps=fields.number("hc_eps"),
        ),
        num_hash_layers=_hash_layers(fields),
        dspark=dspark,
        family=MODEL_TYPE,
        **read_quantization(fields, fp4=True),
    )
    fields.get("expert_dtype"), fields.get("bos_token_id"), fields.get("model_type")
    _check_consistent(fields, cfg)
    fields.finish(MEANINGLESS | _OF_TRAINING)
    return cfg


def to_hf(cfg: ModelConfig) -> dict[str, Any]:
    """Returns the published form of the config.json of `cfg`, which has compressed attention; `read` is its inverse."""
    attention, mixing, spark = cfg.compressed, cfg.hyper_connections, cfg.dspark
    assert attention is not None and mixing is not None
    drafting = cfg.num_nextn_predict_layers if spark is None else spark.stages
    heavy = next(iter(attention.heavy_ratios), _RATES[_HEAVY])
    rates = {_SPARSE: attention.sparse_ratio, _HEAVY: heavy}
    config = _FIXED | {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": MODEL_TYPE,
        **{name: getattr(cfg, name) for name in (*_INTEGERS, *_NUMBERS, *_ALSO)},
        "num_nextn_predict_layers": drafting,
        "head_dim": cfg.v_head_dim,
        "o_groups": attention.output_groups,
        "o_lora_rank": attention.output_rank,
        "compress_ratios": [*attention.ratios, *[0] * drafting],
        "compress_rope_theta": attention.rope_theta,
        "sliding_window": attention.window,
        "index_n_heads": attention.indexer.num_heads,
        "index_head_dim": attention.indexer.head_dim,
        "index_topk": attention.indexer.topk,
        "hc_mult": mixing.streams,
        "hc_sinkhorn_iters": mixing.sinkhorn_iterations,
        "hc_eps": mixing.eps,
        "eos_token_id": cfg.eos_token_ids[0] if len(cfg.eos_token_ids) == 1 else list(cfg.eos_token_ids) or None,
        "use_cache": True,
    }
    if attention.yarn is not None:
        yarn = dataclasses.asdict(attention.yarn)
        scaled = {name: value for name, value in yarn.items() if not name.startswith("mscale")}
        config["rope_scaling"] = {"type": "yarn", **scaled}
    if rates != _RATES:
        config["compress_rates"] = rates
    if cfg.bos_token_id is None:
        del config["bos_token_id"]
    if cfg.fp8 is not None:
        config["expert_dtype"] = "fp4" if cfg.fp4_experts else "fp8"
    if spark is not None:
        config |= {
            "dspark_target_layer_ids": list(spark.target_layers),
            "dspark_block_size": spark.block_size,
            "dspark_noise_token_id": spark.noise_token_id,
            "dspark_markov_rank": spark.markov_rank,
        }
    return config | quantization_to_hf(cfg)


def _widths(fields: Fields) -> tuple[int, int]:
    """Returns how many values of a head are rotated, and how many it has."""
    width = fields.integer("head_dim")
    if fields.has("qk_rope_head_dim"):
        rotated = fields.integer("qk_rope_head_dim")
    else:
        rotated = int(width * fields.number("partial_rotary_factor"))
    fields.get("qk_rope_head_dim")
    fields.one_of("partial_rotary_factor", (rotated / width,), rotated / width)
    if rotated % 2 or not 0 < rotated < width:
        raise fields.fail("qk_rope_head_dim", f"even and below head_dim, {width}")
    return rotated, width


def _ratios(fields: Fields) -> tuple[tuple[int, ...], int, dict[str, int]]:
    """Returns the ratio of each layer, how many layers are listed beyond those, and the ratio of each kind.

    The list of the published form goes on with the layers that make drafts, which have no entries.
    """
    count, rates = fields.integer("num_hidden_layers"), _rates(fields)
    by_name = {"sliding_attention": 0, **rates}
    found: dict[str, list[int]] = {}
    for name, known in (("layer_types", by_name), ("compress_ratios", {ratio: ratio for ratio in by_name.values()})):
        kinds = fields.get(name)
        if kinds is None:
            continue
        if not isinstance(kinds, list) or len(kinds) < count or any(_lookup(known, kind) is None for kind in kinds):
            raise fields.fail(name, f"at least {count} layers, each {' or '.join(map(repr, known))}")
        found[name] = [known[kind] for kind in kinds]
    ratios = found.get("compress_ratios", found.get("layer_types"))
    if ratios is None:
        raise fields.fail("compress_ratios", f"a list of {count} ratios, or layer_types given in its place")
    if any(each[:count] != ratios[:count] for each in found.values()):
        raise fields.fail("layer_types", "what compress_ratios says")
    if any(ratios[count:]):
        raise fields.fail("compress_ratios", f"0 behind the {count} layers of the model")
    if not any(ratios):  # such a model keeps nothing for the whole context, and the cache has pages of that alone
        raise fields.fail(next(reversed(found)), "a list with at least one layer of compressed entries")
    return tuple(ratios[:count]), len(ratios) - count, rates


def _lookup(known: dict[Any, int], kind: Any) -> int | None:
    return known.get(kind) if type(kind) in (int, str) else None


def _rates(fields: Fields) -> dict[str, int]:
    """Returns how many tokens an entry of the two kinds of layers stands for."""
    rates = dict(_RATES)
    given = fields.object("compress_rates")
    if given is not None:
        rates = {name: given.integer(name, rate, least=2) for name, rate in _RATES.items()}
        given.finish()
    for name, old in ((_SPARSE, "compress_rate_csa"), (_HEAVY, "compress_rate_hca")):
        rates[name] = fields.integer(old, rates[name], least=2)
    if rates[_SPARSE] == rates[_HEAVY]:
        raise fields.fail("compress_rates", "two different ratios")
    return rates


def _hash_layers(fields: Fields) -> int:
    """Returns how many layers, the first ones, choose experts by the ids of tokens."""
    types, count = fields.get("mlp_layer_types"), fields.integer("num_hidden_layers")
    if types is None:
        hashed = fields.integer("num_hash_layers", least=0)
    else:
        hashed = types.count("hash_moe") if isinstance(types, list) else -1
        if types != ["hash_moe"] * hashed + ["moe"] * (count - hashed):
            raise fields.fail("mlp_layer_types", f"{count} layers, 'hash_moe' ones first and then 'moe' ones")
        if fields.integer("num_hash_layers", hashed, least=0) != hashed:
            raise fields.fail("num_hash_layers", f"{hashed}, as mlp_layer_types says")
    if hashed > count:
        raise fields.fail("num_hash_layers", f"at most num_hidden_layers, {count}")
    return hashed


def _rotations(fields: Fields, share: float) -> tuple[float, float, YarnConfig | None]:
    """Returns the base of window-only layers, and base and YaRN of the others; `share` of a head is rotated."""
    both = fields.object("rope_parameters")
    if both is None:
        scaling = fields.object("rope_scaling")
        yarn = None if scaling is None else frequencies_alone(scaling)
        if scaling is not None:
            scaling.finish()
        return fields.number("rope_theta"), fields.number("compress_rope_theta"), yarn
    if fields.has("rope_scaling"):
        raise fields.fail("rope_scaling", "absent where rope_parameters is given")
    fields.get("rope_scaling")
    main, compress = both.object("main"), both.object("compress")
    if main is None or compress is None:
        raise both.fail("main" if main is None else "compress", "an object: there are two rotations")
    main.one_of("rope_type", ("default",), "default")
    thetas = [main.number("rope_theta"), compress.number("rope_theta")]
    yarn = frequencies_alone(compress)
    for part in (main, compress):
        part.one_of("partial_rotary_factor", (share,), share)
        part.finish()
    both.finish()
    for name, theta in zip(("rope_theta", "compress_rope_theta"), thetas, strict=True):
        if fields.number(name, theta) != theta:
            raise fields.fail(name, f"{theta}, as rope_parameters says")
    return thetas[0], thetas[1], yarn


def _dspark(fields: Fields, stages: int) -> DSparkConfig | None:
    """Returns how a file's draft stages work; None without stages, as in what transformers writes."""
    layers = fields.get("dspark_target_layer_ids")
    names = ("dspark_block_size", "dspark_noise_token_id", "dspark_markov_rank")
    if layers is None:
        return None
    if not isinstance(layers, list) or not layers or not all(type(i) is int and i >= 0 for i in layers):
        raise fields.fail("dspark_target_layer_ids", "a list of layers")
    if layers != sorted(set(layers)):
        raise fields.fail("dspark_target_layer_ids", "in ascending order, each layer once")
    block, noise, rank = (fields.integer(name, least=0 if "token" in name else 1) for name in names)
    return DSparkConfig(stages, block, noise, tuple(layers), rank) if stages else None


def _modules(fields: Fields, beyond: int, dspark: DSparkConfig | None) -> int:
    """Returns the number of MTP modules: none where DSpark's stages are in their place, whatever the file says."""
    modules = fields.integer("num_nextn_predict_layers", 0, least=0)
    if dspark is not None:
        return 0
    if beyond not in (0, modules):
        raise fields.fail("num_nextn_predict_layers", f"{beyond}, as compress_ratios says")
    return modules


def _check_consistent(fields: Fields, cfg: ModelConfig) -> None:
    compressed, count = cfg.compressed, cfg.num_hidden_layers
    assert compressed is not None
    if any(cfg.page_size % ratio for ratio in compressed.ratios if ratio):
        raise fields.fail("compress_rates", f"divisors of {cfg.page_size}, the tokens that 64 sparse entries stand for")
    if compressed.window > cfg.page_size:  # a prefix is continued with the window page of its last page alone
        raise fields.fail("sliding_window", f"at most {cfg.page_size}, the tokens that 64 sparse entries stand for")
    if cfg.num_attention_heads % compressed.output_groups:
        raise fields.fail("o_groups", f"a divisor of num_attention_heads, {cfg.num_attention_heads}")
    if compressed.indexer.head_dim < cfg.qk_rope_head_dim:
        raise fields.fail("index_head_dim", f"at least qk_rope_head_dim, {cfg.qk_rope_head_dim}")
    if cfg.num_experts_per_tok > cfg.n_routed_experts:
        raise fields.fail("num_experts_per_tok", f"at most n_routed_experts, {cfg.n_routed_experts}")
    if cfg.dspark is not None and any(layer >= count for layer in cfg.dspark.target_layers):
        raise fields.fail("dspark_target_layer_ids", f"layers below num_hidden_layers, {count}")
    noise = () if cfg.dspark is None else (cfg.dspark.noise_token_id,)
    ids = {"bos_token_id": (cfg.bos_token_id or 0,), "eos_token_id": cfg.eos_token_ids, "dspark_noise_token_id": noise}
    for name, tokens in ids.items():
        if any(i >= cfg.vocab_size for i in tokens):
            raise fields.fail(name, f"below vocab_size, {cfg.vocab_size}")
