"""XLA's schedule of an overlapped forward/backward pair, compiled for eight H200s."""

import pytest

from benchmarks.pipeline_overlap import compile_pair, transfers
from sharding.wire.collectives import Overlap, resolve_overlap

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(resolve_overlap("cuda") is not Overlap.HOOKS, reason="jax 0.11 has no collectives in halves"),
]


def test_each_transfer_overlaps_matrix_work_of_the_other_direction() -> None:
    """A layer dispatches rows, ids and weights and combines sums; its backward sends the gradients of two."""
    combine_b, dispatch_f = ("all-gather", "backward", {"forward"}), ("all-gather", "forward", {"backward"})
    dispatch_b, combine_f = ("reduce-scatter", "backward", {"forward"}), ("reduce-scatter", "forward", {"backward"})
    found = [(beside.kind, beside.direction, beside.directions) for beside in transfers(compile_pair())]
    assert found == [combine_b, *[dispatch_f] * 3, *[dispatch_b] * 2, combine_f]
