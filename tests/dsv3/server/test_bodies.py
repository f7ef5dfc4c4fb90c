"""Bodies that are expensive to parse: the server refuses them cheaply, and parses large ones within limits."""

import array
import asyncio
import contextlib
import json
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv3.server.protocol.anthropic import MessagesRequest
from dsv3.server.protocol.errors import ApiError
from dsv3.server.protocol.openai import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
)
from dsv3.server.protocol.responses import ResponsesRequest
from dsv3.server.serving import prompts, request_parsing
from dsv3.server.serving.prompts import RequestTools
from dsv3.text.special_tokens import SpecialTokens
from tests.dsv3.server import serving
from tests.dsv3.server.test_fuzz import JSON, MESSAGES

SIZE = 8 * 2**20
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def repeated(head: bytes, unit: bytes, tail: bytes, size: int = SIZE) -> bytes:
    """Returns a body of about `size` bytes with as many units as fit between its ends, commas between them."""
    return head + b",".join([unit] * ((size - len(head) - len(tail)) // (len(unit) + 1))) + tail


USER = b'{"messages":[{"role":"user","content":"x"}],'
PART = b'{"type":"text","text":""}'
MESSAGE = b'{"role":"user","content":[' + b",".join([PART] * 310) + b"]}"
CALL = b'{"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"f","input":{"a":['
COSTLY = {
    "bad entries of chat_template_kwargs": (
        CHAT,
        partial(repeated, USER + b'"chat_template_kwargs":{', b'"000001":[]', b"}}"),
        400,
    ),
    "empty parts": (CHAT, partial(repeated, b'{"messages":[', MESSAGE, b"]}"), 400),
    "bad entries of logit_bias": (
        COMPLETIONS,
        partial(repeated, b'{"prompt":[5],"logit_bias":{', b'"000001":""', b"}}"),
        400,
    ),
    "nested prompts": (COMPLETIONS, partial(repeated, b'{"prompt":[', b"[[]]", b"]}"), 400),
    "numbers in a call": ("/v1/messages", partial(repeated, CALL, b"1000", b']}}]}],"max_tokens":1}'), 400),
    "token ids": (COMPLETIONS, partial(repeated, b'{"prompt":[', b"1", b"]}"), 400),
    "many prompts": (COMPLETIONS, partial(repeated, b'{"prompt":[', b"[1]", b"]}"), 400),
    "objects as user": (
        COMPLETIONS,
        partial(repeated, b'{"prompt":[5],"max_tokens":1,"user":[', b'{"a":0}', b"]}"),
        400,
    ),
    "numbers as user": (COMPLETIONS, partial(repeated, b'{"prompt":[5],"max_tokens":1,"user":[', b"100", b"]}"), 200),
}


@pytest.fixture(scope="module")
def long_server(model_dir):
    """A context so long that no body is refused only for its length."""
    with serving.running(model_dir, engine={"max_model_len": 2**18}, factory_options={"step_s": 0.005}) as server:
        yield server


def memory(pid: int, field: str) -> int:
    """Resident bytes of a process: VmRSS now, VmHWM the peak since `forget_peak`; skips without /proc."""
    if sys.platform != "linux":
        pytest.skip("reads /proc")
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) * 1024


def forget_peak(pid: int) -> None:
    if sys.platform != "linux":
        pytest.skip("writes to /proc")
    Path(f"/proc/{pid}/clear_refs").write_text("5")


class Watcher:
    """A client that streams in the background; `gap` is its longest time without a token."""

    def __init__(self, server):
        self.gap, self._server = 0.0, server
        self._has_begun, self._end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        body = {"prompt": [5], "max_tokens": 100_000, "stream": True}
        with self._server.http.stream("POST", COMPLETIONS, json=body, timeout=120) as answer:
            last = time.monotonic()
            for _ in answer.iter_raw():
                self._has_begun.set()
                now = time.monotonic()
                self.gap, last = max(self.gap, now - last), now
                if self._end.is_set():
                    return

    def __enter__(self):
        self._thread.start()
        assert self._has_begun.wait(30)
        return self

    def __exit__(self, *_):
        self._end.set()
        self._thread.join()


@pytest.mark.parametrize("name", COSTLY)
def test_an_expensive_body_takes_little_memory_and_blocks_no_stream(long_server, name):
    """Parsed naively these take 35 to 280 times their size, and block for 1 to 7 s."""
    path, make, status = COSTLY[name]
    body = make()
    api_server = long_server.process.pid
    before = memory(api_server, "VmRSS")
    forget_peak(api_server)
    with Watcher(long_server) as watcher:
        answer = long_server.http.post(path, content=body, headers={"content-type": "application/json"}, timeout=120)
    assert answer.status_code == status, answer.text
    assert len(answer.content) < 1000
    assert memory(api_server, "VmHWM") - before < 12 * SIZE
    assert watcher.gap < 3.0


def test_a_body_beyond_the_context_is_not_decoded(server):
    """The context has 2,048 tokens: the text is not even looked at."""
    body = b'{"messages":[{"role":"user","content":"' + b"x" * SIZE + b'"}], not JSON'
    answer = server.http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_large_requests_are_parsed_completely(long_server):
    """Their fields are decoded separately."""
    text = "hello " * 20_000
    messages = [{"role": "user", "content": [{"type": "text", "text": text}, {"type": "text", "text": "you"}]}]
    body = {"messages": messages, "max_tokens": 1, "n": 2, "seed": 3, "user": "x" * 300_000}
    answer = long_server.http.post(CHAT, json=body, timeout=120).json()
    assert "choices" in answer, answer
    assert len(answer["choices"]) == 2 and answer["usage"]["prompt_tokens"] > 60_000
    body = {"prompt": [[5, 6] * 50_000, text], "max_tokens": 2, "return_token_ids": True}
    answer = long_server.http.post(COMPLETIONS, json=body, timeout=120).json()
    assert answer["choices"][0]["token_ids"] == [5, 6]
    large = {"unknown": "x" * 300_000}
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}], "max_tokens": 1} | large
    usage = long_server.http.post("/v1/messages", json=body, timeout=120).json()["usage"]
    prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert prompt > 60_000
    body = {"input": [{"role": "user", "content": text}], "max_output_tokens": 1} | large
    usage = long_server.http.post("/v1/responses", json=body, timeout=120).json()["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (prompt, 1)
    body = {"token_ids": [5, 6] * 60_000, "sampling_params": {"max_tokens": 2}}
    assert long_server.http.post("/inference/v1/generate", json=body).json()["choices"][0]["token_ids"] == [5, 6]
    ids = [5, 6] * 100_000
    text = long_server.http.post("/detokenize", json={"tokens": ids}, timeout=120).json()["prompt"]
    back = long_server.http.post("/tokenize", json={"prompt": text[: 2**20]}, timeout=120)
    assert len(text) >= len(ids) and back.status_code == 200


@pytest.mark.parametrize("count", [1, 2])
def test_a_long_answer_can_be_resumed(count):
    """Tokens of more than 256 KiB of JSON, as those of one choice and of several."""
    tokens = [123_456] * 60_000
    resume = {"output_token_ids": tokens if count == 1 else [tokens] * count}
    body = json.dumps({"prompt": [5], "n": count, "resume": resume}).encode()
    found = request_parsing.read(CompletionRequest, body).resume.output_token_ids
    assert (listed(found) if count == 1 else [listed(each) for each in found]) == resume["output_token_ids"]


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest, GenerateRequest])
def test_the_experts_of_a_long_prompt_fit_a_request(kind):
    """A prefill instance of DeepSeek-V3 sends 0.6 KB of base64 per token of the prompt; other fields stay small."""
    experts = "QUJD" * 200_000
    body = json.dumps({"kv_transfer_params": {"do_remote_prefill": True, "remote_routed_experts": experts}}).encode()
    found = request_parsing.read(kind, body).kv_transfer_params
    assert found.do_remote_prefill and found.remote_routed_experts == experts
    for value in ({"remote_addresses": ["a:1"] * 60_000}, ["x" * 300_000], "x" * 300_000):
        with pytest.raises(ApiError, match="kv_transfer_params"):
            request_parsing.read(kind, json.dumps({"kv_transfer_params": value}).encode())
    assert request_parsing.read(kind, b'{"kv_transfer_params":null,"user":"%b"}' % (b"x" * 70_000))


class Templates:
    """Records the last render request."""

    async def render(self, request):
        self.request = request
        return "rendered"


@pytest.mark.parametrize("padding", [0, 300_000])
def test_messages_reach_the_template_unchanged(padding):
    """Absent fields stay absent and nulls stay null, in small bodies and in large ones."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "x" * padding, "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
        {"role": "assistant", "content": "y", "reasoning_content": "z"},
    ]
    templates = Templates()
    known = SimpleNamespace(markers=SpecialTokens())
    service = SimpleNamespace(
        tokenizer=known,
        chat_tokenizer=known,
        templates=templates,
        encode=lambda *_, **__: asyncio.sleep(0, [1]),
        busy_is_503=contextlib.nullcontext,
    )
    request = request_parsing.read(ChatRequest, json.dumps({"messages": messages}).encode())
    asyncio.run(prompts.chat_prompt(service, request, RequestTools()))
    assert templates.request.messages == messages


KINDS = {
    ChatRequest: {"messages": [{"role": "user", "content": "x"}], "n": 2},
    CompletionRequest: {"prompt": [[5, 6], "x"], "stop": ["a"]},
    TokenizeRequest: {"prompt": "x"},
    DetokenizeRequest: {"tokens": [5]},
    ResponsesRequest: {"input": [{"role": "user", "content": "x"}], "instructions": "y"},
    MessagesRequest: {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "system": "y"},
    GenerateRequest: {"token_ids": [5]},
}


@settings(deadline=None, max_examples=300)
@given(kind=st.sampled_from(list(KINDS)), data=st.data())
def test_separate_decoding_gives_the_same_request(kind, data):
    names = data.draw(st.lists(st.sampled_from([*kind.__struct_fields__, "unknown"]), max_size=3))
    fuzz = {name: data.draw(MESSAGES | JSON if name in ("messages", "input") else JSON) for name in names}
    body = json.dumps(KINDS[kind] | fuzz).encode()
    whole = outcome(kind, body)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_parsing, "SMALL_BYTES", 0)
        # Other fields than prompts, messages and token lists may be as long as the whole body here.
        patch.setattr(request_parsing, "MAX_FIELD_BYTES", len(body))
        parts = outcome(kind, body)
    if isinstance(whole, kind) and not isinstance(parts, kind):
        assert kind is CompletionRequest and "prompt" in fuzz  # texts among token ids: refused later
    else:
        assert type(parts) is type(whole)
        assert not isinstance(whole, kind) or plain(parts) == plain(whole)


def plain(request):
    """The request with lists instead of arrays of token ids."""
    fields = msgspec.structs.asdict(request)
    for name in ("prompt", "tokens", "token_ids"):
        value = fields.get(name)
        value = [listed(item) for item in value] if isinstance(value, list) else listed(value)
        fields[name] = value
    return fields


def listed(value):
    return value.tolist() if isinstance(value, array.array) else value


def outcome(kind, body):
    try:
        return request_parsing.read(kind, body)
    except ApiError as error:
        return error


@pytest.mark.parametrize("count", [3, 4])
def test_the_text_of_token_ids_is_bounded(monkeypatch, count):
    """A body holds a million ids, each of up to 128 characters: eight times as much memory as its budget counts."""
    monkeypatch.setattr(prompts, "_MAX_CHARS", 3)

    async def run(is_long, work):
        return work()

    tokenizer = SimpleNamespace(vocab_size=9, decode=lambda tokens, skip_special_tokens: "x" * len(tokens))
    text = prompts.detokenize(SimpleNamespace(tokenizer=tokenizer, run=run), [5] * count)
    if count == 3:
        assert asyncio.run(text) == "xxx"
    else:
        with pytest.raises(ApiError, match="tokens: they make 4 characters, at most 3"):
            asyncio.run(text)
