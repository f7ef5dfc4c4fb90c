"""Bodies made of the API's own field names and arbitrary JSON: always an answer, never a 500."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsv3.server.protocol.anthropic import MessagesRequest
from dsv3.server.protocol.openai import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
)
from dsv3.server.protocol.responses import ResponsesRequest

ROUTES = {
    "/v1/completions": (CompletionRequest, {"prompt": [5, 6], "max_tokens": 3}),
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}),
    "/v1/responses": (ResponsesRequest, {"input": "x", "max_output_tokens": 3}),
    "/v1/messages": (MessagesRequest, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}),
    "/inference/v1/generate": (GenerateRequest, {"token_ids": [5, 6], "sampling_params": {"max_tokens": 3}}),
    "/tokenize": (TokenizeRequest, {"prompt": "x"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [5]}),
}
NUMBERS = st.integers(-(10**30), 10**30) | st.integers(-2, 40) | st.floats()
SCALARS = st.none() | st.booleans() | NUMBERS | st.text(max_size=8) | st.sampled_from(["none", "text", "user", "\0"])
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "5", "a"]), inner, max_size=4)
    ),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool"]), "content": st.text(max_size=5)},
        optional={"tool_calls": st.lists(JSON, max_size=2), "name": JSON, "reasoning_content": JSON},
    ),
    max_size=3,
)


@pytest.mark.parametrize("path", ROUTES)
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_body_gets_an_answer(server, path, data):
    model, body = ROUTES[path]
    names = data.draw(st.lists(st.sampled_from(sorted(model.__struct_fields__)), max_size=3))
    fuzz = {name: data.draw(MESSAGES | JSON if name in ("messages", "input") else JSON) for name in names}
    answer = server.http.post(path, content=json.dumps(body | fuzz), headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400, 404), (fuzz, answer.text)
    if answer.status_code != 200:
        fields = {"message", "type"} if path == "/v1/messages" else {"message", "type", "param", "code"}
        assert set(answer.json()["error"]) == fields
        assert len(answer.content) < 1000


def test_nothing_is_left_behind(server):
    server.wait_for(server.is_idle)
