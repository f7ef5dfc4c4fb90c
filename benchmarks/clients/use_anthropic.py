"""Anthropic's client: messages, streams, tools, thinking, token counts, errors."""

import anthropic

from benchmarks.clients.checking import CITY, MODEL, WEATHER, Servers, expect, main

QUESTION = [{"role": "user", "content": "What is a list?"}]
CALLED = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "They ask for the weather.", "signature": "x"},
            {"type": "tool_use", "id": "1", "name": "get_weather", "input": CITY},
        ],
    },
]
TOOL = {name: WEATHER[name] for name in ("name", "description")} | {"input_schema": WEATHER["parameters"]}


def client(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120)


def messages(servers: Servers) -> str:
    """messages: whole"""
    answer = client(servers.url).messages.create(model=MODEL, system="Be brief.", messages=QUESTION, max_tokens=5)
    expect(answer.stop_reason == "max_tokens" and answer.usage.output_tokens == 5, answer)
    return repr(answer.content[0].text[:40])


def stream(servers: Servers) -> str:
    """messages: the client's own accumulation of a stream is the whole"""
    settings = {"model": MODEL, "messages": QUESTION, "max_tokens": 16, "extra_body": {"temperature": 0}}
    whole = client(servers.url).messages.create(**settings)
    with client(servers.url).messages.stream(**settings) as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    expect(text == whole.content[0].text == final.content[0].text, (text, whole))
    return f"{final.usage.output_tokens} tokens, {final.stop_reason}"


def tools(servers: Servers) -> str:
    """messages: thinking and a tool's call, streamed"""
    settings = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "tools": [TOOL], "max_tokens": 1500}
    with client(servers.tools_url).messages.stream(model=MODEL, messages=CALLED, **settings) as events:
        kinds = [event.type for event in events]
        final = events.get_final_message()
    [call] = [block for block in final.content if block.type == "tool_use"]
    thoughts = [block.thinking for block in final.content if block.type == "thinking"]
    expect(call.input == CITY and final.stop_reason == "tool_use" and thoughts, final)
    return f"{len(kinds)} events, {call.name}({call.input})"


def result(servers: Servers) -> str:
    """messages: a tool's result sent back"""
    results = [{"type": "tool_result", "tool_use_id": "1", "content": "Sunny."}]
    asked = [*CALLED, {"role": "user", "content": results}]
    answer = client(servers.tools_url).messages.create(model=MODEL, messages=asked, max_tokens=400)
    expect("Sunny." in answer.content[-1].text, answer)
    return repr(answer.content[-1].text)


def count(servers: Servers) -> str:
    """messages: count_tokens is what an answer's usage says"""
    counted = client(servers.url).messages.count_tokens(model=MODEL, messages=QUESTION).input_tokens
    usage = client(servers.url).messages.create(model=MODEL, messages=QUESTION, max_tokens=1).usage
    expect(counted == usage.input_tokens + usage.cache_read_input_tokens, (counted, usage))
    return f"{counted} tokens"


def errors(servers: Servers) -> str:
    """errors are the client's own classes"""
    for change, kind in (
        ({"model": "other"}, anthropic.NotFoundError),
        ({"extra_body": {"top_p": 2}}, anthropic.BadRequestError),
    ):
        try:
            client(servers.url).messages.create(**{"model": MODEL, "messages": QUESTION, "max_tokens": 1} | change)
        except kind as error:
            saw = error.body["error"]["message"]
        else:
            raise AssertionError(f"{change} was taken")
    return saw


def model(servers: Servers) -> str:
    """models: retrieved by name, and the error for another one"""
    found = client(servers.url).models.retrieve(MODEL)
    expect(found.id == MODEL and found.type == "model" and found.created_at.year > 2000, found)
    try:
        client(servers.url).models.retrieve("other")
    except anthropic.NotFoundError as error:
        expect(error.body["error"]["type"] == "not_found_error", error.body)
        return f"{found.display_name}; {error.body['error']['message']}"
    raise AssertionError("there is one")


if __name__ == "__main__":
    main([model, messages, stream, tools, result, count, errors])
