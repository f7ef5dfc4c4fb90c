"""What a router makes of events: wherever streams are cut, the client is told one answer once."""

import array
import json
import time
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dsv3.http_client import RequestFailed
from dsv3.server.protocol.errors import ApiError
from dsv3.server.protocol.openai import ChatRequest, CompletionRequest
from dsv3.server.serving.chat import ChatHandler
from dsv3.server.serving.generation import ChoiceUpdate
from dsv3.server.serving.request_parsing import read
from dsv3.text.deltas import ReasoningDelta, TextDelta
from router.request import parse_request
from router.stream import Events, RelayedStream

PATH, CHAT = "/v1/completions", "/v1/chat/completions"
ANSWERS = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=8), min_size=1, max_size=3)


def asked(path=PATH, **fields):
    return parse_request(path, json.dumps({"prompt": "x", "stream": True} | fields).encode())


def event(index: int, ids: list[int] | None, text: str, end: str | None = None) -> bytes:
    choice = {"index": index, "text": text, "finish_reason": end} | ({} if ids is None else {"token_ids": ids})
    return json.dumps({"id": "any", "created": 1, "choices": [choice]}).encode()


def spelled(token: int) -> list[str]:
    """What a token tells, in pieces: those of some are told with the next one."""
    return [[], [f"<{token}>"], [f"<{token}", ">"], ["<", f"{token}", "", ">"]][token % 4]


def tell(answers: list[list[int]], had: list[list[int]], size: int, names_none: bool) -> list[bytes]:
    """The events of an instance that goes on behind the tokens `had`, choices in turns.

    It tells `size` tokens at a time, in an event per piece, the last of which names them; the others have an empty list
    of tokens, or none.
    """
    none, events = [] if names_none else None, [event(i, None, f"echo{i}") for i, ids in enumerate(had) if not ids]
    for place in range(0, max(map(len, answers)), size):
        for i, answer in enumerate(answers):
            ids = answer[len(had[i]) :][place : place + size]
            if not ids:
                continue
            *before, last = [chunk for token in ids for chunk in spelled(token)] or [""]
            end = "length" if len(had[i]) + place + size >= len(answer) else None
            events += [*(event(i, none, chunk) for chunk in before), event(i, ids, last, end)]
    events += [event(i, [], "", "length") for i, answer in enumerate(answers) if len(had[i]) == len(answer)]
    return [*events, b"[DONE]"]


@given(ANSWERS, st.lists(st.tuples(st.integers(0, 20), st.integers(1, 3), st.booleans()), max_size=4), st.booleans())
@example([[0]], [(1, 1, True)] * 4, False)  # four instances break after the echo
@example([[0, 1]], [(2, 1, True)], False)  # one breaks behind a token that tells nothing
@example([[1, 3, 1]], [(4, 1, True)], False)  # one breaks among the events of one token
def test_wherever_streams_are_cut_one_answer_is_told(answers, instances, wants_ids):
    """Each instance breaks after some events: no text is lost, none is told twice, and the answer ends."""
    request = asked(n=len(answers), return_token_ids=wants_ids)
    relayed, lines = RelayedStream(request), []
    for cut, size, names_none in [*instances, (None, 1, True)]:
        relayed.reset()
        for data in tell(answers, relayed.tokens, min(size, 1 if not names_none else 3), names_none)[:cut]:
            lines += relayed.push(data)[0]
            assert relayed.is_tracked
        if relayed.is_done:
            break
    assert relayed.is_done and relayed.tokens == answers
    assert lines.pop() == b"data: [DONE]\n\n"
    told = [choice for line in lines for choice in json.loads(line.removeprefix(b"data: "))["choices"]]
    for i, answer in enumerate(answers):
        mine = [choice for choice in told if choice["index"] == i]
        text = "".join(chunk for token in answer for chunk in spelled(token))
        assert "".join(choice["text"] for choice in mine) == f"echo{i}{text}"
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["length"]
        assert [token for choice in mine for token in choice.get("token_ids", [])] == (answer if wants_ids else [])


def test_a_chat_that_breaks_off_among_the_events_of_one_update_is_told_once():
    """A server tells each piece of an update in an event, and the tokens with the last of them."""

    def answering() -> ChatHandler:
        answer = ChatHandler(SimpleNamespace(config=None), b"")
        answer.request, answer.model = ChatRequest(return_token_ids=True), "m"
        answer.generation = SimpleNamespace(id="1", prompts=[SimpleNamespace(token_ids=array.array("i", [9]))])
        return answer

    first = ChoiceUpdate(0, [ReasoningDelta("think ")], [1, 2])
    second = ChoiceUpdate(0, [ReasoningDelta("end"), TextDelta("Answer")], [3, 4, 5], finish_reason="stop")
    whole = [answer for made in [answering()] for update in (first, second) for answer in made.events(update)]
    for cut in range(len(whole)):
        relayed, lines, other = RelayedStream(asked(CHAT)), [], answering()
        for data in whole[:cut]:
            lines += relayed.push(data.removeprefix(b"data: "))[0]
        relayed.reset()
        assert relayed.tokens in ([[]], [[1, 2]])
        if relayed.tokens == [[1, 2]]:
            other.skip(0, None)
        for data in [each for update in (first, second)[any(relayed.tokens) :] for each in other.events(update)]:
            lines += relayed.push(data.removeprefix(b"data: "))[0]
        deltas = [json.loads(line.removeprefix(b"data: "))["choices"][0]["delta"] for line in lines]
        told = [(name, text) for delta in deltas for name, text in delta.items() if text]
        assert told == [
            ("role", "assistant"),
            ("reasoning_content", "think "),
            ("reasoning_content", "end"),
            ("content", "Answer"),
        ]


def test_an_event_of_several_choices_goes_out_choice_by_choice():
    relayed = RelayedStream(asked(n=2))
    both = {"choices": [{"index": i, "text": f"t{i}", "token_ids": ids} for i, ids in enumerate(([5], []))]}
    [line] = relayed.push(json.dumps(both).encode())[0]
    assert b"t0" in line and b"t1" not in line and relayed.tokens == [[5], []]
    relayed.reset()
    assert relayed.push(event(1, [6], "again"))[1] == 1
    with pytest.raises(RequestFailed):
        relayed.push(b'{"choices": [{"index": 0, "token_ids": [7]}, {"index": 9}]}')
    assert relayed.tokens == [[5], [6]]


@given(st.lists(st.binary(max_size=20).map(lambda each: each.hex().encode()), max_size=6), st.data())
def test_events_are_found_however_the_bytes_come(contents, data):
    ends = [data.draw(st.sampled_from([b"\n\n", b"\r\n\r\n", b"\n: a comment\r\n\n"])) for _ in contents]
    body = b"".join(b"data: %b%b" % each for each in zip(contents, ends, strict=True))
    found, events = [], Events()
    while body:
        size = data.draw(st.integers(1, len(body)))
        found += events.push(body[:size])
        body = body[size:]
    assert found == contents


def test_an_event_takes_time_in_proportion_to_its_size():
    def seconds(size: int) -> float:
        body, events, began = b"data: %b\n\n" % (b"x" * size), Events(), time.thread_time()
        found = [each for i in range(0, len(body), 4096) for each in events.push(body[i : i + 4096])]
        assert list(map(len, found)) == [size]
        return time.thread_time() - began

    assert min(seconds(2**21) for _ in range(3)) < 64 * min(seconds(2**17) for _ in range(3))  # squares: 256


@pytest.mark.parametrize(("ids", "count"), [(None, 9), ([], 1100)])
def test_an_instance_that_tells_no_tokens_is_passed_on_and_not_resumed(ids, count):
    relayed = RelayedStream(asked())
    lines = [line for i in range(count) for line in relayed.push(event(0, ids, str(i)))[0]]
    assert not relayed.is_tracked
    assert "".join(json.loads(line.removeprefix(b"data: "))["choices"][0]["text"] for line in lines) == "".join(
        map(str, range(count))
    )


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"[]",
        b'{"choices": [5]}',
        b'{"choices": [{"index": 7}]}',
        b"\xff",
        b'{"choices": 5}',
        b'{"choices": [{"index": 0, "token_ids": ["x"]}]}',
    ],
)
def test_what_is_no_event_is_unreadable(data):
    with pytest.raises(RequestFailed):
        RelayedStream(asked()).push(data)


@pytest.mark.parametrize(("kind", "status"), [("server_error", 500), ("invalid_request_error", 400)])
def test_an_error_in_a_stream(kind, status):
    with pytest.raises(ApiError, match="m") as failed:
        RelayedStream(asked()).push(json.dumps({"error": {"message": "m", "type": kind, "code": None}}).encode())
    assert (failed.value.status, failed.value.body.type) == (status, kind)


def read_back(body) -> dict:
    """What an instance reads of it: the last of fields that have one name."""
    return json.loads(b"".join(body))


def test_what_an_instance_is_sent():
    request = asked(seed=3, n=2)
    body = read_back(request.body(None))
    assert (body["seed"], body["return_token_ids"], "resume" in body) == (3, True, False)
    body = read_back(request.body({"remote_host": "h"}, [[5], []]))
    assert body["resume"] == {"output_token_ids": [[5], []]} and body["kv_transfer_params"] == {"remote_host": "h"}
    assert 0 <= read_back(asked().body(None))["seed"] < 2**31
    body = read_back(asked(resume={"output_token_ids": [1]}, echo=True, min_tokens=3).prefill_body())
    assert body["max_tokens"] == 1 and not any(body[name] for name in ("stream", "resume", "echo", "min_tokens"))


FIELDS = st.dictionaries(
    st.sampled_from(["seed", "cache_salt", "kv_transfer_params", "stream", "input", "x", "é"]),
    st.sampled_from([None, True, "t", [], {}, [{"a": "}"}]]),
)


@given(FIELDS, st.booleans(), st.sampled_from([None, 1]), st.sampled_from([b"", b" \n"]))
def test_the_clients_fields_reach_an_instance_as_they_came(fields, escapes, indent, space):
    data = space + json.dumps(fields, ensure_ascii=escapes, indent=indent).encode() + space
    body = read_back(parse_request("/v1/responses", data, "tenant").body(None))
    salt = fields.get("cache_salt")
    expected = fields | {"cache_salt": f"tenant-{salt or ''}" if isinstance(salt, str | None) else salt}
    if "kv_transfer_params" in fields:
        expected["kv_transfer_params"] = None
    assert body == expected


def test_names_that_are_spelled_with_escapes_are_the_same_names():
    request = parse_request(
        PATH, b'{"prompt": "x", "\\u006bv_transfer_params": {"remote_host": "inside"}, "\\u006e": 2}'
    )
    assert read_back(request.body(None))["kv_transfer_params"] is None and len(request.given) == 2


def test_a_client_that_resumes_is_gone_on_with():
    request = asked(resume={"output_token_ids": [4, 5]})
    relayed = RelayedStream(request)
    relayed.push(event(0, [6], ""))
    assert read_back(request.body(None, relayed.tokens))["resume"] == {"output_token_ids": [[4, 5, 6]]}


def test_no_client_says_where_pages_are():
    request = asked(kv_transfer_params={"do_remote_prefill": True, "remote_host": "inside", "remote_port": 1})
    assert read_back(request.body(None))["kv_transfer_params"] is None
    request = asked(bootstrap_host="inside", bootstrap_port=1, bootstrap_room=7)
    for body in (request.body(None), request.prefill_body()):
        assert {read_back(body)[f"bootstrap_{name}"] for name in ("host", "port", "room")} == {None}


@pytest.mark.parametrize("padding", [0, 200_000])
def test_a_server_reads_what_the_router_says_and_not_what_its_client_said(padding):
    """Read at once or in pieces, of two fields of one name the last one holds."""
    fields = {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "inside"}, "bootstrap_room": 7}
    fields |= {"resume": {"output_token_ids": [1] * padding}, "cache_salt": "mine", "return_token_ids": False}
    request = parse_request(PATH, json.dumps({"prompt": "x", "stream": True} | fields).encode(), "tenant")
    found = read(CompletionRequest, b"".join(request.body(None, [[5, 6]])))
    assert (found.kv_transfer_params, found.bootstrap_room, found.cache_salt) == (None, None, "tenant-mine")
    assert found.return_token_ids and found.resume.output_token_ids in ([[5, 6]], [array.array("i", [5, 6])])
    found = read(CompletionRequest, b"".join(request.prefill_body()))
    assert (found.max_tokens, found.stream, found.resume, found.bootstrap_room) == (1, None, None, None)
    assert found.kv_transfer_params.remote_host is None


def test_tenants_do_not_share_salts():
    bodies = (b"{}", b'{"cache_salt": "x"}')
    found = [
        read_back(parse_request(PATH, body, tenant).body(None)) for tenant in ("a" * 64, "b" * 64) for body in bodies
    ]
    assert len({body["cache_salt"] for body in found}) == 4


def test_a_body_is_not_copied_and_its_tokens_are_counted():
    data = bytearray(b'{"prompt": [%b], "resume": {"output_token_ids": [7, 8]}}' % b", ".join([b"5"] * 100_000))
    request = parse_request(PATH, data)
    head, tail = request.body(None, [[7, 8, 9]])
    assert head.obj is data and len(tail) < 100 and request.num_bytes == 4 * 100_002
    assert request.prompt.tokens == 100_000 and len(request.prompt.keys) == 100_000 // 64


def test_what_a_server_refuses_unread_a_router_refuses_too():
    body = b'{"prompt": [%b]}' % b",".join([b"{}"] * 2**20)
    with pytest.raises(ApiError, match="brackets") as refused:
        parse_request(PATH, body)
    assert refused.value.status == 400
    with pytest.raises(ApiError, match="longer than any prompt"):
        parse_request(PATH, b'{"prompt": [%b]}' % b",".join([b"5"] * (2**20 + 1)))


@given(st.binary(max_size=30))
def test_a_body_is_read_or_refused(data):
    try:
        parse_request(PATH, data)
    except ApiError as error:
        assert error.status == 400
