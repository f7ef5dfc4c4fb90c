"""Reads fields of a configuration file with their types and bounds, and refuses fields that were not read."""

import dataclasses
import difflib
import re
import reprlib
from collections.abc import Mapping
from typing import Any

from dsv3.config.model import ModelConfig

_REQUIRED = object()

# Sizes beyond these are no model's, and would take time and memory before anything could say so.
_MOST = {
    "vocab_size": 2**24,
    "num_hidden_layers": 2**10,
    "num_nextn_predict_layers": 2**10,
    "n_routed_experts": 2**12,
    "n_shared_experts": 2**12,
    "hc_mult": 2**6,
    "hc_sinkhorn_iters": 2**10,
    "max_position_embeddings": 2**30,
    "original_max_position_embeddings": 2**30,
}
_MOST_WIDE = 2**20  # of any other integer: widths, heads, ranks
_LARGEST_NUMBER = 1e12

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
MEANINGLESS = frozenset(_TRAINING_AND_NAMES.split() + _GENERATION_DEFAULTS.split())
"""Known fields that say nothing about the forward pass; transformers 4 could write all of the second kind."""


class ConfigError(ValueError):
    """A configuration file that this runtime does not understand or support; the text names the field."""


class Fields:
    """Reads fields of one JSON object, checks their types and remembers which were read.

    `where` is what stands in front of a field's name in messages, `file` the name of the file.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "", file: str = "config.json"):
        self._values, self._where, self._file, self._read = values, where, file, set[str]()

    def fail(self, name: str, supported: str) -> ConfigError:
        value = reprlib.repr(self._values.get(name, "absent"))
        return ConfigError(f"{self._file}: {self._where}{name} is {value}, but must be {supported}")

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

    def token_ids(self, name: str, *, single: bool = False) -> tuple[int, ...]:
        value = self.get(name, [])
        ids = value if isinstance(value, list) and not single else [value]
        if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in ids):
            raise self.fail(name, "a token id" if single else "a token id, a list of them, or null")
        return tuple(ids)

    def object(self, name: str) -> "Fields | None":
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(name, "an object or null")
        return Fields(value, f"{self._where}{name}.", self._file)

    def finish(self, meaningless: frozenset[str] = frozenset()) -> None:
        """Refuses fields that were not read."""
        for name in self._values:
            if name not in self._read and name not in meaningless:
                near = difflib.get_close_matches(name, self._read, n=1, cutoff=0.75)
                hint = f" (did you mean {near[0]}?)" if near else ""
                raise ConfigError(f"{self._file}: {self._where}{name} is not a known field{hint}")


_OF_OTHER_MEDIA = re.compile(
    r"(image|video|vision|visual|media|audio|mm|projector|projection|multimodal|spatial|use_unified_vision)_\w+"
    r"|ignore_index|head_dim"
)


@dataclasses.dataclass(frozen=True)
class Wrapper:
    """A `model_type` around a language model: what it is called, and the `model_type`s that its text part may have."""

    members: str
    text_types: tuple[str, ...]


def text_config(config: Mapping[str, Any], fields: Fields, wrapper: Wrapper) -> Fields:
    """Returns the fields of the language model.

    They take the quantization of the whole where they have none, and whether the head is tied where the whole says so.

    Raises:
      ConfigError: there is no `text_config` of a supported type, or the file around it has a field that is neither
        known nor one of other media.
    """
    text = fields.object("text_config")
    if text is None:
        raise fields.fail("text_config", "an object")
    text.one_of("model_type", wrapper.text_types)
    values = dict(config["text_config"])
    if values.get("quantization_config") is None:
        values["quantization_config"] = fields.get("quantization_config")
    if fields.has("tie_word_embeddings"):  # transformers goes by this one, whatever the language model's own says
        values["tie_word_embeddings"] = fields.boolean("tie_word_embeddings")
    for name in ("quantization_config", "bos_token_id", "eos_token_id"):
        fields.get(name)
    other = {name for name in config if _OF_OTHER_MEDIA.fullmatch(name)}
    fields.finish(MEANINGLESS | other)
    return Fields(values, "text_config.")


def end_tokens(fields: Fields, cfg: ModelConfig) -> tuple[int, ...]:
    """Returns the end tokens of the language model, and then those that only the file around it names."""
    more = (i for i in fields.token_ids("eos_token_id") if i < cfg.vocab_size)
    return tuple(dict.fromkeys((*cfg.eos_token_ids, *more)))
