"""The comparison of transports at toy size: every transport has a row, and a sum that differs from ring's is seen."""

import sys

import pytest

from benchmarks.gpu import transports
from benchmarks.record import Report
from sharding.experts.exchange import Exchange
from sharding.experts.transport_kind import TransportKind
from tests.sharding import nccl_ep


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "HIDDEN", 256)
    monkeypatch.setattr(transports, "EXPERTS", 16)
    monkeypatch.setattr(transports, "TOP_K", 4)
    monkeypatch.setattr(transports, "PHASES", (("decode", 16),))
    monkeypatch.setattr(transports, "LAYERS", {"decode": 2})


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, dict[str, list]]:
    monkeypatch.setattr(sys, "argv", ["transports", *arguments])
    report = Report()
    status = transports.main(report)
    [table] = report.tables
    return status, {str(row[3]): row for row in table.rows}


def test_every_transport_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl_ep.use_stand_in(monkeypatch)
    status, rows = run(monkeypatch, "--nodes=2")
    assert status == 0
    assert list(rows) == [kind.value for kind in TransportKind]
    for name in ("ring", "all_to_all", "hierarchical", "nccl_ep"):
        assert rows[name][4] == "yes" and rows[name][5] > 0 and rows[name][8] is None
    assert rows["ragged"][4] is None and "ragged-all-to-all" in rows["ragged"][8]


def test_a_sum_that_differs_from_rings_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    finish = Exchange.finish

    def wrong(self: Exchange, handle):
        sums, overflows = finish(self, handle)
        return sums.at[3, 5].add(1), overflows

    monkeypatch.setattr(Exchange, "finish", wrong)
    status, rows = run(monkeypatch, "--only=all_to_all")
    assert status == 1
    assert {name: row[4] for name, row in rows.items()} == {"ring": "yes", "all_to_all": "NO"}


def test_a_transport_that_these_devices_cannot_have_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    _, rows = run(monkeypatch, "--only=hierarchical")
    assert "needs 2 or more nodes" in rows["hierarchical"][8]
