"""The load of an instance's ranks stays even under random traffic, through the real scheduler and planners."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv3.scheduler.cost import imbalance, prefill_cost
from tests.dsv3.engine.test_scheduler import Driver

LONGEST = 448


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), ranks=st.integers(2, 6), mean=st.integers(20, 150))
def test_backlogs_and_steps_are_even_while_prompts_wait(seed, ranks, mean):
    """No rank idles while others have a backlog, so all compute as many tokens; backlogs differ by a prompt."""
    drawn = np.random.default_rng(seed)
    driver = Driver(num_ranks=ranks, max_num_seqs=64, num_pages=600, role="prefill")
    for i in range(20 * ranks):
        driver.add(str(i), int(np.clip(drawn.exponential(mean), 1, LONGEST)), max_tokens=1)
    driver.step()
    backlog = driver.scheduler.balancer.backlog
    assert backlog.max() - backlog.min() <= 2 * prefill_cost(0, LONGEST)
    while (waiting := [sum(len(s.tokens) - s.prefilled for s in mine) for mine in driver.scheduler.prefilling]) and all(
        tokens >= driver.cfg.max_num_batched_tokens for tokens in waiting
    ):
        plan, _ = driver.step()
        tokens = np.array([sum(c.stop - c.start for c in mine) for mine in plan.prefill.context.chunks])
        assert imbalance(tokens) <= 1.05 or max(map(len, plan.prefill.context.chunks)) == 8, "rows were the limit"


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6), ranks=st.integers(2, 6))
def test_cache_and_requests_are_even_while_requests_come_and_go(seed, ranks):
    drawn = np.random.default_rng(seed)
    driver = Driver(num_ranks=ranks, max_num_seqs=64, num_pages=600, max_num_batched_tokens=8192)
    names = iter(range(10**6))
    worst = []
    for step in range(120):
        for _ in range(40 * ranks - len(driver.scheduler.sequences)):
            length = int(np.clip(drawn.exponential(60), 1, 300))
            driver.add(f"{seed} {next(names)}", length, max_tokens=int(drawn.integers(1, 120)))
        driver.step()
        slots = driver.scheduler.slots
        if step >= 40:
            worst.append((imbalance(slots.num_tokens()), imbalance(slots.running)))
    held, running = np.mean(worst, axis=0)
    assert held <= 1.15 and running <= 1.15
