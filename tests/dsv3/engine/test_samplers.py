"""Which sampler serves a step, and that adaptive ones sample what the others do."""

import functools
import itertools
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv3.engine.device import sampling
from dsv3.engine.jobs.sample import Sampler, sampler_for, samplers
from dsv3.scheduler.sequence import DRAWN, FILTERED, FULL, GREEDY

VARIANTS = (GREEDY, DRAWN, FILTERED, FULL)


def layout(platform: str, takes_grammars: bool = True, logprobs_mode: str = "raw_logprobs") -> SimpleNamespace:
    cfg = SimpleNamespace(logprobs_mode=logprobs_mode, enable_return_sampling_mask=False)
    return SimpleNamespace(platform=platform, takes_grammars=takes_grammars, cfg=cfg)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_every_step_has_a_sampler_that_was_compiled(platform: str) -> None:
    for grammars, variant in itertools.product((False, True), VARIANTS):
        for is_constrained in {False, grammars}:
            found = sampler_for(layout(platform, grammars), variant, is_constrained)
            assert found in samplers(layout(platform, grammars))
            assert found.variant >= variant and found.is_constrained >= is_constrained
            assert found.variant >= FILTERED or found.variant == variant or is_constrained


def test_a_gpu_has_one_for_each_need_and_a_cpu_adaptive_ones() -> None:
    assert [sampler_for(layout("cuda"), variant, False) for variant in VARIANTS] == [Sampler(v) for v in VARIANTS]
    assert [sampler_for(layout("cuda"), variant, True).variant for variant in VARIANTS] == [
        DRAWN,
        DRAWN,
        FILTERED,
        FULL,
    ]
    assert sampler_for(layout("cpu"), GREEDY, False) == Sampler(GREEDY)
    assert {sampler_for(layout("cpu"), v, False).variant for v in (DRAWN, FILTERED)} == {FILTERED}
    assert {sampler_for(layout("cpu"), v, True) for v in VARIANTS} == {
        Sampler(FULL, is_constrained=True, adaptive=True)
    }
    assert not any(each.is_constrained for each in samplers(layout("cpu", takes_grammars=False)))


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_processed_logprobs_come_from_samplers_of_their_own(platform: str) -> None:
    raw, processed = layout(platform), layout(platform, logprobs_mode="processed_logprobs")
    assert not any(each.returns_details for each in samplers(raw))
    for variant, is_constrained in itertools.product(VARIANTS, (False, True)):
        assert sampler_for(processed, variant, is_constrained) == sampler_for(raw, variant, is_constrained)
        found = sampler_for(processed, variant, is_constrained, returns_details=True)
        assert found in samplers(processed) and found.variant >= max(variant, DRAWN)
        assert found.returns_details and found.is_constrained >= is_constrained


ASKED = st.tuples(
    st.sampled_from([0.0, 0.5, 1.0, 3.0]),  # temperature
    st.sampled_from([1.0, 1.0, 0.9, 0.3]),  # top_p
    st.sampled_from([0.0, 0.0, 0.2]),  # min_p
    st.sampled_from([0, 0, 1, 7]),  # top_k
)


@functools.cache
def sampler(**how: bool):
    return jax.jit(functools.partial(sampling.sample, **how))


@settings(deadline=None)
@given(st.lists(ASKED, min_size=3, max_size=3), st.integers(0, 2**32 - 1))
def test_adaptive_samplers_change_no_token(rows: list[tuple[float, float, float, int]], seed: int) -> None:
    logits = np.random.default_rng(seed).standard_normal((3, 150), np.float32) * 3
    temperature, top_p, min_p, top_k = (np.array(column) for column in zip(*rows, strict=True))
    seeds = np.array([[seed, row] for row in range(3)], np.uint32)
    floats = (each.astype(np.float32) for each in (temperature, top_p, min_p))
    controls = sampling.Controls(*floats, top_k.astype(np.int32), seeds, np.arange(3, dtype=np.int32))
    found = sampler(adaptive=True)(logits, controls)
    np.testing.assert_array_equal(found, sampler(filters=True)(logits, controls))
    if not (min_p.any() or top_k.any() or (top_p < 1).any()):
        np.testing.assert_array_equal(found, sampler(filters=False)(logits, controls))
