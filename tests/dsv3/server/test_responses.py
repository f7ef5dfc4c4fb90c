"""OpenAI's Responses API over raw HTTP, and by OpenAI's client; the fake engine repeats the conversation."""

import openai
import pytest

from tests.dsv3.server.events import events_of

PATH = "/v1/responses"
ARGUMENTS = ['{"city": "日本 \\"x\\"", "days": [1, 2]}', "{}"]
TOOLS = [
    {"type": "function", "name": "get_weather", "parameters": {"properties": {"city": {"type": "string"}}}},
    {"type": "function", "name": "f", "strict": False},
]
CALLED = {
    "tools": TOOLS,
    "chat_template_kwargs": {"thinking": True},
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "because"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "of this"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
        *(
            {"type": "function_call", "id": f"fc_{i}", "call_id": str(i), "name": tool["name"], "arguments": text}
            for i, (tool, text) in enumerate(zip(TOOLS, ARGUMENTS, strict=True))
        ),
    ],
}


def ask(server, body):
    return server.http.post(PATH, json={"model": "tiny"} | body)


def test_a_text(server):
    answer = ask(server, {"input": "Hello there", "instructions": "Be brief.", "metadata": {"a": "b"}}).json()
    assert answer["id"].startswith("resp_") and (answer["object"], answer["status"]) == ("response", "completed")
    [item] = answer["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [
        {"type": "output_text", "text": "Be brief.Hello there", "annotations": [], "logprobs": []}
    ]
    assert (answer["store"], answer["metadata"], answer["instructions"]) == (False, {"a": "b"}, "Be brief.")
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > 0
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}


def test_an_incomplete_response(server):
    answer = ask(server, {"input": "Hello there", "max_output_tokens": 3}).json()
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["output"][0]["status"] == "incomplete"


def test_reasoning_and_calls(tool_server):
    answer = ask(tool_server, CALLED).json()
    reasoning, message, *calls = answer["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "[get_weather][f]becauseof this"}]
    assert (reasoning["type"], reasoning["summary"]) == ("reasoning", [])
    assert message["content"][0]["text"] == "Let me see."
    assert [(c["type"], c["name"], c["arguments"]) for c in calls] == [
        ("function_call", "get_weather", ARGUMENTS[0]),
        ("function_call", "f", ARGUMENTS[1]),
    ]
    assert len({c["call_id"] for c in calls} | {item["id"] for item in answer["output"]}) == 6
    assert 0 < answer["usage"]["output_tokens_details"]["reasoning_tokens"] < answer["usage"]["output_tokens"]


def test_output_items_can_be_sent_back(tool_server):
    first = ask(tool_server, CALLED).json()
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": item["name"]}
        for item in first["output"]
        if item["type"] == "function_call"
    ]
    again = ask(tool_server, {"input": [*CALLED["input"][:1], *first["output"], *results]}).json()
    assert again["status"] == "completed"
    assert again["output"][-1]["content"][0]["text"].endswith("get_weatherf"), again


def test_a_stream_joins_to_the_complete_response(tool_server):
    events = events_of(ask(tool_server, CALLED | {"stream": True}))
    assert all(name == event["type"] for name, event in events)
    assert [event["sequence_number"] for _, event in events] == list(range(len(events)))
    (_, created), (_, in_progress), *middle = events
    assert (created["type"], in_progress["type"]) == ("response.created", "response.in_progress")
    assert (created["response"]["status"], created["response"]["output"]) == ("in_progress", [])
    (_, completed) = middle.pop()
    items, parts, deltas, done = [], [], {}, []
    for kind, event in middle:
        short = kind.removeprefix("response.")
        if short == "output_item.added":
            assert event["output_index"] == len(items) == len(done) and event["item"]["status"] == "in_progress"
            items.append(event["item"])
        elif short == "content_part.added":
            parts.append(event["part"]["type"])
        elif short.endswith(".delta"):
            assert event["item_id"] == items[-1]["id"]
            deltas[event["output_index"]] = deltas.get(event["output_index"], "") + event["delta"]
        elif short in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == deltas[event["output_index"]]
        elif short == "function_call_arguments.done":
            assert event["arguments"] == deltas[event["output_index"]]
        elif short == "output_item.done":
            done.append(event["item"])
        else:
            assert short == "content_part.done"
    assert parts == ["reasoning_text", "output_text"]
    assert completed["type"] == "response.completed" and completed["response"]["output"] == done
    whole = ask(tool_server, CALLED).json()

    def without_ids(response):
        items = [{k: v for k, v in i.items() if k not in ("id", "call_id")} for i in response["output"]]
        return {k: v for k, v in response.items() if k not in ("id", "created_at", "output")} | {"output": items}

    assert without_ids(completed["response"]) == without_ids(whole)


def test_openais_client_joins_the_stream_itself(tool_server):
    body = {name: CALLED[name] for name in ("input", "tools")}
    with (
        openai.OpenAI(base_url=f"{tool_server.url}/v1", api_key="none", max_retries=0) as client,
        client.responses.stream(model="tiny", **body) as stream,
    ):
        kinds, final = [event.type for event in stream], stream.get_final_response()
    assert kinds[-1] == "response.completed"
    assert [item.arguments for item in final.output if item.type == "function_call"] == ARGUMENTS


def test_an_incomplete_stream(server):
    kind, last = events_of(ask(server, {"input": "Hello there", "max_output_tokens": 3, "stream": True}))[-1]
    assert (kind, last["response"]["status"]) == ("response.incomplete", "incomplete")


@pytest.mark.parametrize(
    "change, named, code",
    [
        ({"input": None}, "input: ", None),
        ({"input": []}, "input: ", None),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type: ", None),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type: ", None),
        ({"input": [{"role": "user"}]}, "input[0].content: ", None),
        ({"input": [{"type": "function_call", "call_id": "1"}]}, "input[0].name: ", None),
        ({"input": "a\0"}, "body: ", None),
        ({"max_output_tokens": 0}, "max_output_tokens: ", None),
        ({"max_output_tokens": 10**7}, "This model's maximum context length", "context_length_exceeded"),
        ({"temperature": -1}, "temperature: ", None),
        ({"store": True}, "store: this server stores no responses", "unsupported_parameter"),
        ({"previous_response_id": "resp_1"}, "previous_response_id: this server stores no", "unsupported_parameter"),
        ({"resume": {"output_token_ids": [5]}}, "resume: this API's events have no token ids", "unsupported_parameter"),
        ({"conversation": {"id": "x"}}, "conversation: ", "unsupported_parameter"),
        ({"background": True}, "background: ", "unsupported_parameter"),
        ({"truncation": "auto"}, "truncation: ", "unsupported_parameter"),
        ({"include": ["message.output_text.logprobs"]}, "include: ", "unsupported_parameter"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type: ", None),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name: ", None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_requests(tool_server, change, named, code):
    answer = ask(tool_server, {"input": "Hello"} | change)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["message"].startswith(named), error["code"]) == (True, code), error
    if code is None and named != "body: ":
        assert error["param"] == named.partition(":")[0].partition("[")[0]


def test_fields_without_effect_are_accepted(server):
    body = {
        "input": "Hello",
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "truncation": "disabled",
        "service_tier": "auto",
        "prompt_cache_key": "x",
    }
    assert ask(server, body).status_code == 200
