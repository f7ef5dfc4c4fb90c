"""Files that describe a language model among others: its settings lie under `text_config`."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from dsv3.config.hugging_face.fields import MEANINGLESS, Fields
from dsv3.config.model import ModelConfig

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
