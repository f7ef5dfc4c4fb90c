"""Experts of tokens over HTTP, as base64 of a .npy file; the fake engine invents the numbers."""

import base64
import io

import numpy as np
import pytest

from tests.dsv3.server import serving

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]


@pytest.fixture(scope="module")
def server(model_dir):
    with serving.running(model_dir, engine={"enable_return_routed_experts": True}) as server:
        yield server


def experts(choice: dict) -> np.ndarray:
    return np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))


def expected(tokens: int) -> np.ndarray:
    return np.arange(tokens)[:, None, None] + [[0, 1], [1, 2]]


def ask(server, path: str, **body):
    return server.http.post(path, json=body | {"return_routed_experts": True})


def test_completions_generate_and_chats_return_them(server):
    """Those of the prompt and of the answer but its last token, once for each choice."""
    body = {"prompt": PROMPT, "max_tokens": 5, "n": 2, "logprobs": 1, "return_token_ids": True}
    for choice in ask(server, "/v1/completions", **body).json()["choices"]:
        assert len(choice["logprobs"]["tokens"]) == len(choice["token_ids"]) == 5
        got = experts(choice)
        assert got.dtype == np.uint16 and np.array_equal(got, expected(len(PROMPT) + 4))
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


@pytest.mark.parametrize(
    "change", [{"stream": True}, {"resume": {"output_token_ids": [5]}, "temperature": 0}], ids=["stream", "resume"]
)
def test_what_is_refused(server, change):
    answer = ask(server, "/v1/completions", prompt=PROMPT, max_tokens=4, **change)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "return_routed_experts")


def test_nothing_is_returned_unasked(server):
    answer = server.http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4}).json()
    assert "routed_experts" not in answer["choices"][0]
