"""Routes of weights, pauses and sleep: SGLang's and vLLM's bodies, off by default, for the operator alone."""

import contextlib
import json
import re
import threading

import httpx
import pytest

from tests.dsv3.server import serving
from tests.dsv3.server.events import events_of
from tests.dsv3.server.fake_engine import CRASH_STEP

OPERATOR, TENANT = "sk-operator-0123456789", "sk-tenant-0123456789"
JSON = {"content-type": "application/json"}
GETS = ("/get_weight_version", "/is_paused", "/is_sleeping")
POSTS = ("/update_weights_from_disk", "/pause_generation", "/continue_generation", "/pause", "/resume", "/sleep")


@pytest.fixture(scope="module")
def operated(model_dir, tmp_path_factory):
    """Two API servers, with keys of an operator and of a tenant."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"operator {OPERATOR}\nother {TENANT}\n")
    keys.chmod(0o600)
    options = {"enable_weight_updates": True, "api_key_file": str(keys), "api_server_count": 2}
    with serving.running(model_dir, options=options, factory_options={"step_s": 0.01}) as server:
        server.http.headers["authorization"] = f"Bearer {OPERATOR}"
        yield server


def post(server, path: str, body: dict | None = None, status: int = 200, **query) -> dict:
    answer = server.http.post(path, json=body, params=query)
    assert answer.status_code == status, answer.text
    return answer.json()


def get(server, path: str) -> dict:
    return server.http.get(path).raise_for_status().json()


def test_they_are_off_by_default_and_for_the_operator_alone(server, operated) -> None:
    for method, paths in (("GET", GETS), ("POST", (*POSTS, "/wake_up"))):
        for path in paths:
            answer = server.http.request(method, path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "weight_updates_off")
            headers = {"authorization": f"Bearer {TENANT}"}
            answer = operated.http.request(method, path, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "not_the_operator")
    completion = server.http.post("/v1/completions", json={"prompt": [5, 6], "max_tokens": 2}).json()
    assert "weight_version" not in completion["choices"][0]


@pytest.mark.parametrize(
    ("nested", "text"), [(b"[" * 100_000, "nested too deeply"), (b"[" + b"[]," * 2**20 + b"0]", "brackets")]
)
def test_bodies_that_would_block_the_event_loop_are_refused(operated, nested, text) -> None:
    answer = operated.http.post("/pause_generation", content=b'{"x":' + nested + b"}", headers=JSON)
    assert answer.status_code == 400 and text in answer.json()["error"]["message"]


def test_sglangs_routes(operated) -> None:
    assert get(operated, "/get_weight_version") == {"weight_version": "default"}
    assert post(operated, "/pause_generation")["status"] == "ok"
    operated.wait_for(lambda: get(operated, "/is_paused") == {"is_paused": True})
    assert post(operated, "/pause_generation", {"mode": "in_place"})["status"] == "ok"
    found = post(operated, "/update_weights_from_disk", {"model_path": "/a", "weight_version": "7", "unknown": 1})
    assert found["success"] and found["num_paused_requests"] == 0
    assert post(operated, "/continue_generation", {})["status"] == "ok"
    refused = post(operated, "/update_weights_from_disk", {"model_path": "refused"}, 400)
    assert refused == {"success": False, "message": "missing tensors (1): norm", "num_paused_requests": 0}
    assert not post(operated, "/update_weights_from_disk", {"model_path": "lost"}, 500)["success"]
    wrong = (
        {},
        {"model_path": 1},
        {"model_path": "/a", "load_format": "dummy"},
        {"model_path": "/a", "is_async": True},
    )
    for body in wrong:
        assert post(operated, "/update_weights_from_disk", body, 400)["error"]
    error = post(operated, "/pause_generation", {"mode": "keep"}, 400)["error"]
    assert error["message"] == "mode: this value is not known; it may be abort or in_place or retract"
    operated.wait_for(lambda: get(operated, "/get_weight_version") == {"weight_version": "7"})  # on both API servers


def test_vllms_routes(operated) -> None:
    assert post(operated, "/pause", mode="keep") == {"status": "paused"}
    operated.wait_for(lambda: get(operated, "/is_paused")["is_paused"])
    assert post(operated, "/resume") == {"status": "resumed"}
    refused = post(operated, "/pause", status=400, mode="later")
    assert refused["error"]["param"] == "mode" and "later" not in refused["error"]["message"]
    for level in ("3", "x"):
        post(operated, "/sleep", status=400, level=level)
    post(operated, "/sleep", level=2)
    operated.wait_for(lambda: get(operated, "/is_sleeping")["is_sleeping"])
    refused = post(operated, "/v1/completions", {"prompt": [5, 6]}, 503)
    assert refused["error"]["message"] == "the engine sleeps"
    post(operated, "/wake_up", status=400, tags="weights")
    post(operated, "/wake_up")
    operated.wait_for(lambda: not get(operated, "/is_sleeping")["is_sleeping"])


def test_answers_name_the_weights_of_their_tokens(operated) -> None:
    """A stream, and a complete answer, during which they change."""
    post(operated, "/update_weights_from_disk", {"model_path": "/one", "weight_version": "one"})
    whole: list[httpx.Response] = []
    body = {"prompt": [5, 6, 7], "max_tokens": 150, "return_token_ids": True}
    to, headers = f"{operated.url}/v1/completions", dict(operated.http.headers)
    thread = threading.Thread(target=lambda: whole.append(httpx.post(to, json=body, headers=headers, timeout=60)))
    thread.start()
    events, changed = [], False
    asked = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 150}, "stream": True}
    with operated.http.stream("POST", "/inference/v1/generate", json=asked) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line.removeprefix("data: "))["choices"][0])
            if len(events) > 10 and not changed:
                changed = True
                change = {"model_path": "/two", "weight_version": "two"}
                httpx.post(f"{operated.url}/update_weights_from_disk", json=change, headers=headers).raise_for_status()
    thread.join()
    versions = [event["weight_version"] for event in events]
    assert versions == sorted(versions) and set(versions) == {"one", "two"}
    [choice] = whole[0].json()["choices"]
    [[start, first], [number, second]] = choice["weight_versions"]
    assert (start, first, second, choice["weight_version"]) == (0, "one", "two", "two")
    assert 0 < number < len(choice["token_ids"]) == 150
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    [choice] = post(operated, "/v1/chat/completions", chat)["choices"]
    assert choice["weight_version"] == "two" and "weight_versions" not in choice
    message = chat | {"max_tokens": 3}
    for path, body in (("/v1/messages", message), ("/v1/responses", {"input": "hi", "max_output_tokens": 3})):
        assert post(operated, path, body)["weight_version"] == "two"
        [*_, last] = [
            event.get("response", event)
            for _, event in events_of(operated.http.post(path, json=body | {"stream": True}))
            if "weight_version" in json.dumps(event)
        ]
        assert last["weight_version"] == "two"
    operated.wait_for(lambda: 'weight_update_seconds_count{model_name="' in operated.http.get("/metrics").text)
    shown = operated.http.get("/metrics").text
    assert re.search(r"weight_update_seconds_count\{[^}]*\} [1-9]", shown)
    assert re.search(r'dsv3:weight_version_info\{[^}]*weight_version="two"[^}]*\} 1', shown)


def test_an_engine_that_dies_with_other_weights_ends_the_server(operated) -> None:
    """The next one has the weights of the start: answers would name others than those that they were promised."""
    post(operated, "/update_weights_from_disk", {"model_path": "/last"})
    with contextlib.suppress(httpx.HTTPError):
        operated.http.post("/v1/completions", json={"prompt": [CRASH_STEP], "max_tokens": 4})
    assert operated.process.wait(60) == 1
    assert "the restarted engine has another weights" in operated.process.stdout.read() + operated.log.read_text()
