"""The figures of a load, from records whose times are chosen by hand."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.bench import metrics
from tools.bench.loops import LoopResult
from tools.bench.metrics import Limit, distribution, summarize
from tools.bench.stream import Arrival, Record


def record(index=0, scheduled=0.0, arrivals=((1.0, 1), (1.5, 1), (2.5, 1)), finished=2.6, **fields):
    defaults = {"sent_s": scheduled, "prompt_tokens": 10, "cached_tokens": 4}
    return Record(
        index=index,
        scheduled_s=scheduled,
        finished_s=finished,
        arrivals=tuple(Arrival(*arrival) for arrival in arrivals),
        **(defaults | {"output_tokens": sum(count or 0 for _, count in arrivals)} | fields),
    )


def result(*records, **fields):
    return LoopResult(records, **({"wall_s": 10.0, "cpu_s": 1.0} | fields))


def test_latencies_of_a_request():
    one = record(scheduled=0.25, sent_s=0.5)
    assert one.ttft_s == 0.75
    assert one.inter_token_s() == [0.5, 1.0]
    assert one.tpot_s == 0.75
    assert one.e2e_s == pytest.approx(2.35)


def test_a_chunk_of_several_tokens_gives_its_gap_to_each_of_them():
    one = record(arrivals=((1.0, 2), (2.0, 4)))
    assert one.inter_token_s() == [0.25] * 4
    assert one.tpot_s == 0.25


def test_chunks_without_counts_are_gaps_between_chunks():
    one = record(arrivals=((1.0, None), (2.0, None), (4.0, None)), output_tokens=9)
    assert one.inter_token_s() == [1.0, 2.0]
    assert one.tpot_s == 3 / 8
    assert summarize(result(one))["tokens"]["itl_per"] == "chunk"


@pytest.mark.parametrize("arrivals", [(), ((1.0, 1),), ((1.0, 5),)])
def test_an_answer_of_one_chunk_has_no_inter_token_latency(arrivals):
    one = record(arrivals=arrivals)
    assert one.inter_token_s() == []
    assert one.tpot_s is None
    report = summarize(result(one), [Limit("itl", 1), Limit("tpot", 1)])
    assert report["itl_ms"] is None and report["goodput"]["requests"] == 1


@given(st.lists(st.floats(0, 1e3), min_size=1))
def test_percentiles_are_numpys_and_ordered(seconds):
    found = distribution(seconds)
    assert found["p90"] == pytest.approx(np.percentile(seconds, 90) * 1e3)
    assert found["mean"] == pytest.approx(np.mean(seconds) * 1e3)
    assert found["p50"] <= found["p90"] <= found["p95"] <= found["p99"] <= found["max"]


def test_throughput_counts_completed_requests_from_first_due_to_last_end():
    failed = record(1, scheduled=1.0, finished=5.0, error="timeout", detail="late")
    report = summarize(result(record(0, scheduled=0.0), failed))
    assert report["duration_s"] == 5.0
    assert report["requests"] == {"sent": 2, "completed": 1, "failed": 1}
    assert report["tokens"] == {"input": 10, "input_cached": 4, "output": 3, "itl_per": "token"}
    assert report["throughput"] == {"requests_per_s": 0.2, "output_tokens_per_s": 0.6, "total_tokens_per_s": 2.6}
    assert report["e2e_ms"]["max"] == 2600.0
    assert report["client"]["cpu_fraction"] == 0.1


def test_unknown_counts_give_no_rate_rather_than_a_wrong_one():
    report = summarize(result(record(), record(1, output_tokens=None)))
    assert report["tokens"]["output"] is None
    assert report["throughput"]["output_tokens_per_s"] is None
    assert report["throughput"]["requests_per_s"] > 0


def test_goodput_needs_every_limit_and_success():
    late = record(1, arrivals=((3.0, 1), (3.1, 1)), finished=3.2)
    slow = record(2, arrivals=((0.5, 1), (2.5, 1)), finished=2.6)
    failed = record(3, error="http 503")
    limits = [Limit.parse("ttft:2000"), Limit.parse("itl:1000")]
    good = summarize(result(record(0), late, slow, failed), limits)["goodput"]
    assert good["requests"] == 1 and good["fraction"] == 0.25
    assert good["limits_ms"] == {"ttft": 2000.0, "itl": 1000.0}
    assert summarize(result(record()))["goodput"] is None


def test_a_limit_includes_its_bound():
    assert Limit("ttft", 1000).holds(record())
    assert not Limit("ttft", 999.9).holds(record())
    assert Limit("e2e", 2600).holds(record()) and Limit("tpot", 750).holds(record())


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:-1", "ttft:nan", "latency:5", ":5", "ttft:0", "ttft:inf"])
def test_a_limit_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="METRIC:MILLISECONDS"):
        Limit.parse(text)


def test_errors_are_counted_by_kind_with_their_first_message():
    records = [record(i, error="timeout", detail=f"no {i}") for i in range(2)] + [record(2, error="connect")]
    assert metrics.errors_by_kind(records) == {
        "timeout": {"count": 2, "example": "no 0"},
        "connect": {"count": 1, "example": ""},
    }


def test_a_load_without_records_has_a_report():
    report = summarize(result(interrupted=True), [Limit("ttft", 1)])
    assert report["duration_s"] == 0 and report["ttft_ms"] is None and report["goodput"]["fraction"] == 0
    json.dumps(report)


def test_rows_count_from_the_start_of_the_load():
    [row] = metrics.request_rows([record(scheduled=100.0, sent_s=100.5, arrivals=((101.0, 1),))], 99.0)
    assert row["scheduled_s"] == 1.0 and row["sent_s"] == 1.5 and row["ttft_ms"] == 1000.0
