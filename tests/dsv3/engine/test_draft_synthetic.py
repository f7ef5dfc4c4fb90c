"""Synthetic acceptance, for benchmarks only: a coin per seed and position decides which drafts are accepted."""

import jax
import numpy as np
import pytest

from dsv3.engine.device.sampling import Controls, force_acceptance
from dsv3.engine.engine import Engine
from tests.dsv3.engine.driving import request, run
from tests.dsv3.engine.test_draft import PROMPT, make

RATES = [0.75, 0.25]
_overrule = jax.jit(force_acceptance, static_argnames="vocab_size")


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Every second draft of its module is right, which must not matter."""
    return make(2, num_speculative_tokens=2, synthetic_acceptance_rates=RATES)


def accepted(engine: Engine, *requests) -> tuple[dict[str, list[int]], np.ndarray, int]:
    """Texts, drafts accepted by place, and rows."""
    before = engine.stats().jobs["draft"]
    got = run(engine, *requests)
    after = engine.stats().jobs["draft"]
    at = np.subtract(after.num_accepted_tokens_per_pos, before.num_accepted_tokens_per_pos)
    return {name: entry.tokens for name, entry in got.items()}, at, after.num_drafts - before.num_drafts


def test_rates_are_those_requested_whatever_the_drafts(engine: Engine) -> None:
    """Fixed seeds, so a fixed outcome; the bound is four standard deviations of 500 rows."""
    requests = [request(str(i), PROMPT[: 5 + i], seed=i, max_tokens=200, ignore_eos=True) for i in range(5)]
    texts, at, rows = accepted(engine, *requests)
    assert all(len(text) == 200 for text in texts.values()) and rows > 450
    np.testing.assert_allclose(at / rows, RATES, atol=0.08)
    assert engine.stats().pages_in_use == 0


def test_coins_belong_to_seed_and_position(engine: Engine) -> None:
    """The same in a batch and alone, so processes agree. Another seed has other coins."""
    one, other = (
        request(name, PROMPT, seed=seed, max_tokens=80, ignore_eos=True) for name, seed in (("a", 1), ("b", 2))
    )
    texts, _, _ = accepted(engine, one, other)
    alone, at, _ = accepted(engine, request("c", PROMPT, seed=1, max_tokens=80, ignore_eos=True))
    again, at_again, _ = accepted(engine, request("d", PROMPT, seed=1, max_tokens=80, ignore_eos=True))
    assert texts["a"] == alone["c"] == again["d"] != texts["b"]
    assert at.tolist() == at_again.tolist()


def test_how_acceptance_is_forced() -> None:
    """The draft where the coin says so, else any other token; negative values stay."""
    rows = np.arange(64, dtype=np.int32)
    zeros = np.zeros(64, np.float32)
    controls = Controls(zeros, zeros, zeros, rows, np.zeros((64, 2), np.uint32), rows)
    drawn, drafts = np.full(64, 7, np.int32), np.where(rows % 2 == 0, 7, 3).astype(np.int32)

    def overruled(drawn: np.ndarray, drafts: np.ndarray, chance: float) -> np.ndarray:
        return np.asarray(_overrule(drawn, drafts, controls, chance, vocab_size=8))

    always, never, half = (overruled(drawn, drafts, chance) for chance in (1.0, 0.0, 0.5))
    assert (always == drafts).all()
    assert (never == np.where(rows % 2 == 0, 0, 7)).all()
    assert 16 < (half == drafts).sum() < 48
    assert (overruled(drawn * 0 - 2, drafts, 1.0) == -2).all()
    assert (overruled(drawn, drafts * 0 - 1, 1.0) == 7).all()
    assert always.dtype == np.int32
