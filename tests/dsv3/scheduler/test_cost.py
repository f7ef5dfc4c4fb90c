"""The cost model, and the balance of the ranks when each request goes where it costs least."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.deepseek_v3 import DEEPSEEK_V3
from dsv3.config.model import ModelConfig
from dsv3.scheduler.cost import KEYS_PER_TOKEN, Loads, affordable, costs, imbalance, keys_per_token, prefill_cost

TOKENS = st.integers(0, 200_000)


def test_a_token_of_deepseek_v3_costs_twice_behind_3266_others() -> None:
    """DeepSeek's profile: 9.34 ps per key of a token's core attention, 30.4 us for its own products."""
    keys = keys_per_token(DEEPSEEK_V3)
    assert keys == pytest.approx(KEYS_PER_TOKEN, rel=1e-3) and keys == pytest.approx(30.4e-6 / 9.34e-9, rel=0.01)
    assert prefill_cost(3266, 3267, keys) == pytest.approx(2, rel=1e-3)


def test_keys_per_token_is_at_least_one() -> None:
    dimensions = dict.fromkeys(
        ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim",
         "qk_rope_head_dim", "v_head_dim", "intermediate_size", "moe_intermediate_size", "n_routed_experts",
         "num_experts_per_tok"), 1,
    )  # fmt: skip
    assert keys_per_token(ModelConfig(**dimensions)) >= 1


@settings(deadline=None)
@given(start=TOKENS, count=st.integers(0, 5000), keys=st.floats(1, 1e5))
def test_a_chunk_costs_what_its_parts_cost(start: int, count: int, keys: float) -> None:
    middle = start + count // 3
    parts = prefill_cost(start, middle, keys) + prefill_cost(middle, start + count, keys)
    assert prefill_cost(start, start + count, keys) == pytest.approx(parts)


@settings(deadline=None)
@given(cost=st.floats(0, 1e6), start=TOKENS, keys=st.floats(10, 1e5))
def test_affordable_is_the_inverse_of_the_cost(cost: float, start: int, keys: float) -> None:
    count = affordable(cost, start, keys)
    assert prefill_cost(start, start + count, keys) <= cost + 1e-6 * cost + 1e-3
    assert prefill_cost(start, start + count + 2, keys) > cost


def test_a_hit_outweighs_a_backlog_of_its_own_size() -> None:
    def best_rank(backlog: int) -> int:
        loads = Loads(np.array([backlog, 0]), np.zeros(2), np.zeros(2))
        own = np.array([prefill_cost(3000, 4000), prefill_cost(0, 4000)])
        return int(costs(loads, own, 4000, decodes=False).argmin())

    worth = prefill_cost(0, 3000)
    assert best_rank(round(worth) - 10) == 0 and best_rank(round(worth) + 10) == 1


def test_a_long_request_prefers_less_cache_and_a_short_one_fewer_requests() -> None:
    loads = Loads(np.zeros(2), np.array([50_000, 40_000]), np.array([10, 12]))
    assert costs(loads, 0.0, 20_000).argmin() == 1
    assert costs(loads, 0.0, 500).argmin() == 0


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 500), min_size=1, max_size=200), ranks=st.integers(1, 9))
def test_backlogs_differ_by_the_longest_prompt_at_most(lengths: list[int], ranks: int) -> None:
    backlog, none = np.zeros(ranks), np.zeros(ranks)
    for length in lengths:
        cost = prefill_cost(0, length)
        backlog[costs(Loads(backlog, none, none), cost, length, decodes=False).argmin()] += cost
    assert backlog.max() - backlog.min() <= prefill_cost(0, max(lengths)) + 1e-6


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 500), min_size=1, max_size=400), ranks=st.integers(2, 9))
def test_cache_and_requests_stay_even_together(lengths: list[int], ranks: int) -> None:
    """Any lengths, also in an adversarial order: so the bound is a few requests, not one."""
    cached, running = np.zeros(ranks), np.zeros(ranks)
    for length in lengths:
        rank = costs(Loads(np.zeros(ranks), cached, running), 0.0, length).argmin()
        others = np.arange(ranks) != rank
        assert not ((cached < cached[rank]) & (running < running[rank]) & others).any(), "another rank had less of both"
        cached[rank] += length
        running[rank] += 1
    mean = cached.sum() / running.sum()
    assert cached.max() - cached.mean() <= 2 * max(lengths) + mean
    assert running.max() - running.mean() <= 3 * max(lengths) / mean + 2


def test_no_load_is_balanced() -> None:
    assert imbalance(np.zeros(4)) == imbalance(np.zeros(0)) == imbalance(np.ones(3)) == 1
    assert imbalance(np.array([3, 1])) == 1.5
