"""`resume` over HTTP: two servers in a row give the same answer as one alone."""

import array
import json
import sys
from types import SimpleNamespace

import pytest

from dsv3.sampling_params import SamplingParams
from dsv3.scheduler.request import RequestRules
from dsv3.server.protocol.errors import ApiError
from dsv3.server.protocol.openai import CompletionRequest, Resume
from dsv3.server.serving.prompts import EncodedPrompt
from dsv3.server.serving.resume import resumed_tokens
from tests.dsv3.server import serving
from tests.dsv3.server.test_tools import MESSAGES, THINKING, TOOLS
from tests.dsv3.text.dialects import write

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "def add(x, y):\n    return x + y\n"
BODIES = {
    "text": (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 12}),
    "end token": (COMPLETIONS, {"prompt": [0, 40, 41, 42, 43, 44], "max_tokens": 50}),
    "stop string": (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 50, "stop": ["return x", "zz"]}),
    "kept stop string": (
        COMPLETIONS,
        {"prompt": PROMPT, "max_tokens": 50, "stop": ["(x,"], "include_stop_str_in_output": True},
    ),
    "min_tokens": (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 60, "stop": ["add"], "min_tokens": 8}),
    "stop token": (COMPLETIONS, {"prompt": [40, 41, 42, 43], "max_tokens": 50, "stop_token_ids": [43]}),
    "half characters": (COMPLETIONS, {"prompt": "héllo 🙂 日本", "max_tokens": 14}),
    "echo": (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 5, "echo": True}),
    "choices": (COMPLETIONS, {"prompt": [PROMPT, "The quick brown"], "n": 2, "max_tokens": 5}),
    "logprobs": (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 6, "logprobs": 2}),
    "reasoning and calls": (CHAT, {"messages": MESSAGES, "tools": TOOLS, **THINKING}),
    "chat logprobs": (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1, "max_tokens": 30}),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving.running(write(tmp_path_factory.mktemp("resume"))) as server:
        yield server


class Collected:
    """The content of events, by choice."""

    def __init__(self, count: int) -> None:
        self.text, self.reasoning, self.arguments = [""] * count, [""] * count, [{} for _ in range(count)]
        self.ids, self.logprobs, self.ends = [[] for _ in range(count)], [[] for _ in range(count)], [None] * count
        self.prompts, self.roles, self.usage = 0, 0, None

    def add(self, event: dict) -> "Collected":
        self.usage = event.get("usage") or self.usage
        self.prompts += "prompt_token_ids" in event
        for choice in event["choices"]:
            i, delta = choice["index"], choice.get("delta", {})
            self.prompts += "prompt_token_ids" in choice
            self.roles += "role" in delta
            self.text[i] += choice.get("text") or delta.get("content") or ""
            self.reasoning[i] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or []:
                called = self.arguments[i].setdefault(call["index"], [None, ""])
                called[0] = call["function"].get("name") or called[0]
                called[1] += call["function"]["arguments"]
            self.ids[i] += choice.get("token_ids") or []
            logprobs = choice.get("logprobs") or {}
            self.logprobs[i] += logprobs.get("content") or [*zip(*logprobs.values(), strict=True)]
            if choice["finish_reason"]:
                self.ends[i] = choice["finish_reason"], choice["stop_reason"]
        return self

    def state(self) -> dict:
        return vars(self)


def events(server, path, body) -> list[dict]:
    fields = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True, "temperature": 0}
    with server.http.stream("POST", path, json=fields | body) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def collect(before: list[dict], count: int) -> Collected:
    made = Collected(count)
    for event in before:
        made.add(event)
    return made


@pytest.mark.parametrize(("path", "body"), BODIES.values(), ids=BODIES)
def test_a_stream_is_resumed_after_any_event(server, path, body):
    alone = events(server, path, body)
    count = 1 + max(choice["index"] for event in alone for choice in event["choices"])
    whole = collect(alone, count)
    assert all(whole.ends) and any(whole.text)
    for cut in range(1, len(alone) - 1, max(1, len(alone) // 12)):
        first = collect(alone[:cut], count)
        resume = {"output_token_ids": first.ids if count > 1 else first.ids[0]}
        again = events(server, path, body | {"resume": resume})
        both = first
        for event in again:
            both.add(event)
        if not all(collect(alone[:cut], count).ids):  # a choice without a token begins again
            both.prompts, both.roles = whole.prompts, whole.roles
            both.text = whole.text if "echo" in body else both.text
        assert both.state() == whole.state()


@pytest.mark.parametrize("name", ["text", "stop string", "reasoning and calls", "choices", "echo"])
def test_a_complete_response_has_the_earlier_tokens_too(server, name):
    path, body = BODIES[name]
    request = body | {"temperature": 0, "return_token_ids": True}
    whole = server.http.post(path, json=request).json()
    ids = [choice["token_ids"] for choice in whole["choices"]]
    for cut in (0, 1, len(ids[0]) // 2, len(ids[0])):
        first = [each[:cut] for each in ids]
        again = server.http.post(path, json=request | {"resume": {"output_token_ids": first}}).json()
        assert [_without_ids(choice) for choice in again["choices"]] == [_without_ids(c) for c in whole["choices"]]
        assert again["usage"] == whole["usage"] or cut >= min(map(len, ids))


def _without_ids(choice: dict) -> dict:
    for call in choice.get("message", {}).get("tool_calls") or []:
        call["id"] = ""
    return choice


def test_resumed_choices_are_counted(server):
    before = server.metric("dsv3:resumed_total")
    body = {"prompt": [5, 6, 7], "max_tokens": 9, "n": 2, "temperature": 0}
    events(server, COMPLETIONS, body | {"resume": {"output_token_ids": [[5, 6], []]}})
    assert server.metric("dsv3:resumed_total") == before + 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"resume": {"output_token_ids": [[5]]}, "n": 2}, "each of the 2 choices"),
        ({"resume": {"output_token_ids": [5]}, "n": 2}, "each of the 2 choices"),
        ({"resume": {"output_token_ids": [[5], [6]]}}, "expected a list of token ids"),
        ({"resume": {"output_token_ids": [5, [6]]}}, "expected a list of token ids"),
        ({"resume": {"output_token_ids": [500]}}, "from 0 to 499"),
        ({"resume": {"output_token_ids": [-1]}}, "resume"),
        ({"resume": {"output_token_ids": ["x"]}}, "resume"),
        ({"resume": {"output_token_ids": "xy"}}, "resume"),
        ({"resume": {"output_token_ids": None}}, "resume"),
        ({"resume": {}}, "resume"),
        ({"resume": {"output_token_ids": [5], "x": 1}}, "resume"),
        ({"resume": [5]}, "resume"),
        ({"resume": {"output_token_ids": [5] * 10}}, "the answer had ended"),
        ({"resume": {"output_token_ids": [5, 1, 5]}}, "the answer had ended"),
        ({"resume": {"output_token_ids": [5]}, "temperature": 1}, "needs the seed"),
        ({"resume": {"output_token_ids": [5]}, "prompt_logprobs": 1}, "not available with prompt_logprobs"),
        ({"resume": {"output_token_ids": [5]}, "logprobs": 1}, "with stream"),
        ({"resume": {"output_token_ids": [5] * 70_000}}, "the answer had ended"),
        ({"resume": {"output_token_ids": [[5] * 140_000]}}, "longer than any prompt"),
        ({"resume": {"output_token_ids": [[5] * 140_000, "x"]}}, "resume"),
    ],
)
def test_invalid_resumes_are_refused_by_field(server, changes, words):
    body = {"prompt": [5, 6, 7], "max_tokens": 9, "temperature": 0} | changes
    answer = server.http.post(COMPLETIONS, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and words in error["message"]
    assert error["param"] in ("resume", "seed", "logprobs", "prompt_logprobs")
    assert server.is_idle()


@pytest.mark.parametrize("resume", [None, {"output_token_ids": []}, {"output_token_ids": [[]]}])
def test_nothing_to_resume_changes_nothing(server, resume):
    """Without a token there is no seed to keep either."""
    body = {"prompt": [5, 6, 7], "max_tokens": 4}
    answer = server.http.post(COMPLETIONS, json=body | {"resume": resume}).json()
    assert answer["choices"] == server.http.post(COMPLETIONS, json=body).json()["choices"]


@pytest.mark.parametrize("rank", ["x", "-1", "1.5", "", "1", "99999999999"])
def test_an_invalid_rank_is_refused(server, rank):
    answer = server.http.post(COMPLETIONS, json={"prompt": [5]}, headers={"X-data-parallel-rank": rank})
    assert answer.status_code == 400 and "rank" in answer.json()["error"]["message"]


def test_an_existing_rank_is_accepted(server):
    answer = server.http.post(COMPLETIONS, json={"prompt": [5]}, headers={"X-data-parallel-rank": "0"})
    assert answer.status_code == 200


@pytest.mark.parametrize("found", [[array.array("i", [5]) * 130_000] * 100, array.array("i", [5]) * 10**6, "x" * 10**6])
def test_millions_of_tokens_are_refused_without_a_loop_over_them(found):
    """The event loop checks them; item by item it would stand still for seconds."""
    rules = RequestRules(vocab_size=500, max_model_len=2**18, fingerprint="", page_size=64)
    service, count = SimpleNamespace(require_ready=lambda: SimpleNamespace(rules=rules)), 0

    def count_calls(frame, event, argument) -> None:
        nonlocal count
        count += 1

    request = CompletionRequest(resume=Resume(found), stream=False)
    prompts = [EncodedPrompt(array.array("i", [5]) * 1_100_000)]
    sampling = SamplingParams(n=len(found) if isinstance(found, list) else 1, temperature=0)
    sys.setprofile(count_calls)
    try:
        with pytest.raises(ApiError, match="resume"):
            resumed_tokens(service, request, sampling, prompts)
    finally:
        sys.setprofile(None)
    assert count < 5000
