"""A router in front of real server processes: what clients get is what one server tells, whoever dies meanwhile."""

import concurrent.futures
import contextlib
import json
import os
import re
import signal

import httpx
import pytest

from tests.dsv3.server.collector import Collector, in_order
from tests.dsv3.server.fake_engine import CRASH_STEP
from tests.dsv3.server.test_bodies import SIZE, forget_peak, memory, repeated
from tests.dsv3.server.test_resume import BODIES, CHAT, COMPLETIONS, collect
from tests.dsv3.server.test_tls import make_certificate, running
from tests.dsv3.server.test_tools import MESSAGES
from tests.router.conftest import instances, routing, running_servers, wait_until

PAGES = "dsv3:router_instance_pages"
PROMPT = "def add(x, y):\n    return x + y\n"


def stream(http, path, body) -> list[dict]:
    """The events of an answer; an error among them too."""
    with http.stream("POST", path, json={"stream": True, "temperature": 0} | body) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    if lines[-1] == "[DONE]":
        lines.pop()
    return [json.loads(line) for line in lines]


def kill(server) -> None:
    """Ends the first front and the engine at once."""
    for process in (server.process, server.engine_process()):
        os.kill(process.pid, signal.SIGKILL)
    server.process.wait()


@pytest.mark.parametrize(("path", "body"), BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("wants_ids", [False, True])
def test_a_stream_is_what_an_instance_tells(router, pair, path, body, wants_ids):
    body = body | {"return_token_ids": wants_ids, "stream_options": {"include_usage": True}}
    routed, direct = stream(router.http, path, body), stream(pair[0].http, path, body)
    assert len({event["id"] for event in routed}) == 1
    count = 1 + max(choice["index"] for event in direct for choice in event["choices"])
    assert collect(routed, count).state() == collect(direct, count).state()
    assert wants_ids or not any("token_ids" in json.dumps(event) for event in routed)


def test_an_answer_that_is_not_streamed(router, pair):
    body = {"prompt": PROMPT, "max_tokens": 9, "temperature": 0}
    routed, direct = (each.http.post(COMPLETIONS, json=body).json() for each in (router, pair[0]))
    assert routed["choices"] == direct["choices"] and routed["usage"] == direct["usage"]


def test_other_routes_are_passed_on(router, pair):
    for path, body in (("/tokenize", {"prompt": PROMPT}), ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9})):
        routed, direct = (each.http.post(path, json=body).json() for each in (router, pair[0]))
        routed.pop("id", None), direct.pop("id", None)
        assert routed == direct
    with router.http.stream("POST", "/v1/responses", json={"input": "hello", "stream": True}) as answer:
        assert "response.completed" in answer.read().decode()
    assert router.http.get("/v1/models").json()["data"] == pair[0].http.get("/v1/models").json()["data"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (COMPLETIONS, b"{", 400),
        (COMPLETIONS, b"[]", 400),
        (COMPLETIONS, b"[" * 100_000, 400),
        (COMPLETIONS, b'{"prompt": "x", "n": "y"}', 400),
        (COMPLETIONS, b'{"prompt": "x", "n": -1, "stream": true}', 400),
        (COMPLETIONS, b'{"prompt": "x", "resume": 5, "stream": true}', 400),
        (COMPLETIONS, b'{"prompt": "x", "resume": {"output_token_ids": [1e9]}, "stream": true}', 400),
        (COMPLETIONS, b'{"prompt": "x", "model": "another"}', 404),
        (CHAT, b'{"messages": 5, "stream": true}', 400),
        ("/v1/messages", b"{}", 400),
        ("/flush_cache", b"{}", 404),
        ("/v1/files", b"{}", 404),
    ],
)
def test_what_is_refused_has_a_status_and_an_error(router, path, body, status):
    answer = router.http.post(path, content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, bool(answer.json()["error"]["message"])) == (status, True)


def test_a_route_that_is_asked_in_another_way_says_how(router):
    answer = router.http.put("/v1/models")
    assert answer.status_code == 405 and "GET" in answer.headers["allow"]


@pytest.mark.parametrize(
    ("head", "unit", "status"),
    [
        (b'{"prompt":[', b"{}", 400),
        (b'{"prompt":[', b"5", 400),
        (b'{"prompt":[5],"max_tokens":1,"user":[', b"100", 200),
    ],
)
def test_a_costly_body_takes_little_memory(router, head, unit, status):
    """Before, 8 MiB of empty objects took 200 MiB, and the event loop for a second and more."""
    body, pid = repeated(head, unit, b"]}"), router.process.pid
    before = memory(pid, "VmRSS")
    forget_peak(pid)
    answer = router.http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status and len(answer.content) < 1000
    assert memory(pid, "VmHWM") - before < 8 * SIZE


def test_the_same_prompt_goes_where_it_went_also_through_another_router(router, pair):
    """The second router knows from the instances alone where the pages are: of text, tokens and messages."""
    text = "a prompt that is long " * 60
    bodies = [
        (COMPLETIONS, {"prompt": text}),
        (COMPLETIONS, {"prompt": [i % 50 + 5 for i in range(600)]}),
        (CHAT, {"messages": [{"role": "user", "content": f"chat {text}"}]}),
    ]
    with routing(instances(*pair)) as other:
        wait_until(lambda: router.listens() and other.listens())
        for path, body in bodies:
            body = body | {"max_tokens": 2}
            wait_until(lambda: router.metric(PAGES) == other.metric(PAGES))
            before, known = sent(router, pair), router.metric(PAGES)
            assert router.http.post(path, json=body).status_code == 200
            [place] = [i for i in range(2) if sent(router, pair)[i] > before[i]]
            wait_until(lambda known=known: known < router.metric(PAGES) == other.metric(PAGES))
            for each in (other, router):
                before = sent(each, pair)
                for _ in range(3):
                    assert each.http.post(path, json=body).status_code == 200
                    wait_until(lambda each=each: not sum(each.samples("dsv3:router_running")))
                assert [after - first for first, after in zip(before, sent(each, pair), strict=True)][place] == 3


def sent(router, servers) -> list[float]:
    """How many requests each server has got of a router."""
    text = router.http.get("/metrics").text
    found = dict(re.findall(r'^dsv3:router_sent_total\{instance="(.*)"\} (\S+)$', text, re.MULTILINE))
    return [float(found.get(server.url, 0)) for server in servers]


def go_through(router, server, end) -> None:
    """24 streams and 4 whole answers, while `end` does something to an instance that has some of them."""
    bodies = [{"prompt": f"{i} {PROMPT}", "max_tokens": 120, "seed": i} for i in range(24)]
    whole = [{"prompt": f"{i} {PROMPT}", "max_tokens": 100} for i in range(4)]
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        streams = [pool.submit(stream, router.http, COMPLETIONS, body) for body in bodies]
        answers = [pool.submit(router.http.post, COMPLETIONS, json=body) for body in whole]
        end()
        found = [collect(future.result(), 1) for future in streams]
        texts = [future.result().json()["choices"][0]["text"] for future in answers]
        alone = [
            collect(each.result(), 1) for each in [pool.submit(stream, server.http, COMPLETIONS, b) for b in bodies]
        ]
    assert [each.text for each in found] == [each.text for each in alone] and all(each.ends[0] for each in found)
    assert texts == [server.http.post(COMPLETIONS, json=body).json()["choices"][0]["text"] for body in whole]


TRACE_URL = 'http://viewer/?panes={"query":"{trace_id}"}'


def check_traces(split, servers, collector: Collector, body: dict) -> None:
    """Checks the trace of a request over a router and two instances, below the span of its client."""
    trace_id, parent_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    headers = {"traceparent": f"00-{trace_id}-{parent_id}-01", "X-Request-Timing": "1", "X-Request-Id": "slow"}
    answer = split.http.post(COMPLETIONS, json=body, headers=headers)
    assert "decode;dur=" in answer.headers["server-timing"] and answer.json()["usage"]["timing"]["decode_ms"] > 0
    unsampled = headers | {"traceparent": f"00-{'1' * 32}-{parent_id}-00"}
    split.http.post(COMPLETIONS, json=body, headers=unsampled).raise_for_status()
    (_, relay), *rows = in_order(collector.trace(["relay", "llm_request", "llm_request"], trace_id))
    requests = [span for _, span in rows if span.name == "llm_request"]
    assert (relay.name, relay.parent_id, relay.process) == ("relay", parent_id, "dsv3-router")
    assert relay.attributes["dsv3.instances"] == [f"prefill {servers[0].url}", f"answer {servers[1].url}"]
    assert all(span.parent_id == relay.span_id for span in requests)
    parts = [span for _, span in rows if span.parent_id == requests[1].span_id]
    assert [span.name for span in parts] == ["tokenize", "queue", "prefill", "decode", "detokenize", "write"]
    for part, whole in [*((span, requests[1]) for span in parts), *((span, relay) for span in requests)]:
        assert whole.start <= part.start + 1e-3 and part.stop <= whole.stop + 1e-3  # of clocks read one by one
    [chunk] = [span for _, span in rows if span.parent_id == parts[2].span_id]
    assert chunk.name == "chunk" and list(parts[3].events) == ["first_token"]
    found = requests[1].attributes
    assert found["gen_ai.usage.output_tokens"] == body["max_tokens"] and found["dsv3.request_id"] == "slow"
    assert found["gen_ai.response.finish_reasons"] == ["length"] and found["gen_ai.request.model"] == "tiny"
    assert 0 < found["gen_ai.latency.time_to_first_token"] < found["gen_ai.latency.e2e"]
    assert not [span for span in collector.spans if span.trace_id == "1" * 32]
    slow = servers[1].http.get("/dashboard/data").json()["slow_requests"]
    assert {(each["id"], each["trace_url"]) for each in slow} >= {("slow", TRACE_URL.replace("{trace_id}", trace_id))}


def test_every_answer_goes_on_when_an_instance_falls_silent_and_when_it_is_killed(dialect_dir):
    """A second router beside the first one has the same instances compute prompts and answer, and sends traces."""
    settings = {"factory_options": {"step_s": 0.02, "transfer_address": "127.0.0.1:7000"}}
    with (
        contextlib.closing(Collector()) as collector,
        running_servers(
            dialect_dir, 2, **settings, options={"otlp_traces_endpoint": collector.url, "trace_url": TRACE_URL}
        ) as servers,
        routing(instances(*servers), "--health_timeout=2") as router,
        routing(
            *(f"--prefill={servers[0].url}", f"--decode={servers[1].url}", f"--otlp_traces_endpoint={collector.url}")
        ) as split,
    ):
        wait_until(lambda: split.metric("dsv3:router_instance_up") == 2)
        body = {"prompt": PROMPT * 20, "max_tokens": 9}
        direct = collect(stream(servers[1].http, COMPLETIONS, body), 1)
        for count in (1, 2):
            assert collect(stream(split.http, COMPLETIONS, body), 1).text == direct.text
            assert split.metric("dsv3:router_prefilled_total") == count
        check_traces(split, servers, collector, body)

        def is_busy() -> bool:
            return servers[0].metric("vllm:num_requests_running") >= 4

        def stop() -> None:
            wait_until(is_busy)
            servers[0].process.send_signal(signal.SIGSTOP)

        def die() -> None:
            wait_until(is_busy)
            kill(servers[0])

        try:
            go_through(router, servers[1], stop)
        finally:
            servers[0].process.send_signal(signal.SIGCONT)
        resumed = router.metric("dsv3:router_resumed_total")
        assert resumed >= 4
        wait_until(lambda: router.http.get("/health").json()["instances"] == ["ok", "ok"])
        go_through(router, servers[1], die)
        assert router.metric("dsv3:router_resumed_total") >= resumed + 4
        assert collect(stream(split.http, COMPLETIONS, body), 1).text == direct.text
        assert split.metric("dsv3:router_prefilled_total") == 4  # two more have been traced


def test_a_request_that_ends_two_instances_ends_no_third_and_without_any_requests_are_refused(dialect_dir):
    options, bounds = {"max_request_restarts": 0}, ("--queue_timeout=0.5", "--max_num_queued_reqs=1")
    with (
        running_servers(dialect_dir, 3, options=options) as servers,
        routing(instances(*servers), *bounds) as router,
    ):
        wait_until(lambda: router.metric("dsv3:router_instance_up") == 3)
        body = {"prompt": [5, 6, CRASH_STEP], "stream": True, "max_tokens": 5}
        answer = router.http.post(COMPLETIONS, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "instances_died")
        [alive] = [server for server in servers if is_alive(server) and server.http.get("/health").status_code == 200]
        assert stream(router.http, COMPLETIONS, {"prompt": PROMPT, "max_tokens": 5})
        kill(alive)
        wait_until(lambda: router.http.get("/health").status_code == 503)
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(router.http.post, COMPLETIONS, json={"prompt": "x"}) for _ in range(4)]
            found = [future.result() for future in asked]
        assert {(each.status_code, each.headers["retry-after"]) for each in found} == {(503, "1")}
        assert "no_instance" in {each.json()["error"]["code"] for each in found}


def is_alive(server) -> bool:
    try:
        return server.http.get("/health").status_code > 0
    except httpx.TransportError:
        return False


def test_keys_and_certificates_both_ways_where_an_instance_registers_with_two_routers(
    dialect_dir, tmp_path, monkeypatch
):
    certificate = make_certificate(tmp_path, "first")
    tls = {"ssl_certfile": str(certificate), "ssl_keyfile": f"{certificate}.key"}
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))  # whom the instance trusts
    files = {"own": "alice alice-key-0123456789\noperator operator-key-0123456789\n", "instance": "sk-secret-key\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    keys = (f"--api_key_file={tmp_path / 'own'}", f"--instance_api_key_file={tmp_path / 'instance'}")
    given = (*keys, "--registration", f"--instance_ca_file={certificate}")
    with (
        routing(*given, *(f"--{name}={path}" for name, path in tls.items()), ready=False) as router,
        routing(*given, ready=False) as other,
    ):
        assert router.url.startswith("https:") and router.http.get("/health").status_code == 503
        there = {"Authorization": "Bearer sk-secret-key"}
        about = {"url": "http://127.0.0.1:1", "role": "both"}
        for headers, body, status in (
            ({}, about, 401),
            ({"Authorization": "Bearer alice-key-0123456789"}, about, 401),
            (there, about | {"url": "ftp://x"}, 400),
            (there, about | {"role": "nobody"}, 400),
            (there, [], 400),
        ):
            assert router.http.post("/instances", json=body, headers=headers).status_code == status
        options = {"api_key": "sk-secret-key", "register": [router.url, other.url], **tls}
        options["register_key_file"] = str(tmp_path / "instance")
        with running(dialect_dir, options) as server:
            for each in (router, other):
                wait_until(lambda each=each: each.http.get("/health").status_code == 200)
            alice, operator = ({"Authorization": f"Bearer {name}-key-0123456789"} for name in ("alice", "operator"))
            body = {"prompt": PROMPT, "max_tokens": 4, "cache_salt": "mine"}
            assert router.http.post(COMPLETIONS, json=body, headers=alice).status_code == 200
            assert router.http.get("/metrics", headers=operator).status_code == 200
            assert router.http.get("/metrics", headers=alice).status_code == 403
            urgent = body | {"priority": -1}
            assert router.http.post(COMPLETIONS, json=urgent, headers=alice).status_code == 403
            assert router.http.post(COMPLETIONS, json=urgent, headers=operator).status_code == 200
            for headers in ({}, there):
                refused = router.http.post(COMPLETIONS, json=body, headers=headers)
                assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
            other.process.kill()  # the other one knows all that there is to know
            assert router.http.post(COMPLETIONS, json=body, headers=alice).status_code == 200
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: router.http.get("/health").json() == {"status": "no instance", "instances": []})
