"""What counts say per second; every number of a dashboard comes from here."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv3.server.serving import metrics_history
from dsv3.server.serving.metrics import SECONDS, Metrics
from dsv3.server.serving.metrics_history import KEPT_S, MetricsHistory, quantiles

START = 1_700_000_000.0


def filled(seconds: int, each=lambda metrics, i: None, stats=lambda i: {}) -> MetricsHistory:
    """A history of so many seconds."""
    metrics = Metrics("m")
    kept = MetricsHistory(metrics)
    for i in range(seconds):
        each(metrics, i)
        metrics.update(stats(i))
        kept.note(START + i + 0.3)
    return kept


def test_rates_are_per_second() -> None:
    def work(metrics: Metrics, i: int) -> None:
        metrics.add("generation_tokens", 50)
        metrics.finished("stop" if i % 2 else "length")

    series = filled(20, work, lambda i: {"steps": 4 * i, "host_time_sum": 0.002 * i}).series()
    assert series["generation_tokens_per_second"][1:] == [50] * 19 and math.isnan(series["requests_per_second"][0])
    assert series["requests_per_second"][10:] == [1] * 10
    assert series["steps_per_second"][-1] == 4
    assert series["host_seconds_per_step"][-1] == pytest.approx(0.0005)


def test_a_second_has_one_row() -> None:
    kept = MetricsHistory(Metrics("m"))
    for now in (START, START + 0.1, START + 0.95, START + 1.05, START + 1.0, START + 7):
        kept.note(now)
    assert kept.series()["time"] == [START, round(START + 1.05, 1), START + 7]


def test_what_a_server_does_not_have_is_left_out() -> None:
    assert {"acceptance", "hits_host", "experts_balancedness"}.isdisjoint(filled(3).series())
    series = filled(3, stats=lambda i: {"draft_num_drafts": 0, "draft_num_draft_tokens": 0}).series()
    assert all(map(math.isnan, series["acceptance"]))


def test_shares_are_of_what_happened_lately() -> None:
    """A server that found nothing for an hour and everything since shows everything."""

    def stats(i: int) -> dict[str, float]:
        found = max(0, i - 60)
        drafts = {"draft_num_drafts": i, "draft_num_draft_tokens": 4 * i, "draft_num_accepted_tokens": i}
        tier = {"pages_tiers_host_hits": 20 * i}
        return {"prefix_queries": 100 * i, "prefix_hits": 80 * found, **tier, **drafts}

    series = filled(120, stats=stats).series()
    assert (series["hits_device"][50], series["hits_device"][-1]) == (0, 0.8)
    assert (series["hits_host"][-1], series["acceptance"][-1]) == (0.2, 0.25)


def test_an_engine_that_was_not_ready_had_counted_nothing() -> None:
    """Shares are known from its first request on."""
    stats = {"prefix_queries": 100, "prefix_hits": 50, "steps": 10}
    series = filled(8, stats=lambda i: stats if i > 5 else {}).series()
    assert series["hits_device"][-1] == 0.5 and series["steps_per_second"][-1] == 2
    assert all(map(math.isnan, series["hits_device"][:6]))


def test_the_history_is_bounded_and_goes_on() -> None:
    kept = filled(KEPT_S + 50, lambda metrics, i: metrics.add("generation_tokens", i))
    series = kept.series()
    assert len(series["time"]) == KEPT_S
    assert series["time"] == sorted(series["time"])
    assert series["generation_tokens_per_second"][-1] == KEPT_S + 49 - 2
    later = kept.series(series["time"][-4])
    assert later["time"] == series["time"][-3:]
    for name in ("generation_tokens_per_second", "requests_per_second"):
        assert later[name] == series[name][-3:]
    assert kept.series(START + 10**6)["time"] == []
    assert MetricsHistory(Metrics("m")).series()["time"] == []


def test_percentiles_of_latencies() -> None:
    def work(metrics: Metrics, i: int) -> None:
        for _ in range(9):
            metrics.observe("ttft", 0.02)
        metrics.observe("ttft", 3.0)

    series = filled(40, work).series()
    assert 0.01 < series["ttft_p50"][-1] <= 0.025
    assert 2.5 < series["ttft_p99"][-1] <= 5
    assert all(map(math.isnan, series["itl_p50"]))


@given(st.lists(st.floats(0.0, 5000.0), min_size=1, max_size=50), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_percentile_lies_in_the_bucket_of_the_true_one(values: list[float], share: float) -> None:
    counts = np.bincount(np.searchsorted(SECONDS, values), minlength=len(SECONDS) + 1)
    [found] = quantiles(counts[None].astype(float), SECONDS, share)
    true = sorted(values)[math.ceil(share * len(values)) - 1]
    place = np.searchsorted(SECONDS, true)
    assert (0.0, *SECONDS)[place] <= found <= (*SECONDS, SECONDS[-1])[place]


def test_the_columns_are_those_of_the_metrics() -> None:
    """A renamed counter would leave a curve empty for ever."""
    totals, buckets = Metrics("m").counted()
    assert set(metrics_history._TOTALS) <= set(totals) and set(metrics_history._LATENCIES) <= set(buckets)
