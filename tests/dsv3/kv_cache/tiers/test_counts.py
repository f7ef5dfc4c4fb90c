"""What pages came by is counted, told once per minute, and on `/metrics`."""

import dataclasses
import logging

import pytest

from dsv3.config.options import EngineOptions
from dsv3.engine.jobs.pages import PageStats
from dsv3.kv_cache.tiers import counts
from dsv3.kv_cache.tiers.counts import Carried, TierCounts, total
from dsv3.scheduler.request import EngineStats
from dsv3.server.engine.process import _numbers
from dsv3.server.serving.metrics import Metrics


def test_totals_and_rates_per_carrier(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    caplog.set_level(logging.INFO)
    time = [0.0]
    carried = Carried(lambda: time[0])
    carried.note("a:1", "nixl", 0, 0.0)
    assert not caplog.messages, "nothing has come"
    carried.note("a:1", "nixl", 4_000_000, 0.5)
    carried.note("a:1", "nixl", 1_000_000, 0.5)
    carried.note("a:1", "sockets", 3_000_000, 3.0)
    assert caplog.messages == ["pages of a:1 come by nixl: 8 MB/s", "pages of a:1 come by sockets: 1 MB/s"]
    time[0] = 61.0
    carried.note("a:1", "nixl", 5_000_000, 1.5)
    assert caplog.messages[2:] == ["pages of a:1 come by nixl: 3 MB/s"], "of all since the last line"
    carried.fail("nixl")
    found = carried.counted(TierCounts(hits=3))
    assert (found.hits, found.carried_bytes, found.carried_seconds) == (3, [3_000_000, 10_000_000], [3.0, 2.5])
    assert total([found, found]).carrier_failures == [0, 2]
    monkeypatch.setattr(counts, "_MOST_WAYS", 2)
    for i in range(5):
        carried.note(f"b:{i}", "sockets", 1, 1.0)
    assert len(carried._ways) == 2


def test_metrics_have_the_label_carrier() -> None:
    metrics = Metrics("m")
    stats = EngineStats(3, 1, 7, 0.5, 0, 0, 0, 0, 10, 20, 30, 0.1, (1, 2))
    peer = TierCounts(carried_bytes=[1, 2], carried_seconds=[0.5, 0.25], carrier_failures=[0, 4])
    metrics.update(_numbers(dataclasses.replace(stats, jobs={"pages": PageStats(0, {"host": TierCounts()})})))
    assert b"kv_transfer" not in metrics.text(), "nobody fetches"
    metrics.update(_numbers(dataclasses.replace(stats, jobs={"pages": PageStats(0, {"peer": peer})})))
    for name, by_sockets, by_nixl in (("bytes", 1, 2), ("seconds", 0.5, 0.25), ("failures", 0, 4)):
        for carrier, value in (("sockets", by_sockets), ("nixl", by_nixl)):
            labels = {"model_name": "m", "carrier": carrier}
            assert metrics.registry.get_sample_value(f"dsv3:kv_transfer_{name}_total", labels) == value


@pytest.mark.parametrize("carrier", ["auto", "nixl"])
def test_a_carrier_is_of_those_who_fetch(carrier: str) -> None:
    with pytest.raises(ValueError, match=f"transfer_carrier: '{carrier}' needs transfer_key_file"):
        EngineOptions(transfer_carrier=carrier)
    EngineOptions(transfer_carrier=carrier, transfer_key_file="k", kv_offloading_size=1.0)
