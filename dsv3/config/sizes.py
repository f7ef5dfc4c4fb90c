"""How many weights the parts of a model's layers have, and what attention computes per pair of tokens; no jax."""

import dataclasses

from dsv3.config.model import ModelConfig


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Weights of one layer in elements (or bytes: FP8 has one each), and of the head."""

    down: int  # qkv_a
    query: int  # q_b
    key_value: int  # kv_b
    out: int
    expert: int
    shared: int
    dense: int
    head: int
    indexer: int = 0  # of a layer that has one

    @property
    def attention(self) -> int:
        return self.down + self.query + self.key_value + self.out


def sizes_of(model: ModelConfig) -> Sizes:
    """Returns the sizes of a model: 187.1M attention weights per layer and 44.04M per expert for DeepSeek-V3."""
    D, H, Q = model.hidden_size, model.num_attention_heads, model.q_lora_rank
    queries = H * model.qk_head_dim
    expert = 3 * D * model.moe_intermediate_size
    indexer = model.indexer
    return Sizes(
        down=D * ((Q or queries) + model.latent_dim),
        query=queries * Q if Q else 0,
        key_value=H * (model.qk_nope_head_dim + model.v_head_dim) * model.kv_lora_rank,
        out=D * H * model.v_head_dim,
        expert=expert,
        shared=expert * model.n_shared_experts,
        dense=3 * D * model.intermediate_size,
        head=D * model.vocab_size,
        indexer=indexer.num_heads * (indexer.head_dim * (Q or 0) + D) + indexer.head_dim * D if indexer else 0,
    )


def absorbed_operations(model: ModelConfig) -> int:
    """Returns the operations of absorbed attention in a layer, for one query token and one token that it sees."""
    return 2 * model.num_attention_heads * (model.latent_dim + model.kv_lora_rank)


def expanded_operations(model: ModelConfig) -> int:
    """Returns those of attention to keys and values of every head."""
    return 2 * model.num_attention_heads * (model.qk_head_dim + model.v_head_dim)


def expansion_operations(model: ModelConfig) -> int:
    """Returns those of making the keys and values of a token in a layer."""
    return 2 * model.num_attention_heads * (model.qk_nope_head_dim + model.v_head_dim) * model.kv_lora_rank
