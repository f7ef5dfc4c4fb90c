"""The search of orders of a decode layer: it yields possible orders and counts waits."""

import itertools

import pytest

from benchmarks.overlap_orders import CHAIN, SERVED, layer_seconds, orders
from tools.plan.roofline import HOOK_S, TRANSFER_S


def is_possible(order) -> bool:
    """Whether each micro-batch passes all stages once, in cyclic order except for the shared expert."""
    for number in (0, 1):
        chain = [name for name, of in order if of == number and name != "shared"]
        first = CHAIN.index(chain[0])
        if tuple(chain) != CHAIN[first:] + CHAIN[:first] or order.count(("shared", number)) != 1:
            return False
    return True


def test_orders_are_possible_and_differ() -> None:
    assert is_possible(SERVED)
    some = list(itertools.islice(orders(), 0, None, 50))
    assert all(map(is_possible, some))
    assert len(set(some)) > 300


@pytest.mark.parametrize(("work", "waited"), [(1.0, 0.0), (0.25, 0.75)])
def test_a_transfer_costs_its_exposed_time(work: float, waited: float) -> None:
    order = (("dispatch>", 0), ("core", 1), ("dispatch<", 0))
    seconds = layer_seconds(order, {"dispatch": 1.0 - TRANSFER_S, "core": work})
    assert seconds == pytest.approx(work + waited + HOOK_S)
