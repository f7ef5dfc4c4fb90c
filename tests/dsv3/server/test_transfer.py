"""Disaggregated prefill: vLLM's parameters over HTTP, and SGLang's."""

import asyncio
import json
from types import SimpleNamespace

import msgspec
import pytest

from dsv3.sampling_params import SamplingParams
from dsv3.scheduler.request import EngineRequest, RequestRules, prepare
from dsv3.server.engine.messages import EngineInfo
from dsv3.server.protocol.errors import ApiError
from dsv3.server.protocol.openai import ChatRequest, CompletionRequest
from dsv3.server.serving.generate import GenerateHandler
from dsv3.server.serving.kv_transfer import parse_bootstrap, transfer_params

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
REQUEST = {"prompt": "def add(a, b):", "max_tokens": 1}
FIRST = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_response_has_the_address_of_its_pages(server, path):
    request = REQUEST if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    answer = server.http.post(path, json=request | {"kv_transfer_params": FIRST}).json()
    params = answer["kv_transfer_params"]
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "print",
        "remote_host": "fd00::1",
        "remote_port": 7000,
        "remote_num_tokens": answer["usage"]["prompt_tokens"],
        "tp_size": 1,
        "remote_addresses": ["[fd00::1]:7000", "host1:7001"],
    }
    second = server.http.post(path, json=request | {"kv_transfer_params": params | {"of_a_newer_router": 1}})
    assert second.status_code == 200 and "kv_transfer_params" not in second.json()
    assert "kv_transfer_params" not in server.http.post(path, json=request).json()


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"do_remote_prefill": True}, "needs remote_host and remote_port"),
        ({"do_remote_prefill": True, "remote_host": "a b", "remote_port": 7}, "needs remote_host and remote_port"),
        ({"do_remote_prefill": True, "remote_host": "h/../x", "remote_port": 7}, "needs remote_host"),
        ({"do_remote_prefill": True, "remote_host": "a..b", "remote_port": 7}, "needs remote_host"),
        ({"do_remote_prefill": True, "remote_host": "h", "remote_port": 70000}, "remote_port"),
        (
            {"do_remote_prefill": True, "remote_addresses": ["h:7", "a b:7"]},
            "remote_addresses: 'a b:7' has no valid host",
        ),
        ({"do_remote_prefill": True, "remote_addresses": ["h"]}, "remote_addresses: 'h' is not HOST:PORT"),
        ({"do_remote_prefill": True, "remote_addresses": ["h:7,h:8"]}, "remote_addresses: 'h:7,h:8' has no valid host"),
        ({"do_remote_prefill": True, "remote_addresses": ["h:7"] * 65}, "remote_addresses"),
        ({"do_remote_decode": 7}, "do_remote_decode"),
        ("x", "kv_transfer_params"),
    ],
)
def test_bad_parameters_are_refused_by_name(server, params, words):
    answer = server.http.post(COMPLETIONS, json=REQUEST | {"kv_transfer_params": params})
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]


def test_a_stream_cannot_have_them(server):
    answer = server.http.post(COMPLETIONS, json=REQUEST | {"stream": True, "kv_transfer_params": FIRST})
    assert answer.status_code == 400 and "without stream" in answer.json()["error"]["message"]


@pytest.mark.parametrize("params", [FIRST, {"do_remote_prefill": True, "remote_host": "h", "remote_port": 7}])
def test_a_server_without_transfer_names_the_flag(slow_server, params):
    answer = slow_server.http.post(COMPLETIONS, json=REQUEST | {"kv_transfer_params": params})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "kv_transfer_params" and "start it with" in answer.text


COMPLETIONS = "/v1/completions"
BODY = {"prompt": "def add(a, b):", "max_tokens": 3}
HALF = {"bootstrap_host": "10.0.0.7", "bootstrap_port": 7001, "bootstrap_room": 2**63 - 1}


def info(*, prefills: bool = False, fetches: bool = True) -> EngineInfo:
    rules = RequestRules(vocab_size=500, max_model_len=512, prefills_only=prefills)
    return EngineInfo(rules, 4, 100, fetches_pages=fetches)


def test_a_prefill_instance_always_returns_its_address():
    """smg 1.13 takes us for vLLM: it requests one token, and looks for the parameters in the response."""
    reached = msgspec.structs.replace(info(prefills=True), transfer_address="h:7")
    assert transfer_params(None, reached, 9, streams=False)["remote_host"] == "h"
    assert transfer_params(None, reached, 9, streams=True) is None
    both = msgspec.structs.replace(info(), transfer_address="h:7")
    assert transfer_params(None, both, 9, streams=False) is None


def prepared(count: int) -> list:
    rules = info().rules
    one = EngineRequest(request_id=0, prompt_token_ids=[1, 2], sampling=SamplingParams())
    return [prepare(msgspec.structs.replace(one, request_id=i), rules) for i in range(count)]


def completion(**fields) -> CompletionRequest:
    return msgspec.convert(BODY | fields, CompletionRequest)


def test_the_decode_instance_gets_address_and_bootstrap_room():
    bootstrap = parse_bootstrap(completion(**HALF), info())
    assert [r.pages_from for r in bootstrap.with_rooms(prepared(1))] == [f"10.0.0.7:7001#{2**63 - 1}"]
    assert [r.bootstrap_room for r in bootstrap.with_rooms(prepared(1))] == [None]


def test_sampling_parameters_name_no_host():
    """A router clears `bootstrap_*` of a request, but not in its `sampling_params`."""

    async def read_body(nbytes, work):
        return work()

    body = json.dumps({"token_ids": [5], "sampling_params": HALF | {"max_tokens": 3}}).encode()
    request = asyncio.run(GenerateHandler(SimpleNamespace(read_body=read_body), body).read())
    assert request.max_tokens == 3 and parse_bootstrap(request, info()) is None


def test_the_prefill_instance_generates_one_token_and_gets_the_bootstrap_room():
    """It needs no address: its router may not know one, and it fetches nothing."""
    request = completion(n=3, best_of=3, min_tokens=2, bootstrap_room=5, bootstrap_host="x", bootstrap_port=None)
    bootstrap = parse_bootstrap(request, info(prefills=True, fetches=False))
    assert (request.max_tokens, request.n, request.best_of, request.min_tokens) == (1, None, None, None)
    [request] = bootstrap.with_rooms(prepared(1))
    assert (request.bootstrap_room, request.pages_from) == (5, "")
    chat = msgspec.convert({"max_completion_tokens": 9, "bootstrap_room": [5, 6], "n": 2}, ChatRequest)
    bootstrap = parse_bootstrap(chat, info(prefills=True))
    bootstrap.check(1, False)
    assert (chat.max_tokens, chat.max_completion_tokens, chat.n) == (1, None, None)
    assert [r.bootstrap_room for r in bootstrap.with_rooms(prepared(1))] == [5]


def test_each_prompt_of_a_batch_has_its_own_bootstrap_room():
    fields = {"bootstrap_host": ["a", "fd00::1"], "bootstrap_port": [7, 8], "bootstrap_room": [1, 2]}
    bootstrap = parse_bootstrap(completion(prompt=["x", "y"], **fields), info())
    bootstrap.check(2, False)
    assert [r.pages_from for r in bootstrap.with_rooms(prepared(2))] == ["a:7#1", "[fd00::1]:8#2"]
    bootstrap = parse_bootstrap(completion(prompt=["x", "y"], **HALF), info(prefills=True))
    bootstrap.check(2, False)
    assert {r.bootstrap_room for r in bootstrap.with_rooms(prepared(2))} == {2**63 - 1}


def test_a_body_without_bootstrap_fields():
    assert parse_bootstrap(completion(), info()) is None
    nulls = dict.fromkeys(HALF)
    assert parse_bootstrap(completion(**nulls), info()) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"bootstrap_port": None}, "bootstrap_port"),
        ({"bootstrap_host": None}, "bootstrap_host"),
        ({"bootstrap_host": "a b"}, "bootstrap_host"),
        ({"bootstrap_host": "h/../x"}, "bootstrap_host"),
        ({"bootstrap_host": "a..b"}, "bootstrap_host"),
        ({"bootstrap_room": []}, "bootstrap_room"),
        ({"bootstrap_room": [1, 2], "bootstrap_port": [1, 2, 3]}, "bootstrap_port"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "bootstrap_room"),
    ],
)
def test_missing_and_contradicting_fields_are_refused_by_name(fields, param):
    with pytest.raises(ApiError) as caught:
        parse_bootstrap(completion(**(HALF | fields)), info())
    assert caught.value.body.param == param


def test_an_instance_without_transfer_names_the_flags():
    with pytest.raises(ApiError, match="start it with --role"):
        parse_bootstrap(completion(**HALF), info(fetches=False))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"bootstrap_room": -1}, "bootstrap_room"),
        ({"bootstrap_room": 2**63}, "bootstrap_room"),
        ({"bootstrap_room": "1"}, "bootstrap_room"),
        ({"bootstrap_port": 70000}, "bootstrap_port"),
        ({"bootstrap_host": 7}, "bootstrap_host"),
        ({"prompt": ["a", "b"], "bootstrap_room": [1, 2, 3]}, "3 numbers for 2 prompts"),
        ({"resume": {"output_token_ids": [4]}}, "cannot be combined with resume"),
    ],
)
def test_invalid_bootstrap_fields(server, fields, words):
    answer = server.http.post(COMPLETIONS, json=BODY | HALF | fields)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]


def test_a_server_answers_a_body_with_bootstrap_fields(server):
    answer = server.http.post(COMPLETIONS, json=BODY | HALF)
    assert answer.status_code == 200 and answer.json() == answer.json() | {"object": "text_completion"}
