"""Devices that share embedding and head look up, score and sample as each of them would alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from configs.deepseek_v3 import DEEPSEEK_V3
from dsv3.engine.device.state import MAX_FORBIDDEN, NUM_FIELDS, AdjustState, DecodeState, Field
from dsv3.engine.jobs.sample import logprobs_body, sample_body
from dsv3.model.vocabulary import WHOLE, SharedEmbedding, Vocabulary, lookup
from dsv3.sampling_params import MAX_LOGIT_BIAS
from dsv3.scheduler.batch_slots import NOT_FINITE
from dsv3.scheduler.sequence import FULL, GREEDY
from sharding.mesh import AXES, OF_NODE, RANK_SPEC, partition, rank_mesh

MESH = rank_mesh(jax.devices()[:8], num_nodes=2, tensor_parallel_size=2)  # two ranks of two devices in each node
X, B, S, W, D = 4, 3, 2, 64, 16
CFG = dataclasses.replace(DEEPSEEK_V3, vocab_size=W, hidden_size=D)
SHARED = Vocabulary.from_mesh(CFG, MESH)
RNG = np.random.default_rng(0)


def per_rank(body, *specs):
    """Maps `body`, written for one rank, over all of them; `specs` are those of arguments without a rank axis."""
    count = len(specs)

    def one(*args):
        own = jax.tree.map(lambda x: x[0], args[count:])
        return jax.tree.map(lambda x: x[None], body(*args[:count], *own))

    def mapped(*args):
        in_specs = (*specs, *[RANK_SPEC] * (len(args) - count))
        return jax.shard_map(one, mesh=MESH, in_specs=in_specs, out_specs=RANK_SPEC, check_vma=False)(*args)

    return jax.jit(mapped)


def spec(*axes):
    return partition(axes, table=SHARED.table)


def scored(logits: np.ndarray) -> jax.Array:
    """Returns scores `[X, Xn, B, S, W / Xn]` as a head leaves them whose product with hidden states is `logits`."""
    head = np.eye(W, dtype=np.float32)  # words of a device times "hidden states" that are the logits themselves
    product = functools.partial(jnp.einsum, "wk,...k->...w", precision="highest")
    return per_rank(lambda head, x: SHARED.scores(functools.partial(product, head), x), spec("vocab", None))(
        head, logits
    )


def test_all_devices_of_a_node_share_where_words_and_channels_divide() -> None:
    assert Vocabulary(2, 2) == SHARED
    assert spec("vocab", None) == PartitionSpec(OF_NODE, None)
    assert spec(None, "channels") == PartitionSpec(None, OF_NODE)
    odd = [dict(vocab_size=W + 2), dict(hidden_size=D + 2), dict(tie_word_embeddings=True)]
    assert [Vocabulary.from_mesh(dataclasses.replace(CFG, **change), MESH) for change in odd] == [WHOLE] * 3
    assert WHOLE.table == AXES


def test_look_ups_are_those_of_the_whole_table() -> None:
    table = RNG.normal(size=(W, D)).astype(np.float32)
    tokens = RNG.integers(-3, W + 5, (X, B, S)).astype(np.int32)  # ids out of range too
    shared = per_rank(lambda part, tokens: lookup(SharedEmbedding(part, SHARED), tokens), spec(None, "channels"))
    np.testing.assert_array_equal(shared(table, tokens), lookup(jnp.asarray(table), tokens))


@pytest.fixture(scope="module")
def logits() -> np.ndarray:
    """Rows with equal maxima on several devices, and logits that no word can be drawn from, on one device alone."""
    logits = RNG.integers(-8, 8, (X, B, S, W)).astype(np.float32) / 4  # ties are everywhere
    logits[0, 0, 0, [10, 40, 63]] = 9.0
    logits[1, 1, 0, [31, 32]] = 9.0
    logits[2, 2, 1, :] = -1.0
    return logits


def test_scores_are_all_logits_of_a_device_s_words(logits) -> None:
    scores = np.asarray(scored(logits))
    assert scores.shape == (X, 2, B, S, W // 2)
    for rank in range(X):
        node, own = rank // 2 * 2, slice(rank % 2 * W // 2, (rank % 2 + 1) * W // 2)
        np.testing.assert_array_equal(scores[rank], logits[node : node + 2, ..., own])
    np.testing.assert_array_equal(per_rank(SHARED.whole)(scores), logits)


def states() -> tuple[DecodeState, AdjustState]:
    """Requests with every filter and penalty; their drafts are of both kinds, right and wrong."""
    controls = np.zeros((X, B, NUM_FIELDS), np.int32)
    controls[..., : Field.TOP_K] = np.array([0.8, 0.9, 0.05, 1.5, 0.5, 0.25], np.float32).view(np.int32)
    controls[..., Field.TOP_K], controls[..., Field.ADJUSTED] = 20, 1
    controls[..., Field.SEED_LOW] = np.arange(X * B).reshape(X, B)
    tokens = RNG.integers(0, W, (X, B, S)).astype(np.int32)
    tokens[0, 0, 1] = 10
    state = DecodeState(tokens, np.full((X, B), 7, np.int32), np.zeros((X, B, 1), np.int32), controls)
    adjust = AdjustState(
        counts=RNG.integers(0, 2, (X, B, W)).astype(np.int32),
        in_prompt=RNG.integers(0, 2, (X, B, W)) > 0,
        bias_ids=np.full((X, B, MAX_LOGIT_BIAS), W, np.int32),
        bias=np.zeros((X, B, MAX_LOGIT_BIAS), np.float32),
        forbidden_ids=np.full((X, B, MAX_FORBIDDEN), W, np.int32),
    )
    return state, adjust


@pytest.mark.parametrize(("variant", "width"), [(GREEDY, S), (FULL, 1)])
def test_samplers_draw_what_they_draw_from_all_logits(variant: int, width: int, logits) -> None:
    """The greedy one, and that for everything, with filters, penalties and masks, which takes all logits."""
    state, adjust = states()
    state, logits = dataclasses.replace(state, tokens=state.tokens[..., :width]), logits[:, :, :width]
    given = (state, adjust if variant == FULL else None)
    slots = np.broadcast_to(np.arange(B, dtype=np.int32), (X, B))
    masks = [RNG.integers(0, 2**32, (X, B, width, W // 32), dtype=np.uint32)] if variant == FULL else []
    split = per_rank(functools.partial(sample_body, SHARED, variant))(*given, scored(logits), slots, *masks)
    whole = per_rank(functools.partial(sample_body, WHOLE, variant))(*given, logits[:, None], slots, *masks)
    jax.tree.map(np.testing.assert_array_equal, split, whole)
    assert variant != GREEDY or split[2][0, 0].tolist() == [10, int(logits[0, 0, 1].argmax())]  # the draft was right


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_on_one_device_fails_the_row_of_its_rank_alone(value: float, logits) -> None:
    state, _ = states()
    broken = logits.copy()
    broken[3, 1, 0, W - 1] = value
    parts = np.stack([broken[:, ..., : W // 2], broken[:, ..., W // 2 :]], axis=1)  # [X, 2, ...]: words of each rank
    parts = (
        parts.reshape(2, 2, 2, B, S, W // 2).swapaxes(1, 2).reshape(X, 2, B, S, W // 2)
    )  # to the device that has them
    slots = np.broadcast_to(np.arange(B, dtype=np.int32), (X, B))
    tokens = np.asarray(per_rank(functools.partial(sample_body, SHARED, GREEDY))(state, None, parts, slots)[2])
    failed = tokens[..., 0] == NOT_FINITE
    assert failed[3, 1] and failed.sum() == 1


def test_log_probabilities_are_those_of_all_logits(logits) -> None:
    tokens = RNG.integers(0, W, (X, B, S)).astype(np.int32)
    scores = scored(logits)
    split = per_rank(functools.partial(logprobs_body, SHARED))(scores, tokens)
    whole = per_rank(lambda logits, tokens: logprobs_body(WHOLE, logits[None], tokens))(logits, tokens)
    jax.tree.map(np.testing.assert_array_equal, split, whole)
