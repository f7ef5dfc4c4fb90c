"""A kernel that sends to its peers compiles for one node (docs/device_transfers.md)."""

import pytest

from benchmarks.gpu.device_transfers import compiled
from sharding.wire.collectives import Overlap, resolve_overlap

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(resolve_overlap("cuda") is not Overlap.HOOKS, reason="written against jax 0.12"),
]


def test_peers_of_a_node_are_stored_to_and_signalled() -> None:
    text, kernel = compiled(1, "gpu")
    assert "all-to-all" not in text
    assert kernel.spill_bytes == 0
    assert "red.release.sys.global" in kernel.ptx and "cp.async.bulk.tensor" in kernel.ptx
