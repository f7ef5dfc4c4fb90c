"""A handmade model of one layer that answers with the digit at a fixed distance before the question.

Attention looks for any digit. The indexer's keys are all equal, so it selects tokens by distance alone: its score is
highest at `DISTANCE`, by the rotation of one slow pair of values. If values are paired in the other way, other
distances win, and the prompt has other digits there.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from dsv3.config.model import IndexerConfig, ModelConfig
from dsv3.model.params import IndexerParams, Params, abstract

WIDTH, ROTATED, PAIR = 32, 16, 6
QUESTION, FILLERS = 10, np.arange(11, WIDTH)
LENGTH, DISTANCE, NEEDLE = 2601, 1100, 5
DECOYS = {596: 3, 628: 4}
"""Digits at the distances that win if neighbors are paired instead of halves, and the other way round."""


def config(*, interleaved: bool, topk: int = 16) -> ModelConfig:
    return ModelConfig(
        vocab_size=WIDTH,
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=1,
        q_lora_rank=WIDTH,
        kv_lora_rank=WIDTH,
        qk_nope_head_dim=4,
        qk_rope_head_dim=ROTATED,
        v_head_dim=WIDTH,
        intermediate_size=8,
        moe_intermediate_size=8,
        n_routed_experts=2,
        num_experts_per_tok=1,
        first_k_dense_replace=1,
        max_position_embeddings=4096,
        indexer=IndexerConfig(num_heads=1, head_dim=ROTATED + 4, topk=topk, interleaved=interleaved),
    )


def params(*, pairs: bool) -> Params:
    """Parameters for an indexer that rotates `pairs` of neighbors, or else values of two halves."""
    zeros = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), abstract(config(interleaved=False), jnp.float32))
    one, unit = np.eye(WIDTH, dtype=np.float32), np.full((1, WIDTH), WIDTH**-0.5, np.float32)
    attention = zeros.dense.attention
    attention.qkv_a[0, :WIDTH] = attention.qkv_a[0, WIDTH : 2 * WIDTH] = one
    attention.q_b[0, 0, QUESTION] = 400
    attention.k_up[0, 0, 0, :10] = 1
    attention.v_up[0, 0] = attention.o[0] = one
    attention = dataclasses.replace(attention, q_norm=unit, kv_norm=unit, indexer=_indexer(pairs))
    dense = dataclasses.replace(zeros.dense, input_norm=unit, post_norm=unit, attention=attention)
    head = np.where(np.arange(WIDTH)[:, None] < 10, one, 0)
    return dataclasses.replace(zeros, embed=one, norm=unit[0], head=head, dense=dense)


def _indexer(pairs: bool) -> IndexerParams:
    first, second = (2 * PAIR, 2 * PAIR + 1) if pairs else (PAIR, PAIR + ROTATED // 2)
    angle = DISTANCE * 10000.0 ** (-2 * PAIR / ROTATED)
    q, bias, weights = np.zeros((1, ROTATED + 4, WIDTH)), np.zeros((1, ROTATED + 4)), np.zeros((1, 1, WIDTH))
    q[0, first, QUESTION], q[0, second, QUESTION] = np.cos(angle), -np.sin(angle)
    bias[0, first] = weights[0, 0, QUESTION] = 1
    arrays = q, np.ones((1, ROTATED + 4, WIDTH)), np.zeros((1, ROTATED + 4)), bias, weights
    return IndexerParams(*(array.astype(np.float32) for array in arrays))


def prompt() -> np.ndarray:
    """`[LENGTH]` tokens: fillers, the needle, decoys for wrong pairings, and the question at the end."""
    tokens = np.random.default_rng(0).choice(FILLERS, LENGTH).astype(np.int32)
    tokens[-1] = QUESTION
    for distance, digit in {DISTANCE: NEEDLE, **DECOYS}.items():
        tokens[-1 - distance] = digit
    return tokens
