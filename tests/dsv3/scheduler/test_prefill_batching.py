"""Last chunks of prompts wait for each other on a decode instance, within bounds."""

from hypothesis import given
from hypothesis import strategies as st

from dsv3.scheduler.balance import MOST_STEPS, PrefillBatching


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 20_000)), max_size=60))
def test_waiting_is_bounded_and_never_costs_more_than_it_saves(steps):
    batching, should_wait, waited = PrefillBatching(), 0, 0
    for prompts, running in steps:
        if batching.should_wait(prompts, running):
            should_wait, waited = should_wait + 1, waited + prompts
            assert should_wait <= MOST_STEPS and waited < running / 2
        else:
            should_wait = waited = 0


def test_few_running_requests_do_not_wait_and_many_share_a_program():
    assert not PrefillBatching().should_wait(1, 0) and not PrefillBatching().should_wait(1, 2)
    batching = PrefillBatching()
    programs = sum(not batching.should_wait(12, 13_000) for _ in range(90))
    assert programs == 90 // (MOST_STEPS + 1)
