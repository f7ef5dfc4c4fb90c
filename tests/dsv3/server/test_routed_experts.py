"""Experts and masks of tokens over HTTP, as base64 of files of numpy; the fake engine invents the numbers."""

import base64
import io
import json

import httpx
import numpy as np
import pytest

from dsv3.server.protocol.errors import ApiError
from dsv3.server.serving.handler import bound_arrays
from tests.dsv3.server import serving
from tests.dsv3.server.events import events_of

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]


@pytest.fixture(scope="module")
def server(model_dir):
    options = {"enable_return_routed_experts": True, "enable_return_sampling_mask": True}
    more = {"options": {"enable_weight_updates": True}, "factory_options": {"transfer_address": "host:7000"}}
    with serving.running(model_dir, engine=options, **more) as server:
        yield server


def decoded(text: str):
    return np.load(io.BytesIO(base64.b64decode(text)))


def experts(choice: dict) -> np.ndarray:
    return decoded(choice["routed_experts"])


def masks(choice: dict) -> list[list[int]]:
    """The tokens that each token was drawn from."""
    with decoded(choice["sampling_mask"]) as file:
        return [ids.tolist() for ids in np.split(file["ids"], np.cumsum(file["counts"])[:-1])]


def expected(tokens: int) -> np.ndarray:
    return np.arange(tokens)[:, None, None] + [[0, 1], [1, 2]]


def ask(server, path: str, **body):
    return server.http.post(path, json=body | {"return_routed_experts": True, "return_sampling_mask": True})


def test_completions_generate_and_chats_return_them(server):
    """Those of the prompt and of the answer but its last token, once for each choice."""
    body = {"prompt": PROMPT, "max_tokens": 5, "n": 2, "logprobs": 1, "return_token_ids": True}
    for choice in ask(server, "/v1/completions", **body).json()["choices"]:
        assert len(choice["logprobs"]["tokens"]) == len(choice["token_ids"]) == 5
        got = experts(choice)
        assert got.dtype == np.uint16 and np.array_equal(got, expected(len(PROMPT) + 4))
        assert masks(choice) == [[token, token + 1] for token in choice["token_ids"]]
    sampling = {"max_tokens": 5, "return_routed_experts": True, "logprobs": 0, "prompt_logprobs": 0}
    answer = server.http.post("/inference/v1/generate", json={"token_ids": PROMPT, "sampling_params": sampling}).json()
    assert len(answer["prompt_logprobs"]) == len(PROMPT) and len(answer["choices"][0]["logprobs"]["content"]) == 5
    assert np.array_equal(experts(answer["choices"][0]), expected(len(PROMPT) + 4))
    messages = [{"role": "user", "content": "x"}]
    chat = ask(server, "/v1/chat/completions", messages=messages, max_tokens=4, logprobs=True).json()
    assert np.array_equal(experts(chat["choices"][0]), expected(chat["usage"]["prompt_tokens"] + 3))


def test_a_stop_string_ends_them(server):
    """The engine may have computed more than the response has."""
    words = server.http.post("/detokenize", json={"tokens": [7]}).json()["prompt"]
    body = {"prompt": PROMPT, "max_tokens": 100, "stop": [words], "return_token_ids": True}
    [choice] = ask(server, "/v1/completions", **body).json()["choices"]
    assert choice["stop_reason"] == words
    assert np.array_equal(experts(choice), expected(len(PROMPT) + len(choice["token_ids"]) - 1))
    assert len(masks(choice)) == len(choice["token_ids"])


def test_an_aborted_answer_has_those_of_its_tokens(server):
    """A partial rollout, which a trainer continues with other weights."""
    sampling = {"max_tokens": 1500, "return_routed_experts": True}
    body, choices = {"token_ids": PROMPT, "sampling_params": sampling, "stream": True}, []
    with server.http.stream("POST", "/inference/v1/generate", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                choices.append(json.loads(line.removeprefix("data: "))["choices"][0])
            if len(choices) == 5:
                httpx.post(f"{server.url}/pause_generation", json={"mode": "abort"}).raise_for_status()
    server.http.post("/continue_generation", json={}).raise_for_status()
    assert choices[-1]["finish_reason"] == "abort"
    tokens = sum(len(each.get("token_ids") or ()) for each in choices)
    found = np.concatenate([experts(each) for each in choices if "routed_experts" in each])
    assert np.array_equal(found, expected(len(PROMPT) + tokens - 1))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate"])
def test_events_of_a_stream_have_them_in_parts(server, path):
    """Joined, they are those of the whole response; a part that comes again, as of another engine, is left out."""
    asks = {"max_tokens": 5, "return_routed_experts": True, "return_sampling_mask": True, "return_token_ids": True}
    body = {
        "/v1/completions": asks | {"prompt": PROMPT},
        "/v1/chat/completions": asks | {"messages": [{"role": "user", "content": "x"}]},
        "/inference/v1/generate": {"token_ids": PROMPT, "sampling_params": asks},
    }[path]
    events = events_of(server.http.post(path, json=body | {"stream": True}))
    choices = [event["choices"][0] for _, event in events if event.get("choices")]
    found = np.concatenate([experts(each) for each in choices if "routed_experts" in each])
    assert len(found) > 5 and np.array_equal(found, expected(len(found)))
    tokens = [token for each in choices for token in each.get("token_ids") or []]
    kept = [mask for each in choices if "sampling_mask" in each for mask in masks(each)]
    assert kept == [[token, token + 1] for token in tokens] and len(kept) == 5


def test_a_prefill_instances_choices_travel_in_its_transfer_params(server):
    """The second request refuses those that are not of whole tokens, and needs them."""
    first = {"prompt": PROMPT, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    params = ask(server, "/v1/completions", **first).json()["kv_transfer_params"]
    ids = np.frombuffer(base64.b64decode(params["remote_routed_experts"]), "<u2").reshape(-1, 2, 2)
    assert np.array_equal(ids, expected(len(PROMPT)))
    sampling = {"max_tokens": 1, "return_routed_experts": True}
    tokens = {"token_ids": PROMPT, "sampling_params": sampling, "kv_transfer_params": {"do_remote_decode": True}}
    answer = server.http.post("/inference/v1/generate", json=tokens).json()
    assert answer["kv_transfer_params"] == params and np.array_equal(experts(answer["choices"][0]), ids)
    second = {"prompt": PROMPT, "max_tokens": 4, "kv_transfer_params": params}
    [choice] = ask(server, "/v1/completions", **second).json()["choices"]
    assert np.array_equal(experts(choice), expected(len(PROMPT) + 3))
    for text, words in (("QUJD", "whole tokens"), ("x", "not base64"), ("", "without the experts of its tokens")):
        params["remote_routed_experts"] = text
        answer = ask(server, "/v1/completions", **second)
        assert answer.status_code == 400 and words in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", ["return_routed_experts", "return_sampling_mask"])
def test_what_another_engine_has_computed_is_not_known(server, name):
    body = {"prompt": PROMPT, "max_tokens": 4, "resume": {"output_token_ids": [5]}, "temperature": 0, name: True}
    answer = server.http.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize("name, limit", [("return_routed_experts", 2**30), ("return_sampling_mask", 2**28)])
def test_a_whole_response_has_a_bound(name, limit):
    bound_arrays(name, limit)
    with pytest.raises(ApiError, match=f"{name}: more than {limit} bytes") as raised:
        bound_arrays(name, limit + 1)
    assert (raised.value.status, raised.value.body.param) == (400, name)


def test_nothing_is_returned_unasked(server):
    answer = server.http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4}).json()
    assert not {"routed_experts", "sampling_mask"} & answer["choices"][0].keys()
