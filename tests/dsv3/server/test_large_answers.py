"""Expensive answers: their work is bounded, done as tokens arrive, and joined in slices."""

import asyncio
import io
import json
import math
from base64 import b64decode

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv3.scheduler.request import ExpertIds, TokenLogprobs
from dsv3.server.engine.client import SLICE, EngineClient
from dsv3.server.serving import handler
from dsv3.server.serving.generation import ChoiceUpdate
from dsv3.server.serving.handler import CompleteChoice, fill_gaps, join_slices, with_commas
from dsv3.server.serving.logprobs import LogprobEncoder
from dsv3.text.deltas import ReasoningDelta, TextDelta
from dsv3.text.tokenizer import Tokenizer
from tests.dsv3.server import serving
from tests.dsv3.server.test_bodies import CHAT, COMPLETIONS, Watcher, forget_peak, memory
from tests.dsv3.text import tiny

USER = [{"role": "user", "content": "x"}]
LOGPROB = st.sampled_from([-0.5, -12.25, -1e-9, 0.0, float("-inf"), float("nan")])
ENTRIES = st.lists(
    st.tuples(st.integers(0, 420), LOGPROB, st.lists(st.tuples(st.integers(0, 420), LOGPROB), max_size=4)), max_size=4
)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(tiny.backend(), tiny.config())


def finite(value):
    return value if math.isfinite(value) else -9999.0


def entries_of(drawn):
    ids = [token for token, *_ in drawn]
    return ids, [TokenLogprobs(value, [i for i, _ in top], [v for _, v in top]) for _, value, top in drawn]


@given(ENTRIES)
def test_logprobs_in_both_shapes(tokenizer, drawn):
    """Compared with a plain implementation."""

    def text(token):
        return tokenizer.token_bytes(token).decode("utf-8", "replace")

    def record(token, value):
        return {"token": text(token), "logprob": finite(value), "bytes": list(tokenizer.token_bytes(token))}

    ids, entries = entries_of(drawn)
    encoder = LogprobEncoder(tokenizer)
    [records] = encoder.chat(ids, entries)
    assert json.loads(b"[%s]" % records) == [
        record(token, value) | {"top_logprobs": [record(*one) for one in top]} for token, value, top in drawn
    ]
    tokens, values, tops, offsets = (json.loads(b"[%s]" % items) for items in encoder.completion(ids, entries, 7))
    assert tokens == [text(token) for token in ids]
    assert values == [finite(value) for _, value, _ in drawn]
    assert tops == [{text(i): finite(v) for i, v in top} | {text(t): finite(value)} for t, value, top in drawn]
    assert offsets == [7 + sum(map(len, tokens[:i])) for i in range(len(tokens))]


def test_a_complete_choice_joins_its_updates():
    choice = CompleteChoice(3)
    choice.add(ChoiceUpdate(3, [ReasoningDelta("a"), TextDelta("b")], [1, 2]), (b"x", b"y"))
    choice.add(ChoiceUpdate(3, [TextDelta("c")], []), (b"", b""))
    choice.add(ChoiceUpdate(3, [], [5], finish_reason="stop", stop_reason="z"), (b"v", b"w"))
    assert (choice.text, choice.reasoning, choice.token_ids) == ("bc", "a", [1, 2, 5])
    assert (choice.finish_reason, choice.stop_reason) == ("stop", "z")
    gaps = [with_commas(column) for column in choice.columns]
    assert b"".join(fill_gaps(b"[\x01]+[\x01]", gaps)) == b"[x,v]+[y,w]"


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(0, 3), st.sampled_from(["|u1", "<u2"]))
def test_experts_are_encoded_in_pieces(sizes, again, dtype):
    """Parts end anywhere in three bytes, which make four characters, and another engine sends some tokens again."""
    total = sum(sizes)
    ids = np.arange(1, total + 1, dtype=dtype).reshape(-1, 1, 1)
    choice, known = CompleteChoice(0), 0
    for size in sizes:
        start = max(0, known - again)
        part = ExpertIds(start, 1, 1, dtype, ids[start : known + size].tobytes())
        choice.add(ChoiceUpdate(0, [], [], routed_experts=part), ())
        known += size
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handler, "_ENCODED_BYTES", 6)
        pieces, file = list(choice.prompt_experts(total - 1)), b"".join(choice.routed_experts(total + 1))
    assert b64decode(b"".join(pieces)) == ids[: max(0, total - 1)].tobytes() and max(map(len, pieces)) <= 8
    assert np.array_equal(np.load(io.BytesIO(b64decode(file))), ids)


def test_joining_runs_other_tasks_between_slices():
    turns = 0

    async def others():
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def run():
        task = asyncio.create_task(others())
        result = await join_slices(bytes(1024) for _ in range(10 * 1024))
        task.cancel()
        return result

    assert len(asyncio.run(run())) == 10 * 2**20
    assert turns >= 10 * 2**20 // handler._SLICE_BYTES - 1


class CountingStream:
    """Processes at most a slice at a time, as a request does."""

    def __init__(self, client, count):
        self.client, self.is_queued, self.taken = client, False, []
        self.pending = [1] * count

    def on_outputs(self):
        items, self.pending = self.pending[:SLICE], self.pending[SLICE:]
        self.taken.append(len(items))
        if self.pending:
            self.client.requeue(self)


@pytest.mark.parametrize("counts", [[1] * 1000, [10_000], [1000] * 20, [5000, 1]])
def test_pending_outputs_are_processed_in_slices(counts):
    """All pending outputs of up to 256 sequences at once would block the event loop."""

    async def run():
        client = EngineClient(max_num_queued_reqs=1)
        streams = [CountingStream(client, count) for count in counts]
        for stream in streams:
            client.requeue(stream)
        most = 0
        while any(stream.pending for stream in streams):
            before = sum(sum(stream.taken) for stream in streams)
            await asyncio.sleep(0)
            most = max(most, sum(sum(stream.taken) for stream in streams) - before)
        return most, [sum(stream.taken) for stream in streams]

    most, taken = asyncio.run(run())
    assert taken == counts
    assert most <= 2 * SLICE


@pytest.fixture(scope="module")
def wide_server(model_dir):
    """128 sequences at once, and a stream beside them."""
    with serving.running(
        model_dir, engine={"max_num_seqs": 200, "max_model_len": 2**17}, factory_options={"step_s": 0.005}
    ) as server:
        yield server


def test_many_logprobs_do_not_block_other_streams(wide_server):
    """Encoded at once, 300 tokens of 100 choices take 6 s."""
    body = {"messages": USER, "n": 100, "max_tokens": 300, "logprobs": True, "top_logprobs": 20, "ignore_eos": True}
    with Watcher(wide_server) as watcher:
        answer = wide_server.http.post(CHAT, json=body, timeout=300)
    choices = answer.json()["choices"]
    assert [len(choice["logprobs"]["content"]) for choice in choices] == [300] * 100
    assert watcher.gap < 3.0


def test_many_choices_of_a_long_prompt_do_not_block_other_streams(wide_server):
    """The prompt is sent to the engine once; 128 copies would take 84 MiB in one frame, and 670 MiB in the engine."""
    engine = wide_server.engine_process()
    body = {"prompt": [5] * 120_000, "n": 128, "max_tokens": 2, "return_token_ids": True}
    before = engine.memory_info().rss
    forget_peak(engine.pid)
    with Watcher(wide_server) as watcher:
        answer = wide_server.http.post(COMPLETIONS, json=body, timeout=120)
    assert [choice["token_ids"] for choice in answer.json()["choices"]] == [[5, 5]] * 128
    assert memory(engine.pid, "VmHWM") - before < 100 * 2**20
    assert watcher.gap < 3.0


@pytest.mark.parametrize("stream", [False, True])
def test_the_logprobs_of_one_answer_are_bounded(wide_server, stream):
    body = {"messages": USER, "n": 128, "max_tokens": 20_000, "logprobs": True, "top_logprobs": 20, "stream": stream}
    if stream:  # nothing is collected
        with wide_server.http.stream("POST", CHAT, json=body) as answer:
            assert answer.status_code == 200
    else:
        answer = wide_server.http.post(CHAT, json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "logprobs"
    wide_server.wait_for(wide_server.is_idle)


def test_an_echoed_prompt_is_repeated_within_limits(wide_server):
    """Its token ids come once, its text in each choice as OpenAI does, within the size of a body."""
    body = {"prompt": [[5, 6], [7]], "n": 2, "max_tokens": 1, "return_token_ids": True, "echo": True}
    choices = wide_server.http.post(COMPLETIONS, json=body).json()["choices"]
    assert [choice.get("prompt_token_ids") for choice in choices] == [[5, 6], None, [7], None]
    texts = [choice["text"] for choice in choices]
    assert texts[0] == texts[1] and len(texts[0]) == 3 and len(texts[2]) == 2
    body = {"prompt": [5] * 100_000, "n": 128, "max_tokens": 1, "return_token_ids": True}
    answer = wide_server.http.post(COMPLETIONS, json=body, timeout=120)
    assert answer.status_code == 200 and len(answer.content) < 2 * len(json.dumps(body))
    long = {"prompt": [300] * 131_000, "n": 128, "max_tokens": 1, "echo": True}
    answer = wide_server.http.post(COMPLETIONS, json=long, timeout=120)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "echo"


def test_resumed_choices_are_limited(wide_server):
    body = {"prompt": [5] * 120_000, "n": 128, "temperature": 0, "resume": {"output_token_ids": [[5]] * 128}}
    answer = wide_server.http.post(COMPLETIONS, json=body, timeout=120)
    assert answer.status_code == 400 and "one by one" in answer.json()["error"]["message"]
    fewer = body | {"n": 16, "max_tokens": 2, "resume": {"output_token_ids": [[5]] * 16}, "return_token_ids": True}
    choices = wide_server.http.post(COMPLETIONS, json=fewer, timeout=120).json()["choices"]
    assert [choice["token_ids"] for choice in choices] == [[5, 5]] * 16
