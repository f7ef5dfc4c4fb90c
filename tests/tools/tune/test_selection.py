"""Choices among measured candidates: a default stays unless another is consistently faster."""

import numpy as np
import pytest

from tools.tune.selection import choose_sizes, fastest, padding_loss, smallest_as_fast, timed_in_turns


def test_candidates_are_timed_in_turns_and_each_round_begins_with_another() -> None:
    called: list[int] = []
    times = timed_in_turns([lambda i=i: called.append(i) or float(i) for i in range(3)], 3)
    assert called == [0, 1, 2, 1, 2, 0, 2, 0, 1]
    assert times.tolist() == [[0, 1, 2]] * 3


def test_what_is_faster_only_now_and_then_replaces_no_default() -> None:
    slowed = np.array([[1.0, 0.9], [1.0, 0.9], [1.0, 1.1], [1.0, 1.2], [1.0, 0.9]])
    assert fastest(slowed, 0) == (0, 1.0)
    slowed[3, 1] = 0.9
    assert fastest(slowed, 0) == (1, pytest.approx(1 / 0.9))
    assert fastest(np.array([[1.0, 0.98]] * 5), 0) == (0, 1.0)  # consistently, but by less than the least gain


def test_the_smallest_chunk_that_is_as_fast_wins_and_a_faster_one_before_it() -> None:
    assert smallest_as_fast(np.array([[1.0, 1.01, 1.5]] * 5)) == (1, pytest.approx(1 / 1.01))
    assert smallest_as_fast(np.array([[1.0, 1.1, 1.2]] * 5)) == (0, 1.0)
    assert smallest_as_fast(np.array([[1.0, 0.8, 1.0]] * 5)) == (1, pytest.approx(1.25))


def test_sizes_where_padding_costs_time_are_compiled_and_no_others() -> None:
    candidates = [1, 2, 4, 8, 16, 32]
    flat = np.array([[1.0, 1.0, 1.0, 1.0, 4.0, 8.0]] * 5)  # up to 8 rows take as long as one
    assert padding_loss((32,), candidates, flat[0]) == pytest.approx(8 ** (4 / 6) * 2 ** (1 / 6))
    chosen, gain = choose_sizes(candidates, flat, default=(1, 4, 16, 32), required={1, 32})
    assert chosen == (1, 8, 16, 32) and gain == pytest.approx(4 ** (1 / 6))
    same = np.ones((5, 6))
    assert choose_sizes(candidates, same, (1, 4, 16, 32), {1, 32}) == ((1, 4, 16, 32), 1.0)


def test_a_required_size_is_always_compiled() -> None:
    linear = np.array([[1.0, 2.0, 4.0, 8.0]] * 3)
    chosen, _ = choose_sizes([1, 2, 4, 8], linear, default=(8,), required={2, 8})
    assert {2, 8} <= {*chosen}
