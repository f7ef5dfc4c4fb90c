"""Hugging Face `config.json` of the DeepSeek-V3 family to `ModelConfig` and back.

What a file says is either understood, known to carry no meaning for inference, or refused with a `ConfigError` that
names the field: a setting that is silently ignored is a model that silently computes something else.
"""

import dataclasses
import difflib
import logging
import pathlib
import reprlib
import struct
from collections.abc import Mapping
from typing import Any

from dsv3.config import Fp8Config, ModelConfig, YarnConfig
from dsv3.files import MAX_JSON_BYTES, open_regular, parse_json, read_json

_log = logging.getLogger(__name__)

_REQUIRED = object()
_V2_ROUTERS = (("softmax", "greedy"), ("softmax", "group_limited_greedy"))
_V3_ROUTERS = (("sigmoid", "noaux_tc"),)
# model_type -> router spellings it may have (the first is its default), and whether weights are renormalized when the
# file does not say. kimi_k2 is DeepSeek-V3's code under another name.
_MODEL_TYPES = {
    "deepseek_v2": (_V2_ROUTERS, False),
    "deepseek_v3": (_V3_ROUTERS, True),
    "kimi_k2": (_V3_ROUTERS, True),
}

# Sizes beyond these are no model's, and would take time and memory before anything could say so.
_MOST = {
    "vocab_size": 2**24,
    "num_hidden_layers": 2**10,
    "num_nextn_predict_layers": 2**10,
    "n_routed_experts": 2**12,
    "n_shared_experts": 2**12,
    "max_position_embeddings": 2**30,
    "original_max_position_embeddings": 2**30,
}
_MOST_WIDE = 2**20  # of any other integer: widths, heads, ranks
_LARGEST_NUMBER = 1e12

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

_TRAINING_AND_NAMES = """
_attn_implementation _name_or_path architectures attention_dropout auto_map aux_loss_alpha dtype initializer_range
output_attentions output_hidden_states output_router_logits pad_token_id return_dict seq_aux torch_dtype
transformers_version use_cache
"""
_GENERATION_DEFAULTS = """
add_cross_attention bad_words_ids begin_suppress_tokens chunk_size_feed_forward cross_attention_hidden_size
decoder_start_token_id diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id id2label is_decoder
is_encoder_decoder label2id length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams
num_return_sequences output_scores prefix problem_type pruned_heads remove_invalid_values repetition_penalty
return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss
tie_encoder_decoder tokenizer_class top_k top_p torchscript typical_p use_bfloat16
"""
# Known fields that say nothing about the forward pass; transformers 4 could write all of the second kind.
_MEANINGLESS = frozenset(_TRAINING_AND_NAMES.split() + _GENERATION_DEFAULTS.split())


class ConfigError(ValueError):
    """A config.json that this runtime does not understand or support; the text names the field."""


class _Fields:
    """Reads fields of one JSON object, checks their types and remembers which were read."""

    def __init__(self, values: Mapping[str, Any], where: str = ""):
        self._values, self._where, self._read = values, where, set[str]()

    def fail(self, name: str, supported: str) -> ConfigError:
        value = reprlib.repr(self._values.get(name, "absent"))
        return ConfigError(f"config.json: {self._where}{name} is {value}, but must be {supported}")

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def get(self, name: str, default: Any = None) -> Any:
        self._read.add(name)
        value = self._values.get(name)
        return default if value is None else value

    def integer(self, name: str, default: Any = _REQUIRED, *, least: int = 1) -> int:
        value, most = self.get(name, default), _MOST.get(name, _MOST_WIDE)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.fail(name, f"an integer of at least {least} and at most {most}")
        return value

    def number(self, name: str, default: Any = _REQUIRED, *, least: float = 0.0, above: bool = True) -> float:
        value = self.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= _LARGEST_NUMBER:
            raise self.fail(name, f"a number of at most {_LARGEST_NUMBER:g}")
        if value < least or (above and value == least):
            raise self.fail(name, f"a number {'above' if above else 'of at least'} {least}")
        return float(value)

    def boolean(self, name: str, default: Any = _REQUIRED) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.fail(name, "true or false")
        return value

    def one_of(self, name: str, supported: tuple[Any, ...], default: Any = _REQUIRED) -> Any:
        value = self.get(name, default)
        if not any(type(value) is type(s) and value == s for s in supported):
            raise self.fail(name, " or ".join(map(repr, supported)))
        return value

    def explicit_null_or_integer(self, name: str) -> int | None:
        if name not in self._values:
            raise self.fail(name, "null or an integer of at least 1, and stated")
        return self.integer(name) if self.has(name) else self.get(name)

    def object(self, name: str) -> "_Fields | None":
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(name, "an object or null")
        return _Fields(value, f"{self._where}{name}.")

    def finish(self, meaningless: frozenset[str] = frozenset()) -> None:
        """Refuses what nobody has read."""
        for name in self._values:
            if name not in self._read and name not in meaningless:
                near = difflib.get_close_matches(name, self._read, n=1, cutoff=0.75)
                hint = f" (did you mean {near[0]}?)" if near else ""
                raise ConfigError(f"config.json: {self._where}{name} is not a known field{hint}")


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Returns the `ModelConfig` of a parsed config.json of DeepSeek-V2, V2-Lite, V3, R1, V3.1, Moonlight or Kimi-K2.

    Rotary settings may be spelled as `rope_theta` and `rope_scaling`, or as transformers 5's `rope_parameters`.

    Raises:
      ConfigError: a field is missing, unknown, of the wrong type, or has a value that is not supported; the text
        names the field, its value and what is supported.
    """
    fields = _Fields(config)
    for name, value in _FIXED.items():
        fields.one_of(name, (value,), value)
    theta, yarn = _rope(fields)
    cfg = ModelConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        num_hidden_layers=fields.integer("num_hidden_layers"),
        num_attention_heads=fields.integer("num_attention_heads"),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        q_lora_rank=fields.explicit_null_or_integer("q_lora_rank"),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim"),
        qk_rope_head_dim=fields.integer("qk_rope_head_dim"),
        v_head_dim=fields.integer("v_head_dim"),
        intermediate_size=fields.integer("intermediate_size"),
        moe_intermediate_size=fields.integer("moe_intermediate_size"),
        n_routed_experts=fields.integer("n_routed_experts"),
        num_experts_per_tok=fields.integer("num_experts_per_tok"),
        n_shared_experts=fields.integer("n_shared_experts", 0, least=0),
        n_group=fields.integer("n_group", 1),
        topk_group=fields.integer("topk_group", 1),
        routed_scaling_factor=fields.number("routed_scaling_factor"),
        first_k_dense_replace=fields.integer("first_k_dense_replace", least=0),
        num_nextn_predict_layers=fields.integer("num_nextn_predict_layers", 0, least=0),
        rms_norm_eps=fields.number("rms_norm_eps"),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        bos_token_id=_token_ids(fields, "bos_token_id", single=True)[0] if fields.has("bos_token_id") else None,
        eos_token_ids=_token_ids(fields, "eos_token_id"),
        rope_theta=theta,
        yarn=yarn,
        fp8=_quantization(fields),
        **_router(fields),
    )
    _check_consistent(fields, cfg)
    fields.get("bos_token_id")
    fields.finish(_MEANINGLESS)
    return cfg


def _router(fields: _Fields) -> dict[str, Any]:
    model_type = fields.one_of("model_type", tuple(_MODEL_TYPES))
    routers, renormalize = _MODEL_TYPES[model_type]
    scoring = fields.one_of("scoring_func", tuple({scoring for scoring, _ in routers}), routers[0][0])
    method = fields.one_of("topk_method", tuple(method for _, method in routers), routers[0][1])
    norm = fields.boolean("norm_topk_prob", renormalize)
    if model_type == "deepseek_v2" and norm:
        raise fields.fail("norm_topk_prob", "false for deepseek_v2, whose implementations disagree on true")
    return {"scoring_func": scoring, "topk_method": method, "norm_topk_prob": norm}


def _rope(fields: _Fields) -> tuple[float, YarnConfig | None]:
    if fields.has("rope_scaling") and fields.has("rope_parameters"):
        raise fields.fail("rope_parameters", "absent where rope_scaling is given, or the other way round")
    name = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    rope, theta = fields.object(name), None
    fields.get("rope_scaling"), fields.get("rope_parameters")
    if rope is not None and rope.has("rope_theta"):
        theta = rope.number("rope_theta")
        if fields.has("rope_theta") and fields.number("rope_theta") != theta:
            raise fields.fail("rope_theta", f"equal to {name}.rope_theta, {theta}")
    theta = theta or fields.number("rope_theta")
    fields.get("rope_theta")
    if rope is None:
        return theta, None
    yarn = _yarn(rope)
    rope.finish()
    return theta, yarn


def _yarn(rope: _Fields) -> YarnConfig | None:
    spelled = "rope_type" if rope.has("rope_type") else "type"
    kind = rope.one_of(spelled, ("yarn", "default"))
    rope.one_of("type", (kind,), kind)
    rope.one_of("partial_rotary_factor", (1, 1.0), 1.0)
    if kind == "default":
        return None
    rope.one_of("truncate", (True,), True)
    if rope.has("attention_factor"):
        raise rope.fail("attention_factor", "null or absent: it follows from factor, mscale and mscale_all_dim")
    rope.get("attention_factor")
    return YarnConfig(
        factor=rope.number("factor", least=1.0, above=False),
        original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        mscale=rope.number("mscale", 1.0, above=False),
        mscale_all_dim=rope.number("mscale_all_dim", 0.0, above=False),
    )


def _quantization(fields: _Fields) -> Fp8Config | None:
    quantization = fields.object("quantization_config")
    if quantization is None:
        return None
    quantization.one_of("quant_method", ("fp8",))
    quantization.one_of("fmt", ("e4m3",), "e4m3")
    quantization.one_of("activation_scheme", ("dynamic",), "dynamic")
    quantization.one_of("weight_block_size", ([128, 128],))
    scale_fmt = quantization.one_of("scale_fmt", ("float", "ue8m0"), "float")
    # Which tensors are in FP8 shows in the file: they have a scale next to them.
    quantization.finish(frozenset({"modules_to_not_convert", "ignored_layers", "dequantize"}))
    return Fp8Config("ue8m0" if scale_fmt == "ue8m0" else "float32")


def _token_ids(fields: _Fields, name: str, *, single: bool = False) -> tuple[int, ...]:
    value = fields.get(name, [])
    ids = value if isinstance(value, list) and not single else [value]
    if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in ids):
        raise fields.fail(name, "a token id" if single else "a token id, a list of them, or null")
    return tuple(ids)


def _check_consistent(fields: _Fields, cfg: ModelConfig) -> None:
    heads, group_size = cfg.num_attention_heads, cfg.n_routed_experts // cfg.n_group
    fields.one_of("num_key_value_heads", (heads,), heads)
    fields.one_of("head_dim", (cfg.qk_rope_head_dim,), cfg.qk_rope_head_dim)
    fields.one_of("qk_head_dim", (cfg.qk_head_dim,), cfg.qk_head_dim)
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


def load_config(directory: str | pathlib.Path) -> ModelConfig:
    """Reads the `ModelConfig` of a checkpoint directory in Hugging Face layout.

    Two things beyond config.json count: end tokens that only generation_config.json names (Kimi-K2's chats end on one)
    are added, and MTP modules that config.json promises but the safetensors files do not hold (transformers writes
    such directories) are left out.

    Raises:
      ConfigError: config.json is missing, is no JSON object, or `from_hf` refuses it.
    """
    directory = pathlib.Path(directory)
    path = directory / "config.json"
    if not path.is_file():
        raise ConfigError(f"there is no config.json in {str(directory)!r}")
    cfg = from_hf(_read_object(path))
    cfg = _add_generation_eos(cfg, directory / "generation_config.json")
    if cfg.num_nextn_predict_layers and not _holds_layer(directory, cfg.num_hidden_layers):
        _log.info("the checkpoint holds no multi-token prediction module, although config.json names one")
        cfg = dataclasses.replace(cfg, num_nextn_predict_layers=0)
    return cfg


def stored_dtype(directory: str | pathlib.Path) -> str | None:
    """Returns what config.json calls the type of the weights, such as "float16"; None where it says nothing.

    Transformers 5 writes it as `dtype`, older versions as `torch_dtype`.

    Raises:
      ConfigError: config.json is missing or is no JSON object.
    """
    config = _read_object(pathlib.Path(directory) / "config.json")
    name = config.get("dtype") or config.get("torch_dtype")
    return name.removeprefix("torch.") if isinstance(name, str) else None


def _read_object(path: pathlib.Path) -> dict[str, Any]:
    try:
        value = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(path)!r} is no readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{str(path)!r} must hold a JSON object, but holds {type(value).__name__}")
    return value


def _add_generation_eos(cfg: ModelConfig, path: pathlib.Path) -> ModelConfig:
    if not path.is_file():
        return cfg
    more = _token_ids(_Fields(_read_object(path), "generation_config."), "eos_token_id")
    ids = dict.fromkeys((*cfg.eos_token_ids, *(i for i in more if i < cfg.vocab_size)))
    return dataclasses.replace(cfg, eos_token_ids=tuple(ids))


def _holds_layer(directory: pathlib.Path, layer: int) -> bool:
    """Returns False only if the directory's safetensors files are there and none has a tensor of `layer`."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        weight_map = _read_object(index).get("weight_map")
        names = set(weight_map) if isinstance(weight_map, dict) else set()
    else:
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            return True
        names = set().union(*map(_tensor_names, files))
    return any(name.startswith(f"model.layers.{layer}.") for name in names)


def _tensor_names(path: pathlib.Path) -> set[str]:
    """Names in a safetensors file's header; none if it cannot be read, which is for the loader to report."""
    try:
        with open_regular(path) as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = parse_json(file.read(min(length, MAX_JSON_BYTES)))
    except (OSError, ValueError, struct.error):
        return set()
    return set(header) if isinstance(header, dict) else set()


def to_hf(cfg: ModelConfig) -> dict[str, Any]:
    """Returns the config.json of `cfg`: `from_hf(to_hf(cfg)) == cfg`, and transformers reads it.

    Raises:
      ConfigError: `cfg` has settings that the Hugging Face format cannot say.
    """
    if cfg.latent_norm_eps != 1e-6:
        raise ConfigError(f"latent_norm_eps is {cfg.latent_norm_eps}, but config.json cannot say other than 1e-06")
    version = "V3" if cfg.topk_method == "noaux_tc" else "V2"
    same_name = set(_ModelFields) - {"eos_token_ids", "latent_norm_eps", "yarn", "fp8"}
    config = {name: getattr(cfg, name) for name in sorted(same_name)}
    return config | {
        "architectures": [f"Deepseek{version}ForCausalLM"],
        "model_type": f"deepseek_{version.lower()}",
        "attention_bias": False,
        "hidden_act": "silu",
        "moe_layer_freq": 1,
        "num_key_value_heads": cfg.num_attention_heads,
        "eos_token_id": cfg.eos_token_ids[0] if len(cfg.eos_token_ids) == 1 else list(cfg.eos_token_ids) or None,
        "rope_scaling": None if cfg.yarn is None else {"type": "yarn", **dataclasses.asdict(cfg.yarn)},
        "use_cache": True,
        **_quantization_to_hf(cfg.fp8),
    }


_ModelFields = [field.name for field in dataclasses.fields(ModelConfig)]


def _quantization_to_hf(fp8: Fp8Config | None) -> dict[str, Any]:
    if fp8 is None:
        return {}
    settings = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
    if fp8.scale_fmt == "ue8m0":
        settings["scale_fmt"] = "ue8m0"
    return {"quantization_config": settings}
