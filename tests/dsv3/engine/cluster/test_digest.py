"""Digests are equal exactly when the results are, in any order of arrival."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv3.engine.cluster.digest import StepDigests, chained, first_difference, order_digests


def chain(results: list[list[int]]) -> list[bytes]:
    digests = [b""]
    for number, tokens in enumerate(results):
        digests.append(chained(digests[-1], number, [np.array(tokens, np.int32)]))
    return digests[1:]


RESULTS = st.lists(st.lists(st.integers(-1, 5), max_size=3), min_size=1, max_size=5)


@given(RESULTS, st.data())
def test_a_difference_shows_from_its_step_on(results: list[list[int]], data: st.DataObject) -> None:
    step = data.draw(st.integers(0, len(results) - 1))
    other = [[*tokens, 7] if number == step else tokens for number, tokens in enumerate(results)]
    mine, theirs = chain(results), chain(other)
    assert [a == b for a, b in zip(mine, theirs, strict=True)] == [number < step for number in range(len(results))]


@settings(max_examples=60)
@given(st.permutations([(who, number) for who in (0, 1, 2) for number in range(4)]), st.integers(-1, 3))
def test_step_digests_find_the_process_that_differs(order: list[tuple[int, int]], wrong: int) -> None:
    """Process 2 differs in step `wrong`; -1: none does."""
    digests, found = StepDigests([1, 2]), []
    for who, number in order:
        digest = b"other" if who == 2 and number == wrong else b"same"
        found.append(digests.add(who, number, digest))
    assert {f for f in found if f is not None} == ({2} if wrong >= 0 else set())
    if wrong < 0:
        assert digests.overdue(math.inf) is None and not digests._mine and not digests._theirs


def test_step_digests_find_the_late_process() -> None:
    digests = StepDigests([1, 2])
    digests.add(1, 5, b"")
    digests.add(0, 5, b"")
    assert digests.overdue(-math.inf) is None
    assert digests.overdue(math.inf) == (2, 5)
    digests.add(2, 5, b"")
    assert digests.overdue(math.inf) is None


def test_the_first_collective_that_differs_is_found() -> None:
    """Another one, one more or one fewer; programs that only one process can read are ignored."""
    mine = {"a": ["x", "y", "z"], "b": ["x"], "only here": ["x"]}
    assert first_difference(mine, order_digests({"a": ["x", "y", "z"], "b": ["x"], "only there": ["y"]})) is None
    assert first_difference(mine, order_digests({"a": ["x", "z", "y"]})) == ("a", 1)
    assert first_difference(mine, order_digests({"b": ["x", "y"]})) == ("b", 1)
    assert first_difference(mine, order_digests({"a": ["x", "y"]})) == ("a", 2)
