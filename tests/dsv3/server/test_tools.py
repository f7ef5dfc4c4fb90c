"""Tool calls over HTTP, with OpenAI's own client; the fake engine repeats the conversation with its calls."""

import asyncio
import contextlib
import json
import re
from types import SimpleNamespace

import openai
import pytest

from dsv3.server.protocol.errors import ApiError
from dsv3.server.protocol.openai import ChatRequest, ResponseFormat
from dsv3.server.serving import prompts
from dsv3.server.serving.prompts import read_tools
from dsv3.text.parsers import Parsers
from tests.dsv3.server import serving
from tests.dsv3.text import encoders, tiny
from tests.dsv3.text.dialects import tokenizer, write

CHAT = "/v1/chat/completions"
ARGUMENTS = ['{"city": "日本 \\"x\\"", "days": [1, 2]}', "{}"]
CALLS = [
    {"id": str(i), "type": "function", "function": {"name": name, "arguments": text}}
    for i, (name, text) in enumerate(zip(["get_weather", "f"], ARGUMENTS, strict=True))
]
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "é", "parameters": {"properties": {"city": {"type": "string"}}}},
}
TOOLS = [WEATHER, {"type": "function", "function": {"name": "f"}}]
MESSAGES = [
    {"role": "user", "content": "because"},
    {"role": "assistant", "content": "Let me see.", "reasoning_content": "of this", "tool_calls": CALLS},
]
THINKING = {"chat_template_kwargs": {"thinking": True}}


@pytest.fixture
def client(tool_server):
    with openai.OpenAI(base_url=f"{tool_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client, **settings):
    settings = {"extra_body": THINKING} | settings
    return client.chat.completions.create(model="tiny", messages=MESSAGES, tools=TOOLS, **settings)


def streamed(client, index=0, **settings):
    """Content, reasoning, calls and finish reason, joined from the events of one choice."""
    content, reasoning, calls, reason = "", "", {}, None
    for event in ask(client, stream=True, **settings):
        for choice in (c for c in event.choices if c.index == index):
            delta, reason = choice.delta, choice.finish_reason
            content += delta.content or ""
            reasoning += getattr(delta, "reasoning_content", None) or ""
            for part in delta.tool_calls or []:
                if part.index not in calls:
                    assert (part.type, part.function.arguments, bool(part.id)) == ("function", "", True)
                    calls[part.index] = [part.function.name, ""]
                else:
                    assert (part.id, part.type, part.function.name) == (None, None, None)
                calls[part.index][1] += part.function.arguments
    return content, reasoning, [tuple(calls[i]) for i in sorted(calls)], reason


def test_calls(client):
    answer = ask(client)
    [choice] = answer.choices
    message = choice.message
    assert (message.reasoning_content, message.content) == ("[get_weather][f]becauseof this", "Let me see.")
    assert [(c.function.name, c.function.arguments) for c in message.tool_calls] == [
        ("get_weather", ARGUMENTS[0]),
        ("f", ARGUMENTS[1]),
    ]
    assert json.loads(message.tool_calls[0].function.arguments)["days"] == [1, 2]
    ids = [call.id for call in message.tool_calls]
    assert len(set(ids)) == 2 and all(re.fullmatch("call_[0-9a-f]{24}", each) for each in ids)
    assert {call.type for call in message.tool_calls} == {"function"}
    assert (choice.finish_reason, choice.stop_reason) == ("tool_calls", None)
    assert 0 < answer.usage.completion_tokens_details.reasoning_tokens < answer.usage.completion_tokens


def test_escaped_markers_of_a_message_make_no_calls(tmp_path):
    """The template's markers stay special tokens; those in a message are text, in prompt and answer."""
    spelled = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    messages = [{"role": "user", "content": spelled}, *MESSAGES[1:]]
    with serving.running(write(tmp_path), options={"escape_special_tokens": True}) as server:
        answer = server.http.post(CHAT, json={"messages": messages, "tools": TOOLS} | THINKING).json()
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"] == f"[get_weather][f]{spelled}of this"
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ARGUMENTS


def test_content_is_null_beside_calls_alone(client):
    messages = [{"role": "assistant", "tool_calls": CALLS[1:]}]
    settings = {"messages": messages, "tools": TOOLS, "reasoning_effort": "low"}  # the template writes no tools then
    message = client.chat.completions.create(model="tiny", **settings).choices[0].message
    assert (message.content, len(message.tool_calls)) == (None, 1)
    text = tool_free(client, messages)
    assert (text.content, text.tool_calls) == ("", None)


def tool_free(client, messages, **settings):
    answer = client.chat.completions.create(model="tiny", messages=messages, **settings)
    assert answer.choices[0].finish_reason == "stop"
    return answer.choices[0].message


def test_a_message_with_calls_can_be_sent_back(client):
    """A message of calls, as a client stores it, followed by the results."""
    message = ask(client).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls]
    messages = [*MESSAGES[:1], message.model_dump(exclude_none=True), *results[::-1]]
    again = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS).choices[0].message
    assert [call.function.arguments for call in again.tool_calls] == ARGUMENTS


def test_a_stream_joins_to_the_complete_message(client):
    whole = ask(client).choices[0].message
    content, reasoning, calls, reason = streamed(client)
    assert (content, reasoning, reason) == (whole.content, whole.reasoning_content, "tool_calls")
    assert calls == [(c.function.name, c.function.arguments) for c in whole.tool_calls]


def test_choices_logprobs_and_usage(client):
    settings = {"n": 2, "logprobs": True, "top_logprobs": 1}
    answer = ask(client, **settings)
    for choice in answer.choices:
        assert [call.function.arguments for call in choice.message.tool_calls] == ARGUMENTS
        assert len(choice.logprobs.content) == answer.usage.completion_tokens // 2
    ids = {call.id for choice in answer.choices for call in choice.message.tool_calls}
    assert len(ids) == 4
    for index in (0, 1):
        assert streamed(client, index, **settings)[2:] == ([("get_weather", ARGUMENTS[0]), ("f", "{}")], "tool_calls")
    events = list(ask(client, stream=True, stream_options={"include_usage": True}, **settings))
    assert events[-1].usage == answer.usage


def test_parallel_tool_calls_false_gives_one_call(client, tool_server):
    before = tool_server.metric("dsv3:tool_calls_dropped_total")
    message = ask(client, parallel_tool_calls=False).choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["get_weather"]
    assert tool_server.metric("dsv3:tool_calls_dropped_total") == before + 1
    assert streamed(client, parallel_tool_calls=False)[2] == [("get_weather", ARGUMENTS[0])]


def test_tool_choice_none(client):
    """The prompt has no tools, and calls that the model writes anyway are dropped."""
    answer = ask(client, tool_choice="none")
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content, message.tool_calls) == ("becauseof this", "Let me see.", None)
    assert answer.choices[0].finish_reason == "stop"
    assert streamed(client, tool_choice="none") == ("Let me see.", "becauseof this", [], "stop")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_required_calls_need_grammars(client, choice):
    """This engine takes no grammars, so it refuses."""
    for tools, param in ((TOOLS, "tools"), ([], "tool_choice")):
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(model="tiny", messages=MESSAGES, tools=tools, tool_choice=choice)
        assert error.value.param == param


def test_truncated_calls(client):
    """The limit or a stop string ends the answer: arguments so far stay, and the call is not complete."""
    content, _, calls, reason = streamed(client, stop=["days"])
    assert (content, calls, reason) == ("Let me see.", [("get_weather", ARGUMENTS[0].partition("days")[0])], "stop")
    whole = ask(client, stop=["days"]).choices[0]
    assert (whole.finish_reason, whole.message.tool_calls[0].function.arguments) == (reason, calls[0][1])
    tokens = ask(client).usage.completion_tokens
    for max_tokens in range(tokens - 45, tokens - 5, 13):
        message, parts = ask(client, max_tokens=max_tokens).choices[0], streamed(client, max_tokens=max_tokens)
        assert message.finish_reason == parts[3] == "length"
        calls = [(call.function.name, call.function.arguments) for call in message.message.tool_calls or []]
        assert calls == parts[2]


NAMELESS, DEEP = {"type": "function", "function": {}}, {}
for _ in range(120):
    DEEP = {"a": DEEP}


@pytest.mark.parametrize(
    "tools",
    [
        [{}],
        ["f"],
        [NAMELESS],
        [{"type": "retrieval"}],
        [{"type": "function", "function": {"name": "f", "parameters": "{}"}}],
        [{"type": "function", "function": {"name": "f", "description": 5}}],
        [{"type": "function", "function": {"name": "f", "parameters": DEEP}}],
        [{"type": "function", "function": {"name": "f", "parameters": {"enum": [10**30]}}}],
        *(
            [{"type": "function", "function": {"name": name}}]
            for name in ["", "a b", 'a"b', "a\nb", "a\n", "a<b", "a" * 257]
        ),
        [WEATHER] * 129,
    ],
    ids=lambda tools: str(tools)[:40],
)
def test_invalid_tools(tool_server, tools):
    answer = tool_server.http.post(CHAT, json={"messages": MESSAGES, "tools": tools})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] in ("tools", "messages") and len(answer.content) < 1000
    assert "retrieval" not in answer.text  # what was sent is not repeated


def test_errors_name_the_field(tool_server):
    bad = [TOOLS[1], {"type": "function", "function": {"name": "a b"}}]
    error = tool_server.http.post(CHAT, json={"messages": MESSAGES, "tools": bad}).json()["error"]
    wanted = "a name of 1 to 256 characters, without white space, quotes, braces and angle brackets"
    assert (error["message"], error["param"]) == (f"tools[1].function.name: Expected {wanted}", "tools")


def test_a_server_without_a_tool_format_names_the_flag(server):
    answer = server.http.post(CHAT, json={"messages": MESSAGES[:1], "tools": TOOLS})
    assert answer.status_code == 400 and "--tool_call_parser" in answer.json()["error"]["message"]
    body = {"messages": MESSAGES[:1], "tools": TOOLS, "tool_choice": "none"}
    assert server.http.post(CHAT, json=body).status_code == 200


def test_the_other_name_of_reasoning(client):
    """Newer vLLM calls it `reasoning`, and its clients send it back."""
    messages = [{"role": "assistant", "content": "so", "reasoning": "why"}]
    answer = client.chat.completions.create(model="tiny", messages=messages, extra_body=THINKING)
    assert (answer.choices[0].message.reasoning_content, answer.choices[0].message.content) == ("why", "so")


class Templates:
    """Records the last render request."""

    async def render(self, request):
        self.request = request
        return "rendered"


def render_request(dialect, body):
    """The render request of a chat; the template renders no tools."""
    known = tokenizer(dialect)
    templates = Templates()
    service = SimpleNamespace(
        parsers=Parsers(known, "", tools=dialect),
        shows_tools=False,
        tokenizer=known,
        chat_tokenizer=known,
        templates=templates,
        encode=lambda *_, **__: asyncio.sleep(0, [1]),
        busy_is_503=contextlib.nullcontext,
    )
    request = ChatRequest(**body | {"messages": prompts.msgspec.convert(body["messages"], list[prompts.ChatMessage])})
    asyncio.run(prompts.chat_prompt(service, request, read_tools(service, request)))
    return templates.request


def test_templates_without_tools_are_refused():
    with pytest.raises(ApiError, match="does not render them"):
        render_request("kimi_k2", {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS})


def test_calls_reach_the_template_in_one_form():
    """No empty lists of calls, a type for each call, and content beside calls."""
    messages = [
        {"role": "assistant", "content": "x", "tool_calls": []},
        {"role": "assistant", "content": "x", "tool_calls": None},
        {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
    ]
    called = {"role": "assistant", "content": None, "tool_calls": [{**CALLS[1], "id": "1"}]}
    plain = {"role": "assistant", "content": "x"}
    assert render_request("deepseek_v31", {"messages": messages}).messages == [plain, plain, called]


def test_a_schema_and_the_fields_of_deepseek_v4_reach_the_template():
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    messages = [{"role": "latest_reminder", "content": "x"}, {"role": "user", "content": "y", "task": "query"}]
    body = {"messages": messages, "reasoning_effort": "xhigh"}
    form = prompts.msgspec.convert(schema, ResponseFormat)
    request = render_request("deepseek_v4", body | {"response_format": form})
    assert (request.messages, request.response_format) == (messages, {"type": "object"})
    assert request.kwargs == {"reasoning_effort": "xhigh"}
    for form in (None, ResponseFormat("json_object")):
        assert render_request("deepseek_v4", body | {"response_format": form}).response_format is None


def test_deepseek_v4_is_served_by_its_encoder_file(tmp_path):
    """Without the file, what needs its texts is refused by name; all else works."""
    known = tokenizer("deepseek_v4")
    known._backend.save(str(tmp_path / "tokenizer.json"))
    config = {name: value for name, value in tiny.config().items() if name != "chat_template"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v4"}))
    user = {"role": "user", "content": "Hi"}
    with serving.running(tmp_path) as server:
        for more in ({"tools": TOOLS}, {"reasoning_effort": "max"}):
            answer = server.http.post(CHAT, json={"messages": [user]} | more)
            assert answer.status_code == 400, answer.text
            [name] = more
            assert re.search(f"{name}: .* copy encoding/encoding_dsv4.py", answer.json()["error"]["message"])
        ids = server.http.post("/tokenize", json={"messages": [user]}).json()["tokens"]
        assert known.decode(ids, skip_special_tokens=False) == f"{tiny.BOS}<｜User｜>Hi<｜Assistant｜><think>"
    encoders.write(tmp_path, "encoding_dsv4.py", encoders.OFFICIAL)
    body = {"tools": TOOLS, "reasoning_effort": "high", "return_token_ids": True}
    messages = [user, {"role": "assistant", "content": "Let me see.", "tool_calls": CALLS}, user]
    with serving.running(tmp_path, options={"escape_special_tokens": True}) as server:
        answer = server.http.post(CHAT, json=body | {"messages": messages}).json()
    prompt = known.decode(answer["prompt_token_ids"], skip_special_tokens=False)
    assert prompt.startswith(f"{tiny.BOS}Think\nhard.\n\n\n\nUse <｜DSML｜tool_calls>")
    assert prompt.endswith("</｜DSML｜tool_calls><｜end▁of▁sentence｜><｜User｜>Hi<｜Assistant｜><think>")
