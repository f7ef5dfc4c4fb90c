"""The load generator against a scripted server, and its figures from records made by hand."""

import asyncio
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tools.fake_openai import fake_server
from tools import load
from tools.load import Arrival, RequestRecord, bodies, distribution, summarize


def record(index=0, scheduled=0.0, arrivals=((1.0, 1), (1.5, 1), (2.5, 1)), finished=2.6, **fields):
    usage = {"prompt_tokens": 10, "completion_tokens": sum(count or 0 for _, count in arrivals)}
    return RequestRecord(
        index=index,
        scheduled_s=scheduled,
        finished_s=finished,
        arrivals=[Arrival(*arrival) for arrival in arrivals],
        **({"sent_s": scheduled, "usage": usage} | fields),
    )


def run(url, **changes):
    how = {"input_len": 5, "output_len": 4, "concurrency": 3, "num_prompts": 10}
    return asyncio.run(load.run(url, **(how | changes)))


def test_a_load_keeps_its_concurrency():
    with fake_server(["paced"]) as server:
        figures = run(server.url, num_warmups=2)
    assert figures["requests"] == {"sent": 10, "completed": 10, "failed": 0} and not figures["errors"]
    assert server.most_running == 3 and len(server.bodies) == 12
    assert all(len(body["prompt"].split()) == 5 and body["max_tokens"] == 4 for body in server.bodies)
    assert len({body["prompt"] for body in server.bodies}) == 12
    assert figures["throughput"]["output_tokens_per_s"] > 0 and figures["itl_ms"]["p50"] > 0


def test_token_ids_are_below_the_vocabulary_and_counted_by_the_server():
    with fake_server() as server:
        assert run(server.url, vocab_size=7)["requests"]["completed"] == 10
    assert all(0 <= token < 7 for body in server.bodies for token in body["prompt"])


def test_a_time_limit_keeps_the_requests_that_have_ended():
    with fake_server(["hangs"]) as server:
        figures = run(server.url, num_warmups=0, seconds=0.2)
    assert figures["requests"]["sent"] == 0 and figures["ttft_ms"] is None
    assert set(figures["throughput"].values()) == {None}


@pytest.mark.parametrize(("model", "message"), [("busy", "http 503: queue is full"), ("drops", "disconnected")])
def test_a_warm_up_that_fails_ends_the_load(model, message):
    with fake_server([model]) as server, pytest.raises(load.LoadError, match=message):
        run(server.url)


def test_failures_are_counted_by_kind():
    with fake_server(["abort"]) as server:
        figures = run(server.url, num_warmups=0)
    assert figures["requests"] == {"sent": 10, "completed": 0, "failed": 10}
    assert figures["errors"]["finish: abort"]["count"] == 10


def test_an_unreachable_server_is_named():
    with pytest.raises(load.LoadError, match="/v1/models: connect"):
        run("http://127.0.0.1:9")


def test_requests_are_the_same_for_the_same_seed():
    first, again, other = ([*bodies("m", 3, range(50), 8, 2, seed)] for seed in (0, 0, 1))
    assert first == again and first != other
    assert json.loads(first[0])["stream_options"] == {"include_usage": True}


def test_latencies_of_a_request():
    one = record(scheduled=0.25, sent_s=0.5)
    assert one.ttft_s == 0.75
    assert one.inter_token_s() == [0.5, 1.0]
    assert one.e2e_s == pytest.approx(2.35)


def test_a_chunk_of_several_tokens_gives_its_gap_to_each_of_them():
    assert record(arrivals=((1.0, 2), (2.0, 4))).inter_token_s() == [0.25] * 4


def test_chunks_without_counts_are_gaps_between_chunks():
    assert record(arrivals=((1.0, None), (2.0, None), (4.0, None))).inter_token_s() == [1.0, 2.0]


@pytest.mark.parametrize("arrivals", [(), ((1.0, 1),), ((1.0, 5),)])
def test_an_answer_of_one_chunk_has_no_inter_token_latency(arrivals):
    assert record(arrivals=arrivals).inter_token_s() == []
    assert summarize([record(arrivals=arrivals)])["itl_ms"] is None


def test_rates_are_of_completed_requests_over_the_whole_duration():
    failed = record(1, scheduled=1.0, finished=4.0, error="timeout", detail="late")
    figures = summarize([record(), failed])
    assert figures["throughput"] == {
        "requests_per_s": 0.25, "output_tokens_per_s": 3 / 4, "total_tokens_per_s": 13 / 4,
    }  # fmt: skip
    assert figures["errors"] == {"timeout": {"count": 1, "example": "late"}}
    assert figures["ttft_ms"]["max"] == pytest.approx(1000)


def test_without_counts_there_are_no_token_rates():
    figures = summarize([record(arrivals=((1.0, None), (2.0, None)), usage={})])
    assert figures["throughput"]["output_tokens_per_s"] is None and figures["throughput"]["requests_per_s"]


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=50))
def test_a_distribution_equals_numpys(seconds):
    found = distribution([*seconds, None])
    assert found is not None
    assert found["p90"] == pytest.approx(float(np.percentile(seconds, 90)) * 1e3)
    assert found["p50"] <= found["p95"] <= found["max"] == pytest.approx(max(seconds) * 1e3)


def test_no_values_have_no_distribution():
    assert distribution([None]) is None
