"""Ends of prompts wait for each other on a decode instance: not long, and not for nothing."""

from hypothesis import given
from hypothesis import strategies as st

from dsv3.scheduler.balance import MOST_STEPS, PrefillBatching


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 20_000)), max_size=60))
def test_waiting_is_bounded_and_never_costs_more_than_it_saves(steps):
    gathering, waits, waited = PrefillBatching(), 0, 0
    for prompts, running in steps:
        if gathering.waits(prompts, running):
            waits, waited = waits + 1, waited + prompts
            assert waits <= MOST_STEPS and waited < running / 2
        else:
            waits = waited = 0


def test_who_runs_alone_waits_for_nobody_and_many_share_a_program():
    assert not PrefillBatching().waits(1, 0) and not PrefillBatching().waits(1, 2)
    gathering = PrefillBatching()
    programs = sum(not gathering.waits(12, 13_000) for _ in range(90))
    assert programs == 90 // (MOST_STEPS + 1)
