"""Anthropic's Messages API over raw HTTP; the fake engine repeats the conversation."""

import datetime
import json

import httpx
import pytest

from tests.dsv3.server.conftest import KEY
from tests.dsv3.server.events import events_of

PATH = "/v1/messages"
HEADERS = {"anthropic-version": "2023-06-01"}
INPUT = {"city": '日本 "x"', "days": [1, 2]}
TOOLS = [
    {"name": "get_weather", "description": "é", "input_schema": {"type": "object", "properties": {"city": {}}}},
    {"name": "f", "type": "custom", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}},
]
HELLO = {"max_tokens": 200, "messages": [{"role": "user", "content": "Hello there"}]}
CALLED = {
    "max_tokens": 400,
    "tools": TOOLS,
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "because"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "of this", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "0", "name": "get_weather", "input": INPUT},
                {"type": "tool_use", "id": "1", "name": "f", "input": {}},
            ],
        },
    ],
}


def ask(server, body, **headers):
    return server.http.post(PATH, json={"model": "tiny"} | body, headers=HEADERS | headers)


def test_a_text(server):
    answer = ask(server, HELLO).json()
    assert answer["id"].startswith("msg_") and (answer["type"], answer["role"]) == ("message", "assistant")
    assert answer["content"] == [{"type": "text", "text": "Hello there"}]
    assert (answer["model"], answer["stop_reason"], answer["stop_sequence"]) == ("tiny", "end_turn", None)
    usage = answer["usage"]
    assert usage["input_tokens"] > 0 and usage["output_tokens"] > 0 and usage["cache_read_input_tokens"] == 0


def test_stop_reasons(server):
    assert ask(server, HELLO | {"max_tokens": 3}).json()["stop_reason"] == "max_tokens"
    answer = ask(server, HELLO | {"stop_sequences": ["xx", "th"]}).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "th")
    assert answer["content"] == [{"type": "text", "text": "Hello "}]


def test_system_prompts_and_continued_answers(server):
    """A last message of the assistant is continued."""
    for system in ("Be brief.", [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]):
        assert ask(server, HELLO | {"system": system}).json()["content"][0]["text"] == "Be brief.Hello there"
    messages = [*HELLO["messages"], {"role": "assistant", "content": "Well, "}]
    assert ask(server, HELLO | {"messages": messages}).json()["content"][0]["text"] == "Hello thereWell, "


def test_thinking_and_calls(tool_server):
    answer = ask(tool_server, CALLED).json()
    thought, text, *calls = answer["content"]
    assert thought == {"type": "thinking", "thinking": "[get_weather][f]becauseof this", "signature": ""}
    assert text == {"type": "text", "text": "Let me see."}
    assert [(call["type"], call["name"], call["input"]) for call in calls] == [
        ("tool_use", "get_weather", INPUT),
        ("tool_use", "f", {}),
    ]
    assert len({call["id"] for call in calls}) == 2 and answer["stop_reason"] == "tool_use"


def test_tool_results_become_separate_messages(tool_server):
    results = [
        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "two"}]},
        {"type": "tool_result", "tool_use_id": "0", "content": "one"},
        {"type": "text", "text": " and you?"},
    ]
    messages = [*CALLED["messages"], {"role": "user", "content": results}]
    answer = ask(tool_server, CALLED | {"messages": messages, "tools": None, "thinking": {"type": "disabled"}}).json()
    assert answer["content"][-1]["text"].endswith("onetwo and you?"), answer  # in the order of the calls


def test_a_stream_joins_to_the_complete_message(tool_server):
    events = events_of(ask(tool_server, CALLED | {"stream": True}))
    assert all(name == event["type"] for name, event in events)
    start, *middle, delta, stop = [event for _, event in events]
    assert start["type"] == "message_start" and stop == {"type": "message_stop"}
    assert start["message"]["content"] == [] and start["message"]["stop_reason"] is None
    blocks = {}
    for event in middle:  # one block at a time
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks[event["index"]] = event["content_block"] | {"text_so_far": "", "open": True}
            case "content_block_delta":
                assert blocks[event["index"]]["open"] and event["index"] == len(blocks) - 1
                [text] = [value for name, value in event["delta"].items() if name != "type"]
                blocks[event["index"]]["text_so_far"] += text
            case "content_block_stop":
                blocks[event["index"]]["open"] = False
    assert not any(block.pop("open") for block in blocks.values())
    whole = ask(tool_server, CALLED).json()
    for block, wanted in zip(blocks.values(), whole["content"], strict=True):
        text = block.pop("text_so_far")
        assert block["type"] == wanted["type"]
        if block["type"] == "tool_use":
            assert (block["name"], block["input"], json.loads(text)) == (wanted["name"], {}, wanted["input"])
        else:
            assert text == wanted[block["type"]]
    assert (delta["type"], delta["delta"]["stop_reason"]) == ("message_delta", "tool_use")
    assert delta["usage"] == whole["usage"]


def test_one_call_and_no_calls(tool_server):
    one = ask(tool_server, CALLED | {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}).json()
    assert [block["name"] for block in one["content"] if block["type"] == "tool_use"] == ["get_weather"]
    none = ask(tool_server, CALLED | {"tool_choice": {"type": "none"}}).json()
    assert not any(block["type"] == "tool_use" for block in none["content"])


def test_tokens_are_counted(tool_server):
    body = {name: CALLED[name] for name in ("tools", "thinking", "messages")}
    counted = tool_server.http.post(f"{PATH}/count_tokens", json=body).json()
    usage = ask(tool_server, CALLED).json()["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


@pytest.mark.parametrize(
    "change, named",
    [
        ({"max_tokens": None}, "max_tokens: "),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "user"}]}, "messages[0].content: "),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role: "),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type: "),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages[0].content[0].tool_use_id: ",
        ),
        ({"messages": [{"role": "user", "content": "a\0"}]}, "messages[0]: "),
        ({"stop_sequences": [""]}, "stop_sequences[0]: "),
        ({"temperature": -1}, "temperature: "),
        ({"tools": [{"name": "f"}]}, "tools[0]: "),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name: "),
        ({"tools": [{"type": "web_search_20250305", "name": "w", "input_schema": {}}]}, "tools[0].type: "),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name: "),
        ({"mcp_servers": [{}]}, "mcp_servers "),
        ({"resume": {"output_token_ids": [5]}}, "resume "),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors_have_anthropics_format_and_name_the_field(tool_server, change, named):
    answer = ask(tool_server, HELLO | change)
    error = answer.json()
    assert (answer.status_code, error["type"], set(error["error"])) == (400, "error", {"type", "message"})
    assert error["error"]["type"] == "invalid_request_error"
    assert error["error"]["message"].startswith(named), error


def test_errors_of_other_kinds(server, locked_server):
    assert ask(server, HELLO | {"model": "claude"}).json()["error"]["type"] == "not_found_error"
    for method, path, kind in (("GET", PATH, "invalid_request_error"), ("POST", f"{PATH}/batches", "not_found_error")):
        assert server.http.request(method, path).json()["error"]["type"] == kind
    assert server.http.post(PATH, content=b"{", headers={"content-type": "application/json"}).status_code == 400
    refused = ask(locked_server, HELLO)
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    assert ask(locked_server, HELLO, **{"x-api-key": KEY}).status_code == 200
    assert ask(locked_server, HELLO, **{"x-api-key": "wrong"}).status_code == 401
    both = {"x-api-key": KEY, "authorization": f"Bearer {KEY}"}
    assert ask(locked_server, HELLO, **both).status_code == 401  # two different keys are ambiguous


def test_a_full_queue(slow_server):
    """503 with Retry-After, in this API's format."""
    body = {"prompt": [5, 6], "n": 5, "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{slow_server.url}/v1/completions", json=body) as answer:
        parts = answer.iter_raw()
        next(parts)
        refused = ask(slow_server, HELLO)
    assert (refused.status_code, refused.json()["error"]["type"]) == (503, "overloaded_error")
    assert int(refused.headers["retry-after"]) >= 1
    slow_server.wait_for(slow_server.is_idle)


def test_models_in_anthropics_format(tool_server):
    """`models.retrieve` and `models.list`; errors of every route have Anthropic's format."""
    model = tool_server.http.get("/v1/models/tiny", headers=HEADERS).json()
    assert (model["id"], model["type"], model["display_name"]) == ("tiny", "model", "tiny")
    assert datetime.datetime.fromisoformat(model["created_at"]).timestamp() == model["created"]
    models = tool_server.http.get("/v1/models", headers=HEADERS).json()
    assert (models["has_more"], models["first_id"], models["data"]) == (False, "tiny", [model])
    for method, path, status, kind in (
        ("GET", "/v1/models/nobody", 404, "not_found_error"),
        ("GET", "/v1/organizations/me", 404, "not_found_error"),
        ("GET", "/v1/files", 404, "not_found_error"),
        ("DELETE", "/v1/models/tiny", 405, "invalid_request_error"),
    ):
        answer = tool_server.http.request(method, path, headers=HEADERS)
        assert (answer.status_code, answer.json()["type"], answer.json()["error"]["type"]) == (status, "error", kind)
        assert "type" not in tool_server.http.request(method, path).json()
