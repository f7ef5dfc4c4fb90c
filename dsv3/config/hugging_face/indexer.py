"""The settings of sparse attention (DeepSeek-V3.2, GLM-5): the indexer, and the layers that have none."""

from typing import Any

from dsv3.config.hugging_face.fields import Fields
from dsv3.config.model import IndexerConfig, ModelConfig

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
