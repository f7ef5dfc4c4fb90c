"""Tokens of running requests: what is read is what was noted, wherever pages and parts begin."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv3.scheduler.batch_slots import History

NUM_SLOTS = 3
STEP = st.tuples(st.integers(1, 8), st.lists(st.integers(0, 8), min_size=NUM_SLOTS, max_size=NUM_SLOTS))


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 1100), min_size=NUM_SLOTS, max_size=NUM_SLOTS),
    steps=st.lists(st.tuples(STEP, st.integers(1, 90)), min_size=1, max_size=8),
    again=st.integers(0, NUM_SLOTS - 1),
    data=st.data(),
)
def test_what_is_read_is_what_was_noted(prompts, steps, again, data) -> None:
    """Rows of several tokens are noted whole; those not accepted are written over. A slot is used again."""
    history, tokens = History(NUM_SLOTS), iter(range(10**9))

    def enter(slot: int, count: int) -> list[int]:
        begun = [next(tokens) for _ in range(count)]
        history.enter(slot, np.array(begun, np.int32))
        return begun

    expected = [enter(slot, count) for slot, count in enumerate(prompts)]
    for (width, accepted), times in steps:
        counts = [min(count, width) for count in accepted]
        slots = np.array([slot for slot in range(NUM_SLOTS) if counts[slot]], np.int64)
        for _ in range(times if len(slots) else 0):
            rows = np.array([[next(tokens) for _ in range(width)] for _ in slots], np.int32)
            before = np.array([len(expected[slot]) for slot in slots])
            history.note(slots, before, before + [counts[slot] for slot in slots], rows)
            for slot, row in zip(slots.tolist(), rows.tolist(), strict=True):
                expected[slot] += row[: counts[slot]]
    history.leave(again)
    expected[again] = enter(again, 70)
    for slot, known in enumerate(expected):
        start = data.draw(st.integers(0, len(known)))
        stop = data.draw(st.integers(start, len(known)))
        assert history.read(slot, start, stop).tolist() == known[start:stop]
        assert history.read(slot, 0, len(known)).tolist() == known
