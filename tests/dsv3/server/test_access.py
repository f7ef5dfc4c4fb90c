"""Host names, web origins, request ids and the access log."""

import json
import re
import socket

import httpx
import pytest

from dsv3.config.server_options import ServerOptions
from dsv3.server.http.auth import is_loopback
from tests.dsv3.server import serving
from tests.dsv3.server.conftest import KEY

COMPLETIONS = "/v1/completions"
PAGE = "https://page.example"
BODY = {"prompt": [5, 6], "max_tokens": 2}


@pytest.fixture(scope="module")
def mannered(model_dir):
    """A server with a key, an allowed origin and an access log."""
    options = {"api_key": KEY, "allowed_origins": [PAGE], "access_log": True}
    with serving.running(model_dir, options=options) as server:
        server.http.headers["authorization"] = f"Bearer {KEY}"
        yield server


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:99999", "[::1]", "[::1]:80"])
def test_a_local_server_accepts_local_names(server, host):
    for path in ("/health", "/v1/models"):
        assert server.http.get(path, headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "127.0.0.2", ""]
)
def test_other_host_names_are_rejected(server, host):
    """DNS rebinding: a page's own host name may resolve to this machine."""
    for method, path in (("GET", "/health"), ("POST", COMPLETIONS), ("GET", "/nothing")):
        refused = server.http.request(method, path, headers={"host": host})
        assert (refused.status_code, refused.json()["error"]["code"]) == (421, "unknown_host")


def test_a_server_with_a_key_accepts_any_name(locked_server):
    assert locked_server.http.get("/health", headers={"host": "models.example"}).status_code == 200


def test_is_loopback():
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "models.example"))


def test_pages_of_allowed_origins_may_use_the_api(mannered):
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    preflight = httpx.options(mannered.url + COMPLETIONS, headers={"origin": PAGE} | asked)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == PAGE
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    for stream in (False, True):
        answer = mannered.http.post(COMPLETIONS, json=BODY | {"stream": stream}, headers={"origin": PAGE})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
    refused = httpx.post(mannered.url + COMPLETIONS, json=BODY, headers={"origin": PAGE})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE)


def test_pages_of_other_origins_get_no_cors_headers(mannered, server):
    for each in (mannered, server):
        answer = each.http.get("/health", headers={"origin": "https://other.example"})
        assert "access-control-allow-origin" not in answer.headers
    asked = {"origin": "https://other.example", "access-control-request-method": "POST"}
    assert httpx.options(mannered.url + COMPLETIONS, headers=asked).status_code == 400
    assert server.http.options(COMPLETIONS, headers=asked).status_code == 405


CROSS_SITE = {"origin": "http://evil.example", "sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
FOREIGN = [
    CROSS_SITE,
    {"origin": "http://evil.example"},
    {"origin": "null", "sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"origin": "http://localhost:3000", "sec-fetch-site": "same-site"},
]


@pytest.fixture(scope="module")
def keyless(model_dir, tmp_path_factory):
    """A server without keys, with all routes that write, and with one allowed origin."""
    places = {name: str(tmp_path_factory.mktemp(name)) for name in ("batch_dir", "profile_dir")}
    with serving.running(model_dir, options=places | {"allowed_origins": [PAGE]}) as server:
        yield server


@pytest.mark.parametrize("headers", FOREIGN)
@pytest.mark.parametrize("path", ["/flush_cache", "/start_profile", "/stop_profile", "/v1/files", COMPLETIONS, "/none"])
def test_pages_of_other_origins_cannot_change_state(keyless, path, headers):
    """Browsers send forms across origins without a preflight, although the page cannot read the response."""
    refused = keyless.http.post(path, headers=headers, files={"file": ("x.jsonl", b"{}")}, data={"purpose": "batch"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "cross_origin")
    assert keyless.http.delete("/v1/files/x", headers=headers).status_code == 403
    assert keyless.http.get("/v1/models", headers=headers).status_code == 200
    assert keyless.http.get("/v1/files", headers=headers).json()["data"] == []


def test_a_foreign_request_is_rejected_before_its_body(keyless):
    with socket.create_connection(("127.0.0.1", keyless.port), timeout=30) as client:
        head = "POST /v1/files HTTP/1.1\r\nhost: localhost\r\norigin: http://evil.example\r\ncontent-length: 1000000"
        client.sendall(f"{head}\r\n\r\n".encode())
        assert client.recv(100).startswith(b"HTTP/1.1 403 ")


@pytest.mark.parametrize("origin", [None, "http://localhost:{port}", PAGE])
def test_own_pages_allowed_origins_and_other_clients_may_post(keyless, origin):
    headers = {"host": f"localhost:{keyless.port}"}
    if origin is not None:
        site = "cross-site" if origin == PAGE else "same-origin"
        headers |= {"origin": origin.format(port=keyless.port), "sec-fetch-site": site}
    assert keyless.http.post("/flush_cache", headers=headers).status_code == 200
    assert keyless.http.post(COMPLETIONS, json=BODY, headers=headers).status_code == 200


@pytest.mark.parametrize("origin", ["page.example", "https://page.example/", "https://a b", "*.example", ""])
def test_origins_are_checked(origin):
    with pytest.raises(ValueError, match="allowed_origins"):
        ServerOptions(allowed_origins=(origin,))
    assert ServerOptions(allowed_origins=("*", PAGE, "http://localhost:3000")).allowed_origins


def test_responses_have_a_request_id(server):
    given = server.http.get("/health", headers={"x-request-id": "trace-1/a"})
    assert given.headers["x-request-id"] == "trace-1/a"
    made = set()
    for bad in (None, "", "x" * 129, "a b", "caf\xe9"):
        answer = server.http.get("/nothing", headers={} if bad is None else {"x-request-id": bad.encode("latin-1")})
        made.add(answer.headers["x-request-id"])
    assert len(made) == 5 and all(re.fullmatch("[0-9a-f]{32}", each) for each in made)
    stream = server.http.post(COMPLETIONS, json=BODY | {"stream": True}, headers={"x-request-id": "s"})
    assert stream.headers["x-request-id"] == "s"


def test_the_access_log_has_a_line_per_request(mannered):
    def lines(request_id):
        found = [json.loads(line) for line in mannered.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in found if line["request_id"] == request_id]

    def ask(request_id, path, body, **headers):
        headers["x-request-id"] = request_id
        answer = mannered.http.post(path, json=body, headers=headers)
        mannered.wait_for(lambda: lines(request_id))
        [line] = lines(request_id)
        return answer, line

    secret = "prompt-text-of-a-client"
    answer, line = ask("whole", f"{COMPLETIONS}?token=query-secret", {"prompt": secret, "max_tokens": 2})
    about_http = {"time", "request_id", "tenant", "method", "path", "status", "seconds", "bytes", "complete"}
    about_answer = {"model", "prompt_tokens", "completion_tokens", "first_token_s"}
    assert set(line) == about_http | about_answer
    usage = answer.json()["usage"]
    assert (line["model"], line["prompt_tokens"], line["completion_tokens"]) == ("tiny", usage["prompt_tokens"], 2)
    assert 0 < line["first_token_s"] <= line["seconds"]
    assert (line["method"], line["path"], line["status"], line["complete"]) == ("POST", COMPLETIONS, 200, True)
    assert line["bytes"] >= len(answer.content) and line["seconds"] > 0
    answer, line = ask("streamed", COMPLETIONS, BODY | {"stream": True})
    assert (line["status"], line["complete"]) == (200, True) and line["bytes"] >= len(answer.content) / 2
    assert (line["prompt_tokens"], line["completion_tokens"]) == (2, 2) and line["first_token_s"] > 0
    answer, line = ask("tokenized", "/tokenize", {"prompt": "x"})
    assert line["status"] == 200 and not any(line[name] for name in about_answer)
    assert ask("refused", COMPLETIONS, BODY, authorization="Bearer wrong-key")[1]["status"] == 401
    with httpx.Client(base_url=mannered.url, headers=mannered.http.headers) as client:
        body = BODY | {"stream": True, "max_tokens": 2000, "n": 8}
        with client.stream("POST", COMPLETIONS, json=body, headers={"x-request-id": "gone"}) as answer:
            next(answer.iter_raw())
    mannered.wait_for(lambda: lines("gone"))
    [line] = lines("gone")
    assert line["complete"] is False and 0 < line["completion_tokens"] < 16_000
    log = mannered.log.read_text()
    assert not any(text in log for text in (secret, "query-secret", KEY, "wrong-key"))


def test_the_access_log_is_off_by_default(server):
    server.http.get("/health", headers={"x-request-id": "not-logged"})
    assert "not-logged" not in server.log.read_text()
