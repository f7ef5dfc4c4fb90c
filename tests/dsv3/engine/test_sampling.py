"""The sampler against numpy: thresholds, penalties, distributions, reproducibility."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dsv3.engine.device import sampling

W = 300
_filtered = jax.jit(sampling.apply_filters)
_sample = jax.jit(sampling.sample)
_processed = jax.jit(sampling.processed_logprobs, static_argnums=3, static_argnames="filters")
_draw = jax.jit(sampling.draw)
_draw_by = jax.jit(lambda weights, keys, position: sampling.draw(weights, sampling.uniforms(keys, position)))
_guard = jax.jit(sampling.replace_invalid, static_argnums=2)
_log_probabilities = jax.jit(lambda logits, tokens: sampling.log_probabilities(logits, tokens, 20))


def _weights(seed: int, rows: int = 2) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(size=(rows, W)).astype(np.float32) * 3
    return np.exp(logits - logits.max(-1, keepdims=True))


def _oracle(weights: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """One row, by sorting; weights are distinct."""
    kept = np.where(weights >= min_p, weights, 0)
    order = np.argsort(-kept)
    if top_k:
        kept[order[top_k:]] = 0
    if top_p < 1:
        mass = np.cumsum(kept[order].astype(np.float64)) / kept.sum(dtype=np.float64)
        kept[order[np.searchsorted(mass, top_p) + 1 :]] = 0
    return kept


@pytest.mark.parametrize("top_k", [0, 1, 7, W, 10**6])
@pytest.mark.parametrize(("top_p", "min_p"), [(1.0, 0.0), (0.9, 0.0), (0.05, 0.0), (1.0, 0.2), (0.7, 0.01)])
def test_filters_keep_what_sorting_keeps(top_k, top_p, min_p):
    weights = _weights(top_k % 97)
    rows = len(weights)
    got = _filtered(weights, np.full(rows, top_k, np.int32), np.full(rows, top_p, np.float32), np.full(rows, min_p))
    np.testing.assert_array_equal(got, [_oracle(row, top_k, top_p, min_p) for row in weights])


@settings(deadline=None, max_examples=40)
@given(
    hnp.arrays(np.float32, (2, W), elements=st.floats(-30, 30, width=32)),
    st.integers(0, W),
    st.floats(0.0009765625, 1.0, width=32),
    st.floats(0, 1, width=32),
)
def test_a_filter_keeps_a_best_set_and_never_nothing(logits, top_k, top_p, min_p):
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    each = (np.full(2, top_k, np.int32), np.full(2, top_p, np.float32), np.full(2, min_p, np.float32))
    for before, after in zip(weights, np.asarray(_filtered(weights, *each)), strict=True):
        kept = after > 0
        assert kept[before.argmax()]
        assert before[kept].min() >= before[~kept].max(initial=0) or not before[~kept].any()
        assert (before[kept] >= min_p).all()
        if top_k and len(np.unique(before)) == W:
            assert kept.sum() <= top_k


def test_draws_follow_the_distribution():
    """Pearson's chi-square of 40,000 draws with fixed seeds stays below its 99.9 % quantile (49 degrees: 85.4)."""
    weights = np.tile(_weights(5, 1)[:, :50], (40_000, 1))
    keys = np.stack([np.arange(40_000), np.full(40_000, 9)], -1).astype(np.uint32)
    tokens = _draw_by(weights, keys, np.full(40_000, 3, np.int32))
    observed = np.bincount(np.asarray(tokens), minlength=50)
    expected = weights[0] / weights[0].sum() * 40_000
    rare = expected < 5
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    assert ((observed - expected) ** 2 / expected).sum() < 85.4


@pytest.mark.parametrize("uniform", [0.0, 0.5, np.nextafter(np.float32(1), np.float32(0))])
def test_a_draw_never_takes_a_token_of_weight_zero(uniform):
    weights = np.zeros((2, W), np.float32)
    weights[:, [130, 131, 290]] = [[1e-30, 3e-30, 2e-30], [2e-30, 1e-30, 3e-30]]
    tokens = _draw(weights, np.full((2, 2), uniform, np.float32))
    assert np.isin(tokens, (130, 131, 290)).all()


@settings(deadline=None, max_examples=50)
@given(
    hnp.arrays(np.float32, (2, W), elements=st.sampled_from([0.0, 0.0, 0.0, 1e-36, 1e-7, 0.3, 1.0]), fill=st.just(0.0)),
    st.sampled_from([0.0, 2**-23, 0.5, 1 - 2**-23, 1 - 2**-24]),
    st.sampled_from([0.0, 2**-23, 0.5, 1 - 2**-23, 1 - 2**-24]),
)
def test_the_ends_of_the_unit_interval_draw_a_token_with_a_weight(weights, first, second):
    weights[:, 7] = np.maximum(weights[:, 7], 1e-36)
    tokens = np.asarray(_draw(weights, np.full((2, 2), [first, second], np.float32)))
    assert (weights[[0, 1], tokens] > 0).all()


def test_a_draw_never_falls_where_a_parallel_sum_rounds_up():
    """Over more than 256 blocks XLA's cumulative sum also rises at blocks of weight 0: a draw once fell on these."""
    rng = np.random.default_rng(0)
    blocks = rng.random((200, 300)).astype(np.float32) ** 4 * (rng.random((200, 300)) < 0.3)
    cumulative = np.asarray(jax.jit(lambda x: jnp.cumsum(x, axis=-1))(blocks))
    row, before = np.nonzero((np.diff(cumulative, axis=1) > 0) & (blocks[:, 1:] == 0))
    uniform = cumulative[row, before] / cumulative[row, -1]
    near = np.concatenate([uniform + i * np.spacing(uniform) for i in range(-2, 3)])
    weights = np.zeros((len(near), 300, 128), np.float32)
    weights[:, :, 5] = np.tile(blocks[row], (5, 1))
    weights = weights.reshape(len(near), -1)
    tokens = np.asarray(_draw(weights, np.stack([near, np.full_like(near, 0.5)], axis=1)))
    assert (np.take_along_axis(weights, tokens[:, None], axis=1) > 0).all()


def _controls(rows: int, **changes) -> sampling.Controls:
    values = {
        "temperature": np.ones(rows, np.float32),
        "top_p": np.ones(rows, np.float32),
        "min_p": np.zeros(rows, np.float32),
        "top_k": np.zeros(rows, np.int32),
        "seed": np.tile(np.array([[0, 1]], np.uint32), (rows, 1)),
        "position": np.arange(rows, dtype=np.int32),
    }
    return sampling.Controls(**(values | changes))


def test_a_draw_depends_on_seed_and_position_alone():
    logits = np.tile(np.random.default_rng(0).normal(size=(1, W)).astype(np.float32), (6, 1))
    seed = np.array([[0, 1], [0, 2], [0, 1], [0, 1], [0, 2], [5, 1]], np.uint32)
    position = np.array([7, 7, 7, 8, 7, 7], np.int32)
    tokens = np.asarray(_sample(logits, _controls(6, seed=seed, position=position))).tolist()
    assert tokens[0] == tokens[2] and tokens[1] == tokens[4]
    assert len({tokens[0], tokens[1], tokens[3], tokens[5]}) > 1
    alone = np.asarray(_sample(logits[:1], _controls(1, seed=seed[:1], position=position[:1])))
    assert alone[0] == tokens[0]


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-6])
def test_a_temperature_of_zero_or_nearly_so_is_greedy(temperature):
    logits = np.random.default_rng(1).normal(size=(6, W)).astype(np.float32)
    tokens = _sample(logits, _controls(6, temperature=np.full(6, temperature, np.float32)))
    np.testing.assert_array_equal(tokens, logits.argmax(-1))


def test_a_low_temperature_sharpens():
    logits = np.tile(np.random.default_rng(2).normal(size=(1, W)).astype(np.float32), (6, 1))

    def drawn(temperature: float) -> set[int]:
        """Tokens of the positions up to 500."""
        each = np.full(6, temperature, np.float32)
        positions = np.arange(504, dtype=np.int32).reshape(-1, 6)
        found = [_sample(logits, _controls(6, temperature=each, position=six)) for six in positions]
        return set(np.ravel(found).tolist())

    assert len(drawn(0.05)) < 10 < len(drawn(5.0))


def test_adjustments_match_their_formulas():
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(2, W)).astype(np.float32) * 4
    counts = rng.integers(0, 3, size=(2, W)).astype(np.int32)
    in_prompt = rng.random((2, W)) < 0.2
    adjustments = sampling.Adjustments(
        repetition=np.array([1.3, 1.0], np.float32),
        presence=np.array([0.5, 0.0], np.float32),
        frequency=np.array([0.25, -0.5], np.float32),
        counts=counts,
        in_prompt=in_prompt,
        bias_ids=np.array([[4, 9, W], [W, W, W]], np.int32),
        bias=np.array([[2.0, -50.0, 7.0], [1.0, 1.0, 1.0]], np.float32),
        forbidden_ids=np.array([[11, W], [0, 299]], np.int32),
    )
    expected = logits.astype(np.float64)
    expected[0, 4] += 2
    expected[0, 9] -= 50
    expected[0, 11] = expected[1, 0] = expected[1, 299] = -np.inf
    for row, penalty in enumerate(adjustments.repetition):
        seen = (counts[row] > 0) | in_prompt[row]
        scaled = np.where(expected[row] > 0, expected[row] / penalty, expected[row] * penalty)
        expected[row] = np.where(seen, scaled, expected[row])
        expected[row] -= adjustments.frequency[row] * counts[row] + adjustments.presence[row] * (counts[row] > 0)
    np.testing.assert_allclose(jax.jit(sampling.apply_adjustments)(logits, adjustments), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_that_is_not_finite_is_reported_alone(value):
    logits = np.zeros((3, W), np.float32)
    logits[1, 17] = value
    assert np.asarray(_guard(logits, np.full(3, 5, np.int32), -1)).tolist() == [5, -1, 5]


def test_a_few_forbidden_tokens_are_no_error():
    logits = np.full((3, W), -np.inf, np.float32)
    logits[:2, 3] = 0.0
    assert np.asarray(_guard(logits, np.full(3, 3, np.int32), -1)).tolist() == [3, 3, -1]


def test_log_probabilities_are_the_models_own():
    logits = np.random.default_rng(4).normal(size=(2, W)).astype(np.float32)
    tokens = np.array([8, 200], np.int32)
    own, ids, top = _log_probabilities(logits, tokens)
    logp = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    np.testing.assert_allclose(own, logp[[0, 1], tokens], rtol=1e-5)
    np.testing.assert_array_equal(ids, np.argsort(-logits)[:, :20])
    np.testing.assert_allclose(top, np.take_along_axis(logp, np.asarray(ids), -1), rtol=1e-5)


@settings(deadline=None, max_examples=50)
@given(
    hnp.arrays(np.float32, (2, 20), elements=st.sampled_from([-np.inf, -1e36, -100.0, -1e-30, 0.0, 1.5, 100.0, 1e36])),
    st.integers(0, 19),
)
def test_log_probabilities_of_finite_maxima_are_no_nan_and_add_up_to_one(logits, token):
    logits[:, token] = np.maximum(logits[:, token], -1e36)
    own, ids, top = map(np.asarray, _log_probabilities(logits, np.full(2, token, np.int32)))
    assert (own <= 0).all() and np.isfinite(own).all()
    np.testing.assert_allclose(np.exp(top.astype(np.float64)).sum(axis=-1), 1, rtol=1e-5)
    assert (np.sort(ids, axis=-1) == np.arange(20)).all() and (top[:, 1:] <= top[:, :-1]).all()


@pytest.mark.parametrize("filters", [False, True])
def test_processed_logprobs_are_of_the_distribution_that_is_drawn_from(filters):
    """A greedy row has that of temperature 1, without filters; what is excluded has minus infinity."""
    logits = np.random.default_rng(5).normal(size=(3, W)).astype(np.float32) * 3
    temperature, top_k, top_p, min_p = [0.7, 1.0, 0.0], [0, 9, 9], [0.8, 1.0, 0.5], [0.0, 0.01, 0.5]
    each = [np.array(a, t) for a, t in ((temperature, "f4"), (top_p, "f4"), (min_p, "f4"), (top_k, "i4"))]
    controls = sampling.Controls(*each, seed=np.zeros((3, 2), np.uint32), position=np.zeros(3, np.int32))
    tokens = np.asarray(_sample(logits, controls))
    own, ids, top = map(np.asarray, _processed(logits, tokens, controls, 20, filters=filters))
    for i, row in enumerate(logits):
        weights = np.exp((row - row.max()) / (temperature[i] or 1.0)).astype(np.float32)
        kept = _oracle(weights, top_k[i], top_p[i], min_p[i]) if filters and temperature[i] else weights
        with np.errstate(divide="ignore"):
            wanted = np.log(kept / kept.sum())
        np.testing.assert_allclose(own[i], wanted[tokens[i]], atol=1e-4)
        np.testing.assert_allclose(top[i], np.sort(wanted)[::-1][:20], atol=1e-4)
        finite = np.isfinite(top[i])
        np.testing.assert_allclose(wanted[ids[i][finite]], top[i][finite], atol=1e-4)
        assert finite.all() or (filters and temperature[i])
