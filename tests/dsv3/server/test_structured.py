"""Constrained requests over HTTP: what is rejected before it reaches the engine, and which grammar the engine gets."""

import asyncio
import json

import httpx
import openai
import psutil
import pytest

from dsv3.sampling_params import StructuredOutputsParams
from dsv3.scheduler.request import RequestRules
from dsv3.server import grammars
from dsv3.server.grammars import GrammarPool
from dsv3.server.worker_process import PoisonRequest, WorkerProcess, WorkerReply
from dsv3.text.call_grammar import AnswerConstraints
from dsv3.text.matcher import GrammarError, VocabularyError
from tests.dsv3.server import fake_engine, serving
from tests.dsv3.server.test_tools import MESSAGES, TOOLS
from tests.dsv3.text.dialects import write

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ODD = {"type": "array", "uniqueItems": True}
RULES = RequestRules(vocab_size=fake_engine.VOCAB, max_model_len=100, eos_token_ids=(1,), takes_grammars=True)


@pytest.fixture(scope="module")
def held_server(tmp_path_factory):
    """An engine that returns a request's grammar as an error; a model with V3.1's tool calls."""
    directory = write(tmp_path_factory.mktemp("held"))
    with serving.running(directory, factory_options={"tells_grammars": True}) as server:
        yield server


def refused(server, path: str, **fields) -> dict:
    """The error of a rejected request, streamed or not."""
    prompt = {"messages": MESSAGES[:1]} if path == CHAT else {"prompt": "x"}
    answers = [server.http.post(path, json=prompt | fields | {"stream": stream}) for stream in (False, True)]
    assert [answer.status_code for answer in answers] == [400, 400], answers[0].text
    assert answers[0].json() == answers[1].json()
    return answers[0].json()["error"]


def grammar_of(server, path: str, **fields) -> list[dict]:
    """The entries of the grammar that the engine received."""
    prompt = {"messages": MESSAGES[:1]} if path == CHAT else {"prompt": "x"}
    answer = server.http.post(path, json=prompt | {"max_tokens": 5} | fields)
    assert answer.status_code == 500, answer.text
    return json.loads(answer.json()["error"]["message"])["grammars"]


@pytest.mark.parametrize(
    "value, words",
    [
        ({"regex": "("}, "regex parse error"),
        ({"regex": ""}, "empty"),
        ({"regex": "a", "json": SCHEMA}, "exactly one"),
        ({}, "exactly one"),
        ({"regex": "a", "whitespace_pattern": " "}, "unknown field"),
        ({"json": "[]"}, "object"),
        ({"json": "{"}, "not valid JSON"),
        ({"json": ODD}, "uniqueItems"),
        ({"json": {"$ref": "https://example.com/schema"}}, "example.com"),
        ({"json": {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}}, ""),
        ({"choice": []}, "entries"),
        ({"choice": ["a", ""]}, "an entry is empty"),
        ({"choice": ["a"] * 1025}, "entries"),
        ({"grammar": "start: nothing"}, "nothing"),
        ({"grammar": "start: " + "(" * 50_000}, "nested"),
        ({"grammar": "root ::= ("}, ""),
        ({"structural_tag": "x"}, "unknown field"),
        ("text", ""),
    ],
)
def test_constraints_that_cannot_be_compiled(held_server, value, words):
    for path in (COMPLETIONS, CHAT):
        error = refused(held_server, path, structured_outputs=value)
        assert error["param"] in ("structured_outputs", "response_format")
        assert words in error["message"] and len(error["message"]) < 500


@pytest.mark.parametrize(
    "value, words",
    [
        ({"type": "json_schema"}, "schema is missing"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "schema is missing"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": ODD, "strict": False}}, "uniqueItems"),
        ({"type": "structural_tag"}, "not known"),
        ({}, "type"),
        ("json_object", ""),
    ],
)
def test_invalid_response_formats(held_server, value, words):
    error = refused(held_server, CHAT, response_format=value)
    assert error["param"] == "response_format" and words in error["message"]


def test_large_and_deep_schemas(held_server):
    deep = {"type": "string"}
    for _ in range(150):
        deep = {"type": "array", "items": deep}
    assert "nested" in refused(held_server, CHAT, structured_outputs={"json": deep})["message"]
    large = {"enum": [f"text number {i}" for i in range(20_000)]}
    assert "bytes" in refused(held_server, COMPLETIONS, structured_outputs={"json": large})["message"]
    many = {"prompt": ["x"] * 1000, "structured_outputs": {"regex": "a" * 20_000}}
    answer = held_server.http.post(COMPLETIONS, json=many)
    assert answer.status_code == 400 and "several" in answer.json()["error"]["message"]


def test_two_constraints_are_rejected(held_server):
    both = {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}
    assert "send one" in refused(held_server, CHAT, **both)["message"]


def test_an_engine_without_grammars_rejects_constraints(server):
    error = refused(server, COMPLETIONS, structured_outputs={"regex": "a"})
    assert error["code"] == "unsupported_parameter"
    thinking = {"chat_template_kwargs": {"thinking": True}}
    error = refused(server, CHAT, thinking_token_budget=3, **thinking)
    assert (error["code"], error["param"]) == ("unsupported_parameter", "thinking_token_budget")
    hint = {"thinking": {"type": "enabled", "budget_tokens": 3}, "messages": MESSAGES[:1], "max_tokens": 5}
    assert server.http.post(CHAT, json=hint).status_code == 200


def test_the_grammar_that_the_engine_receives(held_server):
    [top, answer] = grammar_of(held_server, COMPLETIONS, response_format={"type": "json_object"})
    assert (top["lark_grammar"].splitlines()[-1], answer["json_schema"]["type"]) == ("start: @answer", "object")
    strict = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    [_, answer] = grammar_of(held_server, CHAT, response_format=strict)
    assert answer["json_schema"].items() >= SCHEMA.items()
    thinking = {"chat_template_kwargs": {"thinking": True}}
    [top, answer] = grammar_of(held_server, CHAT, structured_outputs={"choice": ["a", 'b"']}, **thinking)
    assert "reasoning" in top["lark_grammar"]
    assert answer["lark_grammar"] == 'start: CHOICE\nCHOICE: "a" | "b\\""'
    [_, answer] = grammar_of(held_server, COMPLETIONS, structured_outputs={"grammar": 'root ::= "a" [0-9]+'})
    assert "start:" in answer["lark_grammar"]


def test_a_thinking_budget_becomes_a_part_of_the_grammar(held_server):
    """vLLM's, DeepSeek's and Anthropic's forms give one grammar; answers without reasoning have none."""
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 30}}
    budget = {"chat_template_kwargs": {"thinking": True}, "thinking_token_budget": 30}
    [alone] = grammar_of(held_server, CHAT, **thinking)
    assert "{0,30}" in alone["lark_grammar"] and [alone] == grammar_of(held_server, CHAT, **budget)
    [top, _] = grammar_of(held_server, CHAT, **budget, response_format={"type": "json_object"})
    assert "{0,30}" in top["lark_grammar"] and "@answer" in top["lark_grammar"]
    answer = held_server.http.post(
        "/v1/messages", json={"messages": MESSAGES[:1], "max_tokens": 5, "model": "tiny"} | thinking
    )
    assert json.loads(answer.json()["error"]["message"])["grammars"] == [alone]
    off = held_server.http.post(CHAT, json={"messages": MESSAGES[:1], "max_tokens": 5, "thinking_token_budget": 30})
    assert off.status_code == 200
    assert "send one" in refused(held_server, CHAT, **thinking, thinking_token_budget=31)["message"]
    assert "thinking_token_budget" in refused(held_server, CHAT, thinking_token_budget=-1)["message"]
    assert refused(held_server, COMPLETIONS, thinking_token_budget=3)["param"] == "thinking_token_budget"


def test_required_tool_calls(held_server):
    """Required, named and strict calls are constrained to their schemas; others are not."""
    for fields in ({"tool_choice": "required"}, {"tool_choice": {"type": "function", "function": {"name": "f"}}}):
        entries = grammar_of(held_server, CHAT, tools=TOOLS, **fields)
        assert "body: calls" in entries[0]["lark_grammar"]
        assert len(entries) == (3 if fields["tool_choice"] == "required" else 2)
        assert all(entry["json_schema"]["x-guidance"]["lenient"] for entry in entries[1:])
    strict = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}, TOOLS[1]]
    entries = grammar_of(held_server, CHAT, tools=strict)
    assert "text_or_calls" in entries[0]["lark_grammar"]
    assert [entry["json_schema"]["x-guidance"]["lenient"] for entry in entries[1:]] == [False, True]
    both = grammar_of(held_server, CHAT, tools=strict, response_format={"type": "json_object"})
    assert "body: @answer | calls" in both[0]["lark_grammar"]
    answer = held_server.http.post(CHAT, json={"messages": MESSAGES[:1], "tools": TOOLS, "max_tokens": 3})
    assert answer.status_code == 200


FUNCTION = {"name": "f", "parameters": SCHEMA}


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}, "@answer"),
        ("/v1/responses", {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"}, "body: calls"),
        ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "@answer"),
        (
            "/v1/messages",
            {"tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}},
            "body: calls",
        ),
        (
            "/v1/messages",
            {"tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "tool", "name": "f"}},
            "body: calls",
        ),
    ],
)
def test_other_protocols_support_constraints(held_server, path, fields, words):
    if path == "/v1/responses":
        asked = {"input": "x", "max_output_tokens": 5}
    else:
        asked = {"messages": MESSAGES[:1], "max_tokens": 5}
    answer = held_server.http.post(path, json=asked | fields)
    assert "grammars" in answer.text, answer.text
    message = answer.json()["error"]["message"]
    entries = json.loads(message)["grammars"]
    assert words in entries[0]["lark_grammar"]
    assert entries[1]["json_schema"].items() >= SCHEMA.items()


def test_impossible_tool_choices(held_server):
    unknown = {"type": "function", "function": {"name": "g"}}
    assert "name" in refused(held_server, CHAT, tools=TOOLS, tool_choice=unknown)["message"]
    assert refused(held_server, CHAT, tool_choice="required")["param"] == "tool_choice"
    assert refused(held_server, CHAT, tools=TOOLS, tool_choice={"type": "function"})["param"] == "tool_choice"
    odd = {"type": "object", "properties": {"a": ODD}}
    tool = {"type": "function", "function": {"name": "f", "parameters": odd, "strict": True}}
    error = refused(held_server, CHAT, tools=[tool])
    assert error["param"] == "tools" and "uniqueItems" in error["message"]


def test_a_schema_from_openais_client(held_server):
    before = held_server.metric("dsv3:grammars_refused_total")
    with openai.OpenAI(base_url=f"{held_server.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as refusal:
            client.chat.completions.create(
                model="tiny",
                messages=MESSAGES[:1],
                response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": ODD}},
            )
        assert refusal.value.param == "response_format"
    assert held_server.metric("dsv3:grammars_refused_total") == before + 1


def test_compiling_a_grammar_does_not_block_the_event_loop(held_server):
    """A slow grammar delays no request without one."""
    slow = {
        "prompt": "x",
        "structured_outputs": {"regex": "(" + "|".join(f"{'ab' * 60}{i}" for i in range(1500)) + ")"},
    }
    with httpx.Client(base_url=held_server.url, timeout=60) as other:
        assert other.post(COMPLETIONS, json=slow).status_code in (400, 500)
        assert other.post(COMPLETIONS, json={"prompt": [5], "max_tokens": 1}).status_code == 200


CHAIN = "root::=a00000\n" + "".join(f"a{i:05d}::=a{i + 1:05d}\n" for i in range(3000)) + 'a03000::="x"\n'


@pytest.mark.parametrize("grammar", ["\n" * 30_000, CHAIN], ids=["line feeds", "a chain of rules"])
def test_nonlinear_work_on_grammars_runs_in_the_worker_process(held_server, grammar):
    """The API server's own processor time stays far below the conversion's."""
    api_server = psutil.Process(held_server.process.pid)
    grammar_of(held_server, COMPLETIONS, structured_outputs={"regex": "a"})  # the process has been started
    before = sum(api_server.cpu_times()[:2])
    answer = held_server.http.post(
        COMPLETIONS, json={"prompt": "x", "structured_outputs": {"grammar": grammar}}, timeout=300
    )
    assert answer.status_code in (400, 500)
    assert sum(api_server.cpu_times()[:2]) - before < 0.3


def wanted(pattern: str) -> AnswerConstraints:
    return AnswerConstraints(constraint=StructuredOutputsParams(regex=pattern))


def with_pool(work, tokenizer, **settings):
    """Runs `work(pool)` on an event loop of its own."""

    async def run():
        pool = GrammarPool(tokenizer, **settings)
        try:
            return await work(pool)
        finally:
            await pool.close()

    return asyncio.run(run())


async def result_of(pool: GrammarPool, what: AnswerConstraints) -> str:
    try:
        await pool.compile(what, RULES)
        return "fine"
    except GrammarError as error:
        return str(error)


def workers() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if "dsv3.server.grammars" in serving.command_of(p)]


def test_a_slow_grammar_is_rejected_and_the_next_one_is_compiled(model_dir):
    slow = AnswerConstraints(constraint=StructuredOutputsParams(grammar=CHAIN))

    async def work(pool):
        late = await result_of(pool, slow)
        assert not workers()
        return late, [await result_of(pool, wanted(pattern)) for pattern in ("a", "(", "b")]

    late, others = with_pool(work, model_dir / "tokenizer.json", deadline_s=0.1)
    assert "takes longer than 0.1 s" in late
    assert others[::2] == ["fine", "fine"] and "regex" in others[1]


def test_a_vocabulary_without_grammars_is_the_reason_for_every_request(tmp_path):
    """Also for later requests, which the same worker gets."""

    async def work(pool):
        reasons = []
        for pattern in ("a", "b"):
            with pytest.raises(VocabularyError) as error:
                await pool.compile(wanted(pattern), RULES)
            reasons.append(str(error.value))
        return reasons

    first, second = with_pool(work, tmp_path / "tokenizer.json")
    assert first == second and "tokenizer.json" in first


@pytest.mark.parametrize("trouble", [TimeoutError, PoisonRequest])
def test_a_failed_grammar_is_cached_for_a_while(model_dir, monkeypatch, trouble):
    """The load of the machine may have caused the failure."""

    async def dies(self, frame):
        raise trouble

    async def work(pool):
        with monkeypatch.context() as patch:
            patch.setattr(WorkerProcess, "call", dies)
            first = [await result_of(pool, wanted("a"))]
            patch.setattr(grammars, "FAILURE_TTL_S", -1.0)
            first.append(await result_of(pool, wanted("b")))
        return first, [await result_of(pool, wanted(pattern)) for pattern in ("a", "b")]

    first, later = with_pool(work, model_dir / "tokenizer.json")
    assert later == [first[0], "fine"] and "fine" not in first


def test_results_are_cached_within_limits(model_dir, monkeypatch):
    """Keeps at most `MAX_CACHED` results and `MAX_CACHED_CHARS` characters."""
    monkeypatch.setattr(grammars, "MAX_CACHED", 2)

    async def work(pool):
        first = [await pool.compile(wanted(pattern), RULES) for pattern in ("a", "b", "c")]
        await pool._worker.stop()
        assert await pool.compile(wanted("c"), RULES) == first[-1]
        assert len(pool._cache) == 2 and not workers()
        monkeypatch.setattr(grammars, "MAX_CACHED_CHARS", len(first[-1]))
        await pool.compile(wanted("d"), RULES)
        assert len(pool._cache) == 1

    with_pool(work, model_dir / "tokenizer.json")


def test_equal_grammars_are_compiled_once_though_their_first_client_has_gone(model_dir, monkeypatch):
    """Else each line of a batch with a new schema, and each retry of a slow one, would take the worker's time again."""
    calls = []

    async def call(self, frame):
        calls.append(frame)
        await asyncio.sleep(0.01)
        return WorkerReply("the grammar")

    async def work(pool):
        monkeypatch.setattr(WorkerProcess, "call", call)
        tasks = [asyncio.create_task(pool.compile(wanted("a"), RULES)) for _ in range(9)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        return found[1:]

    assert with_pool(work, model_dir / "tokenizer.json") == ["the grammar"] * 8
    assert len(calls) == 1
