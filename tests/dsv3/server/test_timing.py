"""Where requests' time goes: what a client gets of it, and what an operator sees of those that run and wait."""

import itertools
import json
import re
import sys

import msgspec
import pytest

from dsv3.config.server_options import ServerOptions
from dsv3.sampling_params import SamplingParams
from dsv3.scheduler.request import EngineOutput, EngineRequest, RequestRules, prepare
from dsv3.server.tracing import Tracer
from tests.dsv3.server import serving
from tests.dsv3.server.collector import Collector

PROMPT = list(range(10, 110))
PARTS = ("tokenize", "grammar", "queue", "lookup", "transfer", "load", "prefill", "decode")
ASKS = {"X-Request-Timing": "1"}
ROUTES = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 5},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a b"}], "max_tokens": 5, "n": 2},
    "/inference/v1/generate": {"token_ids": PROMPT, "sampling_params": {"max_tokens": 5}},
    "/v1/messages": {"messages": [{"role": "user", "content": "a b"}], "max_tokens": 5},
    "/v1/responses": {"input": "a b", "max_output_tokens": 16},
}


def check(timing: dict) -> None:
    """Checks that the parts of a split fit their whole, and that a request without a hit was computed."""
    parts = [timing.get(f"{name}_ms", 0.0) for name in PARTS]
    assert all(part >= 0 for part in parts) and sum(parts) <= timing["total_ms"] + 1e-6
    assert 0 < timing["first_token_ms"] <= timing["total_ms"]
    assert timing["prefill_ms"] > 0 and timing["decode_ms"] > 0
    assert timing["computed_tokens"] > 0 and not timing.get("preemptions")


@pytest.mark.parametrize("path", ROUTES)
def test_an_answer_says_where_its_time_went(server, path):
    answer = server.http.post(path, json=ROUTES[path], headers=ASKS)
    timing = answer.json()["usage"]["timing"]
    check(timing)
    header = answer.headers["server-timing"]
    found = {name: float(ms) for name, ms in re.findall(r"(\w+);dur=([0-9.e-]+)", header)}
    assert found["total"] >= sum(found.get(name, 0) for name in PARTS) - 1e-6
    if path == "/v1/completions":  # the fake engine finds full pages
        assert timing["cached_tokens"] == {"device": 64} and 'cached_device;desc="64 tokens"' in header


@pytest.mark.parametrize("path", ROUTES)
def test_the_last_usage_of_a_stream_says_it(server, path):
    body = ROUTES[path] | {"stream": True}
    if path not in ("/v1/messages", "/v1/responses"):  # these have it always
        body |= {"stream_options": {"include_usage": True}}
    lines = server.http.post(path, json=body, headers=ASKS).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    usages = [event.get("usage") or (event.get("response") or {}).get("usage") for event in events]
    check([usage["timing"] for usage in usages if usage][-1])


def test_without_the_header_nothing_is_said(server):
    for headers in ({}, {"X-Request-Timing": "0"}):
        answer = server.http.post("/v1/completions", json=ROUTES["/v1/completions"], headers=headers)
        assert "timing" not in answer.json()["usage"] and "server-timing" not in answer.headers


def test_an_answer_that_a_stop_string_ends_has_a_split_too(server):
    whole = server.http.post("/v1/completions", json=ROUTES["/v1/completions"] | {"max_tokens": 30}).json()
    stop = whole["choices"][0]["text"][10:13]
    body = ROUTES["/v1/completions"] | {"max_tokens": 200, "stop": stop}
    answer = server.http.post("/v1/completions", json=body, headers=ASKS).json()
    assert answer["choices"][0]["stop_reason"] == stop
    check(answer["usage"]["timing"])


def test_an_operator_sees_what_runs_and_what_waits_for_what(slow_server):
    body = {"prompt": PROMPT, "max_tokens": 1000, "ignore_eos": True, "stream": True, "n": 3, "priority": 7}
    with slow_server.http.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": "mine"}) as stream:
        lines = stream.iter_lines()  # without a reference it would close the connection
        assert next(lines)
        found = slow_server.http.get("/debug/requests").json()
    assert found["total"] == 3
    shown = [
        tuple(each[name] for name in ("id", "tenant", "state", "reason", "priority")) for each in found["requests"]
    ]
    running = ("mine", None, "decoding", "", 7)
    assert shown == [running, running, ("mine", None, "waiting", "slot", 7)]
    slow_server.wait_for(slow_server.is_idle)


def test_engine_messages_have_no_timing_unasked():
    names = msgspec.to_builtins(EngineOutput(request_id=1, token_ids=[2])).keys()
    assert names == {"request_id", "token_ids"}
    request = EngineRequest(request_id=0, prompt_token_ids=[1], sampling=SamplingParams())
    prepared = prepare(request, RequestRules(vocab_size=9, max_model_len=9))
    assert "return_timing" not in msgspec.to_builtins(prepared)


def test_a_trace_shows_the_engines_death_and_a_silent_collector_delays_no_request_and_no_stop(model_dir):
    collector = Collector()
    options, body = {"otlp_traces_endpoint": collector.url}, {"prompt": PROMPT, "max_tokens": 300, "stream": True}
    with serving.running(model_dir, options=options, factory_options={"step_s": 0.003, "start_s": 0.2}) as server:
        with server.http.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as stream:
            lines = stream.iter_lines()
            assert [next(lines) for _ in range(9)]
            server.engine_process().kill()
            assert list(lines)[-2] == "data: [DONE]"
        request, *parts = collector.trace(["llm_request", "engine_wait"])
        parts = [part for part in parts if part.parent_id == request.span_id and part.name != "detokenize"]
        assert [part.name for part in parts if part.name != "load"] == [
            *("tokenize", "queue", "prefill", "decode", "engine_wait", "queue", "prefill", "decode", "write")
        ]
        assert all(before.stop <= after.start + 1e-3 for before, after in itertools.pairwise(parts))
        collector.hang()
        for _ in range(100):
            server.http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1}).raise_for_status()
        assert server.stop() == 0
        assert "imported opentelemetry" in server.process.stdout.read()
    collector.close()


def test_traces_without_their_extra_name_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(ValueError, match=re.escape("pip install 'dsv3[otel]'")):
        Tracer("http://127.0.0.1:4318", "dsv3", {})
    with pytest.raises(ValueError, match="otlp_traces_endpoint: 'collector:4317' is not http://HOST:PORT"):
        ServerOptions(otlp_traces_endpoint="collector:4317")
    for url in ("javascript:{trace_id}", "http://viewer/trace", "http://{trace_id}", "http://viewer/ {trace_id}"):
        with pytest.raises(ValueError, match="trace_url: "):
            ServerOptions(otlp_traces_endpoint="http://collector:4318", trace_url=url)
    with pytest.raises(ValueError, match=r"trace_url: .* needs otlp_traces_endpoint"):
        ServerOptions(trace_url="http://viewer/{trace_id}")
