"""What a router makes of events: wherever streams are cut, the client is told one answer once."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dsv3.api.answers.errors import ApiError
from dsv3.fleet.router.asked import read_asked
from dsv3.fleet.router.gather import Events, Failed, Gathered, Unreadable

PATH = "/v1/completions"
ANSWERS = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=8), min_size=1, max_size=3)


def asked(**fields):
    return read_asked(PATH, json.dumps({"prompt": "x", "stream": True} | fields).encode())


def event(index: int, ids: list[int], end: str | None = None, **more) -> bytes:
    text = "".join(f"<{token}>" for token in ids)
    choice = {"index": index, "text": text, "token_ids": ids, "finish_reason": end} | more
    return json.dumps({"id": "any", "created": 1, "choices": [choice]}).encode()


def tell(answers: list[list[int]], had: list[list[int]]) -> list[bytes]:
    """The events of an instance that goes on behind the tokens `had`, a token each, choices in turns."""
    events = [event(i, [], text=f"echo{i}") for i, ids in enumerate(had) if not ids]
    for place in range(max(map(len, answers))):
        for i, answer in enumerate(answers):
            if len(had[i]) <= place < len(answer):
                events.append(event(i, [answer[place]], "length" if place == len(answer) - 1 else None))
    events += [event(i, [], "length") for i, answer in enumerate(answers) if len(had[i]) == len(answer)]
    return [*events, b"[DONE]"]


@given(ANSWERS, st.lists(st.integers(0, 12), max_size=4), st.booleans())
@example([[0]], [1, 1, 1, 1], False)  # four instances break after the echo
def test_wherever_streams_are_cut_one_answer_is_told(answers, cuts, wants_ids):
    request = asked(n=len(answers), return_token_ids=wants_ids)
    gathered, lines = Gathered(request), []
    for cut in [*cuts, None]:
        gathered.broke()
        for data in tell(answers, gathered.tokens)[:cut]:
            lines += gathered.take(data)[0]
        if gathered.is_done:
            break
    assert gathered.is_done and gathered.tokens == answers
    assert lines.pop() == b"data: [DONE]\n\n"
    told = [choice for line in lines for choice in json.loads(line.removeprefix(b"data: "))["choices"]]
    for i, answer in enumerate(answers):
        mine = [choice for choice in told if choice["index"] == i]
        assert "".join(choice["text"] for choice in mine) == f"echo{i}" + "".join(f"<{token}>" for token in answer)
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["length"]
        assert [token for choice in mine for token in choice.get("token_ids", [])] == (answer if wants_ids else [])


@given(st.lists(st.binary(max_size=20).map(lambda each: each.hex().encode()), max_size=6), st.data())
def test_events_are_found_however_the_bytes_come(contents, data):
    body, found, events = b"".join(b"data: %b\n\n" % each for each in contents), [], Events()
    while body:
        size = data.draw(st.integers(1, len(body)))
        found += events.push(body[:size])
        body = body[size:]
    assert found == contents


def test_an_instance_that_tells_no_tokens_is_passed_on_and_not_resumed():
    gathered = Gathered(asked())
    lines = [line for i in range(9) for line in gathered.take(event(0, [], text=str(i), token_ids=None))[0]]
    assert not gathered.is_tracked
    assert "".join(json.loads(line.removeprefix(b"data: "))["choices"][0]["text"] for line in lines) == "012345678"


@pytest.mark.parametrize("data", [b"{", b"[]", b'{"choices": [5]}', b'{"choices": [{"index": 7}]}', b"\xff"])
def test_what_is_no_event_is_unreadable(data):
    with pytest.raises(Unreadable):
        Gathered(asked()).take(data)


@pytest.mark.parametrize(("kind", "is_ours"), [("server_error", True), ("invalid_request_error", False)])
def test_an_error_in_a_stream(kind, is_ours):
    with pytest.raises(Failed) as failed:
        Gathered(asked()).take(json.dumps({"error": {"message": "m", "type": kind, "code": None}}).encode())
    assert failed.value.is_ours == is_ours and str(failed.value.error) == "m"


def read_back(body) -> dict:
    """What an instance reads of it: the last of fields that have one name."""
    return json.loads(b"".join(body))


def test_what_an_instance_is_sent():
    request = asked(seed=3, n=2)
    body = read_back(request.first(None))
    assert (body["seed"], body["return_token_ids"], "resume" in body) == (3, True, False)
    body = read_back(request.again([[5], []], {"remote_host": "h"}))
    assert body["resume"] == {"output_token_ids": [[5], []]} and body["kv_transfer_params"] == {"remote_host": "h"}
    assert 0 <= read_back(asked().first(None))["seed"] < 2**31
    body = read_back(asked(resume={"output_token_ids": [1]}, echo=True, min_tokens=3).prefill())
    assert body["max_tokens"] == 1 and not any(body[name] for name in ("stream", "resume", "echo", "min_tokens"))


FIELDS = st.dictionaries(
    st.sampled_from(["seed", "cache_salt", "kv_transfer_params", "stream", "input", "x", "é"]),
    st.sampled_from([None, True, "t", [], {}, [{"a": "}"}]]),
)


@given(FIELDS, st.booleans(), st.sampled_from([None, 1]), st.sampled_from([b"", b" \n"]))
def test_the_clients_fields_reach_an_instance_as_they_came(fields, escapes, indent, space):
    data = space + json.dumps(fields, ensure_ascii=escapes, indent=indent).encode() + space
    body = read_back(read_asked("/v1/responses", data, "tenant").first(None))
    salt = fields.get("cache_salt")
    expected = fields | {"cache_salt": f"tenant-{salt or ''}" if isinstance(salt, str | None) else salt}
    if "kv_transfer_params" in fields:
        expected["kv_transfer_params"] = None
    assert body == expected


def test_names_that_are_spelled_with_escapes_are_the_same_names():
    request = read_asked(PATH, b'{"prompt": "x", "\\u006bv_transfer_params": {"remote_host": "inside"}, "\\u006e": 2}')
    assert read_back(request.first(None))["kv_transfer_params"] is None and len(request.given) == 2


def test_a_client_that_resumes_is_gone_on_with():
    request = asked(resume={"output_token_ids": [4, 5]})
    gathered = Gathered(request)
    gathered.take(event(0, [6]))
    assert read_back(request.again(gathered.tokens, None))["resume"] == {"output_token_ids": [[4, 5, 6]]}


def test_no_client_says_where_pages_are():
    request = asked(kv_transfer_params={"do_remote_prefill": True, "remote_host": "inside", "remote_port": 1})
    assert read_back(request.first(None))["kv_transfer_params"] is None
    request = asked(bootstrap_host="inside", bootstrap_port=1, bootstrap_room=7)
    for body in (request.first(None), request.prefill()):
        assert {read_back(body)[f"bootstrap_{name}"] for name in ("host", "port", "room")} == {None}


def test_tenants_do_not_share_salts():
    bodies = (b"{}", b'{"cache_salt": "x"}')
    found = [
        read_back(read_asked(PATH, body, tenant).first(None)) for tenant in ("a" * 64, "b" * 64) for body in bodies
    ]
    assert len({body["cache_salt"] for body in found}) == 4


def test_a_body_is_not_copied_and_its_tokens_are_counted():
    data = bytearray(b'{"prompt": [%b], "resume": {"output_token_ids": [7, 8]}}' % b", ".join([b"5"] * 100_000))
    request = read_asked(PATH, data)
    head, tail = request.again([[7, 8, 9]], None)
    assert head.obj is data and len(tail) < 100 and request.num_bytes == 4 * 100_002
    assert request.prompt.tokens == 100_000 and len(request.prompt.keys) == 100_000 // 64


def test_what_a_server_refuses_unread_a_router_refuses_too():
    body = b'{"prompt": [%b]}' % b",".join([b"{}"] * 2**20)
    with pytest.raises(ApiError, match="brackets") as refused:
        read_asked(PATH, body)
    assert refused.value.status == 400
    with pytest.raises(ApiError, match="longer than any prompt"):
        read_asked(PATH, b'{"prompt": [%b]}' % b",".join([b"5"] * (2**20 + 1)))


@given(st.binary(max_size=30))
def test_a_body_is_read_or_refused(data):
    try:
        read_asked(PATH, data)
    except ApiError as error:
        assert error.status == 400
