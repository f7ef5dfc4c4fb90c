"""Statistics per carrier: totals, a log line per minute, and `/metrics`."""

import dataclasses
import logging

import pytest

from dsv3.config.options import EngineOptions
from dsv3.engine.jobs.pages import PageStats
from dsv3.kv_cache.tiers import counts
from dsv3.kv_cache.tiers.counts import CarrierStats, TierCounts, total
from dsv3.scheduler.request import EngineStats
from dsv3.server.engine.process import numeric_stats
from dsv3.server.serving.metrics import Metrics


def test_totals_and_rates_per_carrier(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    caplog.set_level(logging.INFO)
    time = [0.0]
    carried = CarrierStats(lambda: time[0])
    carried.record("a:1", "nixl", 0, 0.0)
    assert not caplog.messages, "no page has arrived"
    carried.record("a:1", "nixl", 4_000_000, 0.5)
    carried.record("a:1", "nixl", 1_000_000, 0.5)
    carried.record("a:1", "sockets", 3_000_000, 3.0)
    assert caplog.messages == ["pages of a:1 come by nixl: 8 MB/s", "pages of a:1 come by sockets: 1 MB/s"]
    time[0] = 61.0
    carried.record("a:1", "nixl", 5_000_000, 1.5)
    assert caplog.messages[2:] == ["pages of a:1 come by nixl: 3 MB/s"], "the mean since the last line"
    carried.record_failure("nixl")
    found = carried.with_carriers(TierCounts(hits=3))
    assert (found.hits, found.carried_bytes, found.carried_seconds) == (3, [3_000_000, 10_000_000], [3.0, 2.5])
    assert total([found, found]).carrier_failures == [0, 2]
    monkeypatch.setattr(counts, "_MAX_ROUTES", 2)
    for i in range(5):
        carried.record(f"b:{i}", "sockets", 1, 1.0)
    assert len(carried._routes) == 2


def test_metrics_have_the_label_carrier() -> None:
    metrics = Metrics("m")
    stats = EngineStats(3, 1, 7, 0.5, 0, 0, 0, 0, 10, 20, 30, 0.1, (1, 2))
    peer = TierCounts(carried_bytes=[1, 2], carried_seconds=[0.5, 0.25], carrier_failures=[0, 4])
    metrics.update(numeric_stats(dataclasses.replace(stats, jobs={"pages": PageStats(0, {"host": TierCounts()})})))
    assert b"kv_transfer" not in metrics.text(), "this instance does not fetch"
    metrics.update(numeric_stats(dataclasses.replace(stats, jobs={"pages": PageStats(0, {"peer": peer})})))
    for name, by_sockets, by_nixl in (("bytes", 1, 2), ("seconds", 0.5, 0.25), ("failures", 0, 4)):
        for carrier, value in (("sockets", by_sockets), ("nixl", by_nixl)):
            labels = {"model_name": "m", "carrier": carrier}
            assert metrics.registry.get_sample_value(f"dsv3:kv_transfer_{name}_total", labels) == value


@pytest.mark.parametrize("carrier", ["auto", "nixl"])
def test_a_carrier_needs_a_transfer_key(carrier: str) -> None:
    with pytest.raises(ValueError, match=f"transfer_carrier: '{carrier}' needs transfer_key_file"):
        EngineOptions(transfer_carrier=carrier)
    EngineOptions(transfer_carrier=carrier, transfer_key_file="k", kv_offloading_size=1.0)
