"""OpenAI's client: chats, tools, responses, text completions, errors."""

import json

import openai

from benchmarks.clients.checking import CITY, MODEL, WEATHER, Servers, expect, main

QUESTION = [{"role": "user", "content": "What is a list?"}]
CALL = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": json.dumps(CITY)}}
CALLED = [{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
TOOL = {"type": "function", "function": WEATHER}
FLAT = {"type": "function", "strict": False, **WEATHER}
ITEMS = [
    {"role": "user", "content": "Weather?"},
    {"type": "function_call", "call_id": "1", "name": "get_weather", "arguments": json.dumps(CITY)},
]


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


def chat(servers: Servers) -> str:
    """chat: whole"""
    answer = client(servers.url).chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=5, temperature=0)
    expect(answer.usage.completion_tokens == 5 and answer.choices[0].finish_reason == "length", answer)
    return repr(answer.choices[0].message.content[:40])


def chat_stream(servers: Servers) -> str:
    """chat: the stream joins to the whole"""
    settings = {"model": MODEL, "messages": QUESTION, "max_tokens": 5, "temperature": 0}
    whole = client(servers.url).chat.completions.create(**settings).choices[0].message.content
    stream = client(servers.url).chat.completions.create(
        **settings, stream=True, stream_options={"include_usage": True}
    )
    events = list(stream)
    text = "".join(choice.delta.content or "" for event in events for choice in event.choices)
    expect(text == whole and events[-1].usage.completion_tokens == 5, (text, whole))
    return f"{len(events)} events"


def chat_tools(servers: Servers) -> str:
    """chat: a tool's call, whole and streamed"""
    settings = {"model": MODEL, "messages": CALLED, "tools": [TOOL], "max_tokens": 400}
    whole = client(servers.tools_url).chat.completions.create(**settings).choices[0]
    expect(whole.finish_reason == "tool_calls", whole)
    with client(servers.tools_url).chat.completions.stream(**settings) as stream:
        final = stream.get_final_completion().choices[0].message.tool_calls[0].function
    expect(json.loads(final.arguments) == CITY, final)
    return f"{final.name}({final.arguments})"


def responses(servers: Servers) -> str:
    """responses: whole"""
    answer = client(servers.url).responses.create(model=MODEL, input="What is a list?", max_output_tokens=5)
    expect(answer.status == "incomplete" and answer.usage.output_tokens == 5, answer)
    return repr(answer.output_text[:40])


def responses_stream(servers: Servers) -> str:
    """responses: the client's own accumulation of a stream is the whole"""
    settings = {"model": MODEL, "input": ITEMS, "tools": [FLAT], "max_output_tokens": 400}
    with client(servers.tools_url).responses.stream(**settings) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    [call] = [item for item in final.output if item.type == "function_call"]
    expect(json.loads(call.arguments) == CITY and kinds[-1] == "response.completed", (kinds, final))
    return f"{len(kinds)} events, {call.name}({call.arguments})"


def responses_result(servers: Servers) -> str:
    """responses: an answer's items and a tool's result sent back"""
    first = client(servers.tools_url).responses.create(model=MODEL, input=ITEMS, tools=[FLAT], max_output_tokens=400)
    [call] = [item for item in first.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
    items = [ITEMS[0], *(item.model_dump(exclude_none=True) for item in first.output), result]
    again = client(servers.tools_url).responses.create(model=MODEL, input=items, max_output_tokens=400)
    expect("Sunny." in again.output_text, again)
    return repr(again.output_text)


def stored_responses(servers: Servers) -> str:
    """responses: previous_response_id is refused by name"""
    try:
        client(servers.url).responses.create(model=MODEL, input="x", previous_response_id="resp_1")
    except openai.BadRequestError as error:
        expect(error.param == "previous_response_id", error)
        return error.message[:60]
    raise AssertionError("it was taken")


def completions(servers: Servers) -> str:
    """completions: echo with logprobs"""
    answer = client(servers.url).completions.create(
        model=MODEL, prompt="def add(x, y):", max_tokens=1, echo=True, logprobs=1, temperature=0
    )
    told = answer.choices[0].logprobs
    expect(told.token_logprobs[0] is None and all(value <= 0 for value in told.token_logprobs[1:]), told)
    return f"{len(told.tokens)} tokens, {sum(told.token_logprobs[1:-1]):.2f} in all"


def scored(servers: Servers) -> str:
    """completions: a prompt scored without an answer"""
    answer = client(servers.url).completions.create(
        model=MODEL, prompt="def add(x, y):", max_tokens=0, echo=True, logprobs=1
    )
    [choice] = answer.choices
    expect(choice.text == "def add(x, y):" and answer.usage.completion_tokens == 0, answer)
    return f"{len(choice.logprobs.tokens)} tokens, {sum(choice.logprobs.token_logprobs[1:]):.2f} in all"


def model(servers: Servers) -> str:
    """models: retrieved by name"""
    found = client(servers.url).models.retrieve(MODEL)
    expect(found.id == MODEL and found.object == "model", found)
    return f"{found.id}, {found.max_model_len} tokens"


def absent(servers: Servers) -> str:
    """what this model does not do is said"""
    try:
        client(servers.url).embeddings.create(model=MODEL, input="x")
    except openai.NotFoundError as error:
        expect("makes no embeddings" in error.message, error)
    part = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}
    try:
        client(servers.url).chat.completions.create(model=MODEL, messages=[{"role": "user", "content": [part]}])
    except openai.BadRequestError as error:
        expect(error.param == "messages" and "does not take images" in error.message, error)
        return error.body["message"]
    raise AssertionError("it was taken")


if __name__ == "__main__":
    main(
        [
            model,
            absent,
            scored,
            chat,
            chat_stream,
            chat_tools,
            responses,
            responses_stream,
            responses_result,
            stored_responses,
            completions,
        ]
    )
