"""Samplers as a server compiles them, at the edges of what the API accepts, against the distribution in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsv3.engine.device import sampling
from dsv3.engine.device.state import NO_DRAFT, AdjustState, DecodeState, adjustments_at, control_rows, controls_at
from dsv3.engine.jobs.sample import sample_body
from dsv3.model.vocabulary import WHOLE
from dsv3.sampling_params import MAX_REPETITION_PENALTY, MIN_REPETITION_PENALTY, SamplingParams
from dsv3.scheduler.batch_slots import NOT_FINITE, NOTHING, UNDRAFTED
from dsv3.scheduler.request import EngineRequest, RequestRules, prepare
from dsv3.scheduler.sequence import DRAWN, FILTERED, FULL, GREEDY, make_sequence
from tests.dsv3.engine import distribution

pytestmark = pytest.mark.optimised  # which products LLVM rounds depends on its optimisations

W, PADDING = 40, 4  # vocabulary; entries of a row's lists
TINY = 1e-37  # weights below it may have been flushed to 0
NEARLY_ONE = 1 - 2**-24  # the greatest float32 below 1


@dataclasses.dataclass(frozen=True)
class Row:
    """A request with the logits of its next token."""

    logits: np.ndarray
    sampling: SamplingParams
    prompt: list[int]
    answer: list[int]

    @property
    def forbidden(self) -> tuple[int, ...]:
        return self.sampling.stop_token_ids if len(self.answer) < self.sampling.min_tokens else ()

    def apply_adjustments(self) -> np.ndarray:
        """Its adjusted logits by the oracle."""
        return distribution.apply_adjustments(self.logits, self.sampling, self.prompt, self.answer, self.forbidden)


def _padded(values, fill) -> np.ndarray:
    return np.array([[*v, *[fill] * (PADDING - len(v))] for v in values])


def _states(rows: list[Row]) -> tuple[DecodeState, AdjustState]:
    """The device's state with the rows' requests in as many slots."""
    rules = RequestRules(vocab_size=W, max_model_len=1000)
    asked = [EngineRequest(request_id=0, prompt_token_ids=r.prompt, sampling=r.sampling) for r in rows]
    controls = control_rows(make_sequence(prepare(request, rules)) for request in asked)
    lengths = np.array([len(r.prompt) + len(r.answer) for r in rows], np.int32)
    biases = [r.sampling.logit_bias for r in rows]
    adjust = AdjustState(
        counts=np.stack([np.bincount(np.array(r.answer, int), minlength=W) for r in rows]).astype(np.int32),
        in_prompt=np.stack([np.isin(np.arange(W), r.prompt) for r in rows]),
        bias_ids=_padded(biases, W).astype(np.int32),
        bias=_padded([b.values() for b in biases], 0).astype(np.float32),
        forbidden_ids=_padded([r.sampling.stop_token_ids for r in rows], W).astype(np.int32),
    )
    zeros = np.zeros((len(rows), 1), np.int32)
    return DecodeState(zeros, lengths, zeros, controls), adjust


@functools.cache
def _sampler(variant: int):
    return jax.jit(lambda state, adjust, logits, slots: sample_body(WHOLE, variant, state, adjust, logits[None], slots))


def _tokens(variant: int, rows: list[Row]) -> list[int]:
    """Tokens that the engine's sampler of a variant draws."""
    state, adjust = _states(rows)
    logits = np.stack([r.logits for r in rows])[:, None]
    slots = np.arange(len(rows), dtype=np.int32)
    return np.asarray(_sampler(variant)(state, adjust if variant == FULL else None, logits, slots)[2])[:, 0].tolist()


@jax.jit
def _inside(state: DecodeState, adjust: AdjustState, logits: jax.Array):
    """Adjusted logits, and weights before and after the filters."""
    slots = jnp.arange(logits.shape[0])
    controls, logits = (
        controls_at(state, slots),
        sampling.apply_adjustments(logits, adjustments_at(state, adjust, slots)),
    )
    before = sampling.relative_weights(logits, jnp.maximum(controls.temperature, 1e-5))
    return logits, before, sampling.apply_filters(before, controls.top_k, controls.top_p, controls.min_p)


def _grid(rng: np.random.Generator) -> np.ndarray:
    """Logits whose adjustments by `_EXACT` are exact in float32, and apart by more than what temperatures round."""
    return rng.integers(-64, 64, W).astype(np.float32) / 4


def _equal(rng: np.random.Generator) -> np.ndarray:
    return np.full(W, _grid(rng)[0])


def _alone(rng: np.random.Generator) -> np.ndarray:
    logits = np.full(W, -np.inf, np.float32)
    logits[rng.integers(W)] = _grid(rng)[0]
    return logits


def _two_best(rng: np.random.Generator) -> np.ndarray:
    logits = _grid(rng)
    logits[rng.choice(W, 2, replace=False)] = 16.25
    return logits


_LOGITS = st.builds(
    lambda make, seed: make(np.random.default_rng(seed)),
    st.sampled_from([_grid, _grid, _equal, _alone, _two_best]),
    st.integers(0, 2**32 - 1),
)
_FILTERS = {
    "temperature": st.sampled_from([0.0, 1e-300, 9e-6, 1e-5, 1e-3, 0.3, 0.6, 0.7, 0.9, 1.0, 1.3, 100.0]),
    "top_p": st.sampled_from([1e-300, 1e-38, 1e-7, 0.05, 0.5, 0.95, NEARLY_ONE, 1.0]) | st.floats(1e-3, 1),
    "min_p": st.sampled_from([0.0, 0.0, 1e-300, 1e-38, 0.1, NEARLY_ONE, 1.0]) | st.floats(0, 1),
    "top_k": st.sampled_from([-1, 0, 1, 2, 7, W - 1, W, W + 1, 2**31 - 1]),
    "seed": st.integers(-(2**63), 2**63 - 1),
}
_GREEDY = {"temperature": st.just(0.0)}
_EXACT = {
    "repetition_penalty": st.sampled_from([1.0, 0.5, 2.0, 4.0]),
    "presence_penalty": st.sampled_from([0.0, -2.0, 0.25, 2.0]),
    "frequency_penalty": st.sampled_from([0.0, -2.0, 0.25, 2.0]),
    "logit_bias": st.dictionaries(st.integers(0, W - 1), st.sampled_from([-100.0, -2.5, 0.5, 100.0]), max_size=PADDING),
    "stop_token_ids": st.sets(st.integers(0, W - 1), max_size=PADDING).map(tuple),
    "min_tokens": st.sampled_from([0, 0, 3, 100]),
}
_TOKENS = st.lists(st.integers(0, W - 1), max_size=5)


def _rows(parameters: dict) -> st.SearchStrategy[Row]:
    params = st.fixed_dictionaries(parameters).map(lambda given: SamplingParams(ignore_eos=True, **given))
    return st.builds(Row, _LOGITS, params, _TOKENS.map(lambda tokens: [0, *tokens]), _TOKENS)


def _batches(parameters: dict) -> st.SearchStrategy[list[Row]]:
    """One row, or three: programs of other shapes are fused, and round, in other ways."""
    return st.sampled_from([1, 3]).flatmap(lambda n: st.lists(_rows(parameters), min_size=n, max_size=n))


def _row(logits=None, **params) -> Row:
    logits = np.random.default_rng(3).normal(size=W).astype(np.float32) * 5 if logits is None else logits
    return Row(logits, SamplingParams(**params), [1], [])


@settings(deadline=None, max_examples=150)
@given(_batches(_FILTERS | _EXACT))
def test_what_can_be_drawn_is_what_the_distribution_says(rows):
    """Supports agree but for tokens within 1e-4 of a threshold; probabilities agree to 1e-4."""
    state, adjust = _states(rows)
    got = map(np.asarray, _inside(state, adjust, np.stack([r.logits for r in rows])))
    for row, x, before, after in zip(rows, *got, strict=True):
        expected = row.apply_adjustments()
        np.testing.assert_array_equal(x, expected)
        if row.sampling.temperature < 1e-5 or not np.isfinite(expected.max()):
            continue  # greedy, or an error: see the tokens
        assert (before <= 1).all() and (after[expected == expected.max()] == 1).all()
        w, kept = distribution.weights(expected, row.sampling.temperature), after > 0
        assert (kept <= distribution.support(expected, row.sampling, 1e-4)).all()
        assert (kept >= distribution.support(expected, row.sampling, -1e-4) & (w > TINY)).all()
        here = kept & (w > TINY)
        np.testing.assert_allclose(after[here] / after.sum(dtype=np.float64), w[here] / w[kept].sum(), rtol=1e-4)


@pytest.mark.parametrize("variant", [DRAWN, FILTERED, FULL])
@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_token_is_drawn_from_the_support(variant, data):
    asked = {DRAWN: {name: _FILTERS[name] for name in ("temperature", "seed")}, FULL: _FILTERS | _EXACT}
    rows = data.draw(_batches(asked.get(variant, _FILTERS)))
    tokens = _tokens(variant, rows)
    if variant == DRAWN:
        assert tokens == _tokens(FILTERED, rows), "beside a request with filters the others get the same"
    for row, token in zip(rows, tokens, strict=True):
        x = row.apply_adjustments()
        if np.isfinite(x.max()):
            assert distribution.support(x, row.sampling, 1e-4)[token]
        else:
            assert token == NOT_FINITE


_ONLY_THE_BEST = [{"min_p": 1.0}, {"top_p": 1e-38}, {"top_p": 1e-300}, {"top_k": 1}, {"temperature": 1e-5}]


@pytest.mark.parametrize("variant", [GREEDY, FILTERED, FULL])
@pytest.mark.parametrize("count", [1, 3])
def test_the_most_likely_token_survives_every_filter(variant, count):
    """A min_p of 1 or a tiny top_p once left nothing at temperatures that float32 rounds, and token 0 was drawn."""
    rng = np.random.default_rng(0)
    filters = [{}] if variant == GREEDY else _ONLY_THE_BEST
    for i, temperature in enumerate([0.6, 0.7, 0.8, 0.9, 1.3, 100.0] * 3):
        asked = {"temperature": 0.0 if variant == GREEDY else temperature, "seed": i}
        penalties = {"repetition_penalty": 1.13, "frequency_penalty": 0.213} if variant == FULL else {}
        logits = [rng.normal(size=W).astype(np.float32) * 5 for _ in range(count)]
        rows = [_row(x, **(asked | penalties | filters[(i + j) % len(filters)])) for j, x in enumerate(logits)]
        assert _tokens(variant, rows) == [int(r.apply_adjustments().argmax()) for r in rows]


@settings(deadline=None, max_examples=60)
@given(st.sampled_from([0.6, 0.7, 1.0, 1.3]), st.integers(0, 2**32 - 1))
@example(1.0, 0)
def test_of_two_equal_maxima_a_min_p_of_one_keeps_both(temperature, seed):
    logits = _two_best(np.random.default_rng(seed))
    row = _row(logits, temperature=temperature, min_p=1.0)
    _, _, after = _inside(*_states([row]), logits[None])
    np.testing.assert_array_equal(np.asarray(after)[0], logits == 16.25)


_BOUNDS = {
    "temperature": st.sampled_from([0.0, 1e-5, 1.0, 100.0]),
    "top_p": st.sampled_from([1e-300, 1.0]),
    "min_p": st.sampled_from([0.0, 1.0]),
    "repetition_penalty": st.sampled_from([MIN_REPETITION_PENALTY, 1.0, MAX_REPETITION_PENALTY]),
    "presence_penalty": st.sampled_from([-2.0, 0.0, 2.0]),
    "frequency_penalty": st.sampled_from([-2.0, 0.0, 2.0]),
    "logit_bias": st.dictionaries(st.integers(0, W - 1), st.sampled_from([-100.0, 100.0]), max_size=PADDING),
}


@settings(deadline=None, max_examples=100)
@given(_batches(_BOUNDS), st.sampled_from([0.0, 1e-36, 1.0, 1e4, 1e30, 1e36]), st.sampled_from([0, 1, 163_840]))
def test_no_accepted_parameter_makes_a_finite_logit_infinite(rows, size, count):
    """Logits up to 1e36 stay finite, and adjusted ones are right to 4e-7 of the greatest term."""
    rows = [dataclasses.replace(r, logits=np.clip(r.logits / 16, -1, 1) * np.float32(size)) for r in rows]
    state, adjust = _states(rows)
    adjust = dataclasses.replace(adjust, counts=adjust.counts * count)
    logits = np.stack([r.logits for r in rows])
    apply_adjustments, before, after = map(np.asarray, _inside(state, adjust, logits))
    assert np.isfinite(apply_adjustments).all() and (before.max(axis=1) == 1).all() and (after.max(axis=1) == 1).all()
    for row, got in zip(rows, apply_adjustments, strict=True):
        expected = dataclasses.replace(row, answer=row.answer * min(count, 1)).apply_adjustments()
        penalty = row.sampling.frequency_penalty * (count - 1) * np.bincount(np.array(row.answer, int), minlength=W)
        scale = (abs(row.logits) + 100) * 100 + abs(penalty) + 10
        np.testing.assert_array_less(abs(got - (expected - penalty * (count > 1))), 4e-7 * scale)
    assert NOT_FINITE not in _tokens(FULL, rows)


@pytest.mark.parametrize(
    ("field", "accepted", "refused"),
    [
        ("repetition_penalty", (0.01, 100.0), (1e-38, 0.00999, 0.0, -1.0, 100.1, float("nan"), float("inf"))),
        ("temperature", (0.0, 1e-300, 100.0), (-1e-300, 100.1, float("nan"), float("inf"))),
        ("top_p", (1e-300, 1.0), (0.0, 1.0000001, float("nan"))),
        ("min_p", (0.0, 1.0), (-1e-300, 1.0000001, float("nan"))),
        ("presence_penalty", (-2.0, 2.0), (-2.1, 2.1, float("nan"))),
        ("frequency_penalty", (-2.0, 2.0), (-2.1, 2.1, float("nan"))),
    ],
)
def test_bounds_name_the_field_and_what_it_may_be(field, accepted, refused):
    for value in accepted:
        SamplingParams(**{field: value})
    for value in refused:
        with pytest.raises(ValueError, match=rf"^{field}: .* is not between [-0-9.]+ .*and {accepted[-1]}$"):
            SamplingParams(**{field: value})


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_forbidden_token_does_not_hide_that_the_model_has_failed(value):
    row = _row(temperature=1.0, min_tokens=1, stop_token_ids=(5,))
    assert _tokens(FULL, [row])[0] not in (5, NOT_FINITE)
    row.logits[5] = value
    assert _tokens(FULL, [row]) == [NOT_FINITE]


@settings(deadline=None, max_examples=40)
@given(st.lists(_rows(_GREEDY | _EXACT), min_size=3, max_size=3), st.integers(0, 2**32 - 1), st.data())
def test_a_row_of_several_tokens_counts_those_it_accepts(rows, seed, data):
    """Rows with drafts get the tokens, and leave the counts, of steps of one token each."""
    count, slots = 3, np.arange(3, dtype=np.int32)
    logits = np.random.default_rng(seed).integers(-64, 64, (3, count, W)).astype(np.float32) / 4
    state, adjust = _states(rows)
    singles, counts = [], [adjust.counts]
    one, its_adjust = state, adjust
    for i in range(count):
        one, its_adjust, tokens = _sampler(FULL)(one, its_adjust, logits[:, i : i + 1], slots)
        singles.append(np.asarray(tokens)[:, 0])
        counts.append(np.asarray(its_adjust.counts))
    right = np.array(data.draw(st.lists(st.integers(0, count - 1), min_size=3, max_size=3)))
    drafts, missing = np.zeros((3, count), np.int32), data.draw(st.booleans())
    for i in range(1, count):
        drafts[:, i] = np.where(i <= right, singles[i - 1], NO_DRAFT if missing else (singles[i - 1] + 1) % W)
    several = dataclasses.replace(state, tokens=drafts)
    _, after, tokens = _sampler(FULL)(several, adjust, logits, slots)
    expected = np.where(
        np.arange(count) <= right[:, None], np.stack(singles, axis=1), UNDRAFTED if missing else NOTHING
    )
    np.testing.assert_array_equal(tokens, expected)
    for row, accepted in enumerate(right + 1):
        np.testing.assert_array_equal(np.asarray(after.counts)[row], counts[accepted][row])


_SETTINGS = [
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "min_p": 0.05},
    {"temperature": 100.0, "top_k": 7},
    {"temperature": 2.0, "top_p": 0.95, "repetition_penalty": 1.3, "presence_penalty": 0.5, "logit_bias": {3: 4.0}},
]


@pytest.mark.parametrize("params", _SETTINGS, ids=lambda params: "-".join(params))
def test_draws_follow_the_distribution(params):
    """Pearson's chi-square of 8,000 draws with the seeds 0 to 7,999 stays below its 99.9 % quantile."""
    row = dataclasses.replace(_row(np.random.default_rng(8).normal(size=W).astype(np.float32), **params), answer=[3, 5])
    state, adjust = _states([row] * 8000)
    state.controls[:, -3] = np.arange(8000)  # Field.SEED_LOW
    logits = np.tile(row.logits, (8000, 1, 1))
    _, _, tokens = _sampler(FULL)(state, adjust, logits, np.arange(8000, dtype=np.int32))
    x = row.apply_adjustments()
    expected = np.where(distribution.support(x, row.sampling), distribution.weights(x, row.sampling.temperature), 0)
    expected *= 8000 / expected.sum()
    observed = np.bincount(np.asarray(tokens)[:, 0], minlength=W)
    assert (expected[observed > 0] > 0).all()
    often = expected > 5
    observed = np.append(observed[often], observed[~often].sum())
    expected = np.append(expected[often], expected[~often].sum())
    statistic = ((observed - expected) ** 2 / np.maximum(expected, 1e-9)).sum()
    assert statistic < distribution.chi_square_bound(len(expected) - 1)
