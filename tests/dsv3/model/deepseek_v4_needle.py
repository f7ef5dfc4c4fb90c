"""Handmade models of one layer of DeepSeek-V4, of the published ratios and angles, that answer with a needle.

A symbol stands far behind, where only an entry keeps it, or as far back as the window reaches. Queries look for any
symbol, in entries or in the window; the indexer chooses entries by distance alone. Symbols are angles, on a fast pair
of values and on a slow one. Values are rotated as keys are, so what comes out is the symbol's angle less those of the
distance, if the output is turned back; weights expect these. The answer is the symbol that is nearest to both, or
`UNKNOWN` where what comes out is weak.
"""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from dsv3.config.model import CompressedAttention, HyperConnections, IndexerConfig, ModelConfig, YarnConfig
from dsv3.model.params import Params, abstract

Question = Literal["far", "near"]

WIDTH, SYMBOLS, HEADS, PLAIN, ROTATED, KEY = 64, 32, 4, 32, 64, 72
QUESTIONS: dict[Question, int] = {"far": SYMBOLS, "near": SYMBOLS + 1}
UNKNOWN, FILLERS = SYMBOLS + 2, np.arange(SYMBOLS + 3, WIDTH)
WINDOW, ASKED, LENGTH = 128, 943, 1024
"""The question's position, in the middle of a window of 128; all windows of the sequence are whole."""
NEEDLE, DECOY = 5, 13
PLACES: dict[int, int] = {4: 102, 128: 198}
"""Where the far needle stands, by the ratio of the layer's entries."""
FAST, SLOW, INDEX = 0, 18, 19
"""Pairs of values. YaRN slows the last two down, by different factors."""
TURN = 10_000
"""Tokens in which the pair INDEX makes less than a turn: beyond, one pair does not say where the needle is."""


def config(ratio: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=WIDTH,
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        q_lora_rank=WIDTH,
        kv_lora_rank=PLAIN,
        qk_nope_head_dim=PLAIN,
        qk_rope_head_dim=ROTATED,
        v_head_dim=PLAIN + ROTATED,
        intermediate_size=0,
        moe_intermediate_size=8,
        n_routed_experts=2,
        num_experts_per_tok=1,
        scoring_func="sqrtsoftplus",
        first_k_dense_replace=0,
        compressed=CompressedAttention(
            ratios=(ratio,),
            sparse_ratio=4,
            window=WINDOW,
            indexer=IndexerConfig(num_heads=2, head_dim=KEY, topk=16, interleaved=True),
            rope_theta=160000.0,
            yarn=YarnConfig(16, 65536, mscale=0),
            output_groups=2,
            output_rank=SYMBOLS,
        ),
        hyper_connections=HyperConnections(streams=4, sinkhorn_iterations=20, eps=1e-6),
        swiglu_limit=10.0,
    )


def frequency(ratio: int, pair: int) -> float:
    """Radians per token, as the reference says it for 64 rotated values."""
    if not ratio:
        return 10000.0 ** (-pair / 32)
    turns = 160000.0 ** (-pair / 32)
    low, high = (math.log(65536 / (turns * 2 * math.pi)) * 64 / (2 * math.log(160000)) for turns in (32, 1))
    ramp = min(max((pair - math.floor(low)) / (math.ceil(high) - math.floor(low)), 0), 1)
    return turns / 16 * ramp + turns * (1 - ramp)


def params(ratio: int, asked: int = ASKED) -> Params:
    """Attention reads the first stream and writes the second, which moves to the third, and the head reads that.

    The question stands at `asked`, in the middle of a window as ASKED does.
    """
    cfg = config(ratio)
    zeros = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), abstract(cfg, jnp.float32))
    one, unit = np.eye(WIDTH, dtype=np.float32), np.full((1, WIDTH), WIDTH**-0.5, np.float32)
    layers, d = zeros.moe, PLAIN + ROTATED
    attention = layers.attention
    attention.qkv_a[0, :WIDTH], attention.kv_norm[:], attention.sink[:] = one, 1, 15
    attention.qkv_a[0, WIDTH:, :SYMBOLS] = symbols(marker=1)
    attention.qkv_a[0, WIDTH + PLAIN :, FILLERS] = symbols(marker=1)[PLAIN:, DECOY]  # for heads that look for nothing
    attention.kv_norm[0, 1] = 6
    attention.q_b[0, d, QUESTIONS["far"]] = attention.q_b[0, 2 * d + 1, QUESTIONS["near"]] = 1
    if ratio:
        attention.o_a[0, 0, :, d:] = expected(ratio, asked - PLACES[ratio] // ratio * ratio)
    attention.o_a[0, 1, :, :d] = expected(ratio, WINDOW - 1)
    attention.o_b[0, :SYMBOLS] = np.tile(one[:SYMBOLS, :SYMBOLS], 2)
    if ratio:
        compress(attention.sparse if ratio == 4 else attention.heavy, PLACES[ratio] % ratio)
    if ratio == 4:
        index(attention.indexer, asked - PLACES[ratio] // ratio * ratio)
    attention = dataclasses.replace(attention, q_norm=unit)
    for mixing, reads, writes in ((layers.attention_mixing, 0, 1), (layers.moe_mixing, 0, 0)):
        mixing.base[0] = np.concatenate([only(reads), np.where(np.arange(4) == writes, 0, -20), shift()])
    zeros.head_mixing.base[:] = only(2)
    layers = dataclasses.replace(layers, input_norm=unit, post_norm=unit, attention=attention)
    head = np.where(np.arange(WIDTH)[:, None] < SYMBOLS, one, 0)
    head[UNKNOWN, list(QUESTIONS.values())] = 8
    return jax.tree.map(jnp.asarray, dataclasses.replace(zeros, embed=one, norm=unit[0], head=head, moe=layers))


def only(stream: int) -> np.ndarray:
    return np.where(np.arange(4) == stream, 20.0, -20.0)


def shift() -> np.ndarray:
    """Logits of a matrix that moves stream j to j + 1."""
    return 40 * np.roll(np.eye(4), 1, axis=1).ravel()


def symbols(marker: int) -> np.ndarray:
    """Values `[d, SYMBOLS]` of each symbol: a mark for queries, and its angle on two pairs."""
    angles, values = 2 * np.pi * np.arange(SYMBOLS) / SYMBOLS, np.zeros((PLAIN + ROTATED, SYMBOLS))
    values[marker] = 1
    for pair in (FAST, SLOW):
        values[PLAIN + 2 * pair], values[PLAIN + 2 * pair + 1] = np.cos(angles), np.sin(angles)
    return values


def expected(ratio: int, distance: int) -> np.ndarray:
    """What comes out of each symbol at a distance, `[SYMBOLS, d]`."""
    angles, found = 2 * np.pi * np.arange(SYMBOLS) / SYMBOLS, np.zeros((SYMBOLS, PLAIN + ROTATED))
    for pair in (FAST, SLOW):
        turned = angles - distance * frequency(ratio, pair)
        found[:, PLAIN + 2 * pair], found[:, PLAIN + 2 * pair + 1] = np.cos(turned), np.sin(turned)
    return found


def compress(compressor: Any, place: int) -> None:
    """Entries are their window's symbol; of two, that which stands at `place`."""
    d = PLAIN + ROTATED
    series = compressor.position.shape[2] - d  # that of a token's own window is the last one
    compressor.value_score[0, series : series + d, :SYMBOLS] = symbols(marker=0)
    compressor.value_score[0, 2 * series + d :, :SYMBOLS] = 20
    compressor.position[0, place, series:] = 30
    compressor.norm[:] = 1
    compressor.norm[0, 0] = 6


def index(indexer: Any, distance: int) -> None:
    """All keys are equal; the second head, for another distance, has no weight.

    Where it has one it fills all places: with all pairs its peak is as narrow as the first one's, so it is higher.
    """
    higher = 1 if distance < TURN else 8
    for pair in [INDEX] if distance < TURN else range(ROTATED // 2):
        plain = KEY - ROTATED + 2 * pair
        for head, (other, size) in enumerate(((distance, 1), (300, higher))):
            angle = other * frequency(4, pair)
            turned = size * np.cos(angle), -size * np.sin(angle)
            indexer.q_b[0, head * KEY + plain : head * KEY + plain + 2, QUESTIONS["far"]] = turned
        indexer.compressor.value_score[0, [plain, KEY + plain]] = 1
    indexer.weights[0, 0] = 1
    indexer.compressor.norm[:] = 1


def prompt(ratio: int, question: Question, asked: int = ASKED) -> np.ndarray:
    """Tokens: fillers, the needle, decoys for wrong rules, the question, and tokens that it must not see.

    There are as many behind a question at `asked` as LENGTH has behind ASKED.
    """
    tokens = np.random.default_rng(0).choice(FILLERS, asked + LENGTH - ASKED).astype(np.int32)
    tokens[asked] = QUESTIONS[question]
    if question == "near":
        tokens[[asked - WINDOW + 1, asked - WINDOW]] = NEEDLE, DECOY
        return tokens
    tokens[[PLACES[ratio], PLACES[ratio] - 1]] = NEEDLE, DECOY
    if ratio == 128:
        tokens[asked // ratio * ratio + PLACES[ratio] % ratio] = DECOY  # behind the question, in its own window
    return tokens
