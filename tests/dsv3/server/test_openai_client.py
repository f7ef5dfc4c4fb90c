"""OpenAI's own client against the server, over a real socket."""

import asyncio

import openai
import pytest

from tests.dsv3.server import serving
from tests.dsv3.server.events import events_of
from tests.dsv3.text import tiny

MESSAGES = [{"role": "user", "content": "Hello there"}]
PROMPT = "def add(x, y):"


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(client):
    [model] = client.models.list().data
    assert (model.id, model.object, model.max_model_len) == ("tiny", "model", 2048)
    assert "kernel_fallbacks" not in model.model_extra


def test_a_model_is_retrieved_by_its_name(client, model_dir):
    model = client.models.retrieve("tiny")
    assert (model.id, model.object, model.root) == ("tiny", "model", str(model_dir))
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("of/unknown")
    assert refused.value.code == "model_not_found"


def test_names_with_slashes_are_retrieved(model_dir):
    with serving.running(model_dir, model_names=["org/tiny", "a"]) as server:
        for name in ("org/tiny", "org%2Ftiny", "a"):
            assert server.http.get(f"/v1/models/{name}").json()["id"] == name.replace("%2F", "/")


def test_completion(client):
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=100)
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason, answer.object) == (PROMPT, "stop", "text_completion")
    usage = answer.usage
    assert usage.completion_tokens == usage.prompt_tokens  # the prompt without its first token, and the end token
    assert usage.total_tokens == 2 * usage.prompt_tokens
    assert usage.prompt_tokens_details.cached_tokens == 0


def test_completion_stops_after_16_tokens_by_default(client):
    answer = client.completions.create(model="tiny", prompt=PROMPT * 10)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (16, "length")


def test_a_completion_stream_joins_to_the_complete_text(client):
    events = list(
        client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=100, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(e.choices[0].text for e in events[:-1]) == PROMPT
    assert [e.choices[0].finish_reason for e in events[-3:-1]] == [None, "stop"]
    assert events[-1].choices == []
    assert events[-1].usage.completion_tokens == events[-1].usage.prompt_tokens
    assert all(e.usage is None for e in events[:-1])


@pytest.mark.parametrize("kind", ["chat", "text", "ids"])
def test_continuous_usage(server, kind):
    """vLLM's `continuous_usage_stats`, which load generators send."""
    path, body = {
        "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": '"usage":null {"usage":null}'}]}),
        "text": ("/v1/completions", {"prompt": 'say "usage":null please'}),
        "ids": ("/inference/v1/generate", {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 20}}),
    }[kind]
    body |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    body |= {} if kind == "ids" else {"max_tokens": 20}
    events = [event for _, event in events_of(server.http.post(path, json=body))]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[0] <= 1 and counts[-1] == 20 and len(set(counts)) > 10
    assert {event["usage"]["prompt_tokens"] for event in events} == {events[-1]["usage"]["prompt_tokens"]}
    body["stream_options"] = {"continuous_usage_stats": True}
    assert not any("usage" in event for _, event in events_of(server.http.post(path, json=body)))


def test_lists_of_prompts_and_n(client):
    answer = client.completions.create(model="tiny", prompt=["ab", "cd"], n=2, max_tokens=100)
    assert [(c.index, c.text) for c in answer.choices] == [(0, "ab"), (1, "ab"), (2, "cd"), (3, "cd")]
    once = client.completions.create(model="tiny", prompt=["ab", "cd"], max_tokens=100)
    assert answer.usage.prompt_tokens == once.usage.prompt_tokens
    assert answer.usage.completion_tokens == 2 * once.usage.completion_tokens


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7], [8, 9]], [[5, 6, 7], "ab"]])
def test_token_id_prompts_and_returned_token_ids(client, prompt):
    answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=3, extra_body={"return_token_ids": True})
    first = answer.choices[0]
    assert (first.token_ids, first.prompt_token_ids) == ([5, 6, 7], [5, 6, 7])
    assert len(answer.choices) == (1 if isinstance(prompt[0], int) else 2)


def test_streamed_token_ids(client):
    events = list(
        client.completions.create(
            model="tiny", prompt=[5, 6, 7], max_tokens=4, stream=True, extra_body={"return_token_ids": True}
        )
    )
    assert [t for e in events for t in e.choices[0].token_ids] == [5, 6, 7, 5]
    assert events[0].choices[0].prompt_token_ids == [5, 6, 7]
    assert not hasattr(events[1].choices[0], "prompt_token_ids")


def test_echo(client):
    kwargs = {"model": "tiny", "prompt": "ab", "max_tokens": 100, "echo": True}
    assert client.completions.create(**kwargs).choices[0].text == "abab"
    assert "".join(e.choices[0].text for e in client.completions.create(**kwargs, stream=True)) == "abab"


def test_stop_strings(client):
    for stream in (False, True):
        answer = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=100, stop=["(x", "zz"], stream=stream
        )
        choices = [c for event in (answer if stream else [answer]) for c in event.choices]
        assert "".join(c.text for c in choices) == "def add"
        assert (choices[-1].finish_reason, choices[-1].stop_reason) == ("stop", "(x")
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=100, stop="(x", extra_body={"include_stop_str_in_output": True}
    )
    assert answer.choices[0].text == "def add(x"


def test_completion_logprobs(client):
    answer = client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=3, logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert logprobs.token_logprobs == [-0.5] * 3
    assert [len(top) for top in logprobs.top_logprobs] == [3] * 3
    assert min(logprobs.top_logprobs[0].values()) == -9999.0
    assert logprobs.text_offset == [0, 1, 2]
    events = client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=3, logprobs=0, stream=True)
    assert [offset for e in events for offset in e.choices[0].logprobs.text_offset] == [0, 1, 2]


def test_chat(client):
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES)
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == "Hello there"  # the fake engine repeats the prompt; special tokens are dropped
    assert choice.message.reasoning_content is None
    assert (choice.finish_reason, answer.object) == ("stop", "chat.completion")


def test_chat_with_reasoning(client):
    messages = [{"role": "user", "content": "why</think>because"}]
    body = {"chat_template_kwargs": {"thinking": True}, "return_token_ids": True}
    answer = client.chat.completions.create(model="tiny", messages=messages, extra_body=body)
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content) == ("why", "because")
    assert len(answer.choices[0].token_ids) == answer.usage.completion_tokens
    assert len(answer.prompt_token_ids) == answer.usage.prompt_tokens
    events = list(client.chat.completions.create(model="tiny", messages=messages, extra_body=body, stream=True))
    deltas = [e.choices[0].delta for e in events]
    assert deltas[0].role == "assistant"
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == "why"
    assert "".join(d.content or "" for d in deltas) == "because"
    assert [e.choices[0].finish_reason for e in events][-2:] == [None, "stop"]
    ids = [t for e in events for t in getattr(e.choices[0], "token_ids", None) or []]
    assert ids == answer.choices[0].token_ids
    assert events[0].prompt_token_ids == answer.prompt_token_ids


def test_chat_choices_logprobs_and_usage(client):
    kwargs = {"model": "tiny", "messages": MESSAGES, "n": 2, "logprobs": True, "top_logprobs": 2, "max_tokens": 4}
    answer = client.chat.completions.create(**kwargs)
    for choice in answer.choices:
        records = choice.logprobs.content
        assert b"".join(bytes(r.bytes) for r in records).decode() == tiny.USER + choice.message.content
        assert [len(r.top_logprobs) for r in records] == [2] * 4
    events = list(client.chat.completions.create(**kwargs, stream=True, stream_options={"include_usage": True}))
    for index in (0, 1):
        chunks = [c for e in events for c in e.choices if c.index == index]
        assert sum(len(c.logprobs.content) for c in chunks if c.logprobs) == 4
        assert "".join(c.delta.content or "" for c in chunks) == answer.choices[index].message.content
    assert events[-1].usage == answer.usage


def test_content_parts_and_continued_messages(client):
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]
    answer = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": parts}])
    assert answer.choices[0].message.content == "Hello\nthere"
    messages = [*MESSAGES, {"role": "assistant", "content": "Well, "}]
    body = {"continue_final_message": True, "add_generation_prompt": False}
    answer = client.chat.completions.create(model="tiny", messages=messages, extra_body=body, max_tokens=50)
    assert answer.choices[0].message.content == "Hello thereWell, "


def test_developer_messages_are_system_messages(client):
    messages = [{"role": "developer", "content": "Be brief."}, *MESSAGES]
    answer = client.chat.completions.create(model="tiny", messages=messages)
    assert answer.choices[0].message.content == "Be brief.Hello there"


def test_errors_are_openai_errors(client):
    with pytest.raises(openai.NotFoundError) as error:
        client.completions.create(model="gpt-4", prompt="x")
    assert (error.value.code, error.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="tiny", prompt="x", max_tokens=5000)
    assert error.value.code == "context_length_exceeded"
    assert "maximum context length is 2048 tokens" in error.value.message
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="tiny", prompt="x", temperature=-1)


def test_async_client_with_many_streams(server):
    async def one(client, i):
        stream = await client.completions.create(model="tiny", prompt=f"number {i}!", max_tokens=100, stream=True)
        return "".join([event.choices[0].text async for event in stream])

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(one(client, i) for i in range(100)))

    assert asyncio.run(all_of_them()) == [f"number {i}!" for i in range(100)]


def test_tokenize_and_detokenize(server):
    answer = server.http.post("/tokenize", json={"prompt": "def add", "return_token_strs": True}).json()
    assert answer["tokens"][0] == 0
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 2048)
    assert "".join(answer["token_strs"]) == tiny.BOS + "def add"
    back = server.http.post("/detokenize", json={"tokens": answer["tokens"]}).json()
    assert back == {"prompt": tiny.BOS + "def add"}
    chat = server.http.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"]
    text = server.http.post("/detokenize", json={"tokens": chat}).json()["prompt"]
    assert text == f"{tiny.BOS}{tiny.USER}Hello there{tiny.ASSISTANT}</think>"


def test_version_and_probes(server):
    assert set(server.http.get("/version").json()) == {"version"}
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.http.get("/ready").status_code == 200


def test_metrics(server):
    before = server.metric("vllm:generation_tokens_total")
    server.http.post("/v1/completions", json={"prompt": [5, 6], "max_tokens": 7}).raise_for_status()
    assert server.metric("vllm:generation_tokens_total") == before + 7
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"):
        assert server.metric(f"vllm:{name}_count") > 0
    assert server.metric("vllm:request_success_total") > 0
    assert server.metric("dsv3:engine_step_host_seconds_count") == 10
    server.wait_for(server.is_idle)


def test_without_a_tokenizer(bare_server):
    body = {"prompt": [5, 6, 7], "max_tokens": 4, "return_token_ids": True, "logprobs": 1}
    [choice] = bare_server.http.post("/v1/completions", json=body).json()["choices"]
    assert (choice["text"], choice["token_ids"]) == ("", [5, 6, 7, 5])
    assert choice["logprobs"]["tokens"][0] == "token_id:5"
    for path, body, word in [
        ("/v1/completions", {"prompt": "text"}, "token ids"),
        ("/v1/completions", {"prompt": [5], "stop": "x"}, "stop_token_ids"),
        ("/v1/chat/completions", {"messages": MESSAGES}, "no tokenizer"),
        ("/tokenize", {"prompt": "x"}, "no tokenizer"),
        ("/detokenize", {"tokens": [1]}, "no tokenizer"),
    ]:
        answer = bare_server.http.post(path, json=body)
        assert answer.status_code == 400
        assert word in answer.json()["error"]["message"]
