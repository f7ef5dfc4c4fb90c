"""OpenAI's client: the Responses API; tests/dsv3/server/test_openai_client.py has chats, tools and completions."""

import json

import openai

from benchmarks.clients.checking import CITY, MODEL, WEATHER, Servers, expect, main

FLAT = {"type": "function", "strict": False, **WEATHER}
ITEMS = [
    {"role": "user", "content": "Weather?"},
    {"type": "function_call", "call_id": "1", "name": "get_weather", "arguments": json.dumps(CITY)},
]


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


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


if __name__ == "__main__":
    main([responses, responses_stream, responses_result, stored_responses])
