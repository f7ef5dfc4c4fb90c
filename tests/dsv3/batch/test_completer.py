"""Batch lines through the server's request handlers, with a fake engine process."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from dsv3.batch.journal import BatchError
from dsv3.config.options import EngineOptions
from dsv3.config.server_options import ServerOptions
from dsv3.server.batches import completer as completer_module
from dsv3.server.batches.completer import ServiceCompleter, service_completer
from dsv3.server.config import ServerConfig
from dsv3.server.limits import WorkersBusy
from dsv3.server.worker_process import WorkerDied
from tests.dsv3.server.fake_engine import BAD_OUTPUT, CRASH_STEP, FAIL_STEP
from tests.dsv3.text import dialects, tiny

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = b'{"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}'


def ask(prompt, **fields):
    return json.dumps({"prompt": prompt, "max_tokens": 3, "return_token_ids": True} | fields).encode()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return tiny.write(tmp_path_factory.mktemp("model"))


def configured(model_dir, factory_options=None, template_deadline_s=10.0, server=None, notify=print, **options):
    return ServerConfig(
        model_dir=model_dir,
        template_deadline_s=template_deadline_s,
        model_names=("tiny",),
        options=server or ServerOptions(),
        engine=EngineOptions(**options),
        factory_options=factory_options or {},
        engine_factory="tests.dsv3.batch.fake_engine:make",
        notify=notify,
    )


def serve(model_dir, use, **settings):
    """Runs `use(completer, service)` against a fresh engine process."""

    async def run():
        async with service_completer(configured(model_dir, **settings)) as completer:
            return await use(completer, completer._service)

    return asyncio.run(run())


@pytest.fixture(scope="module")
def shared(model_dir):
    """Returns what runs `use(completer, service)` against one engine process: eight sequences at once."""
    with asyncio.Runner() as runner:
        opened = service_completer(configured(model_dir, max_num_seqs=8))
        completer = runner.run(opened.__aenter__())
        try:
            yield lambda use: runner.run(use(completer, completer._service))
        finally:
            runner.run(opened.__aexit__(None, None, None))


def body_of(answer):
    return json.loads(bytes(answer.body))


def test_a_line_gets_the_servers_response(shared):
    async def use(completer, service):
        return await completer.complete(COMPLETIONS, ask([[7, 8], [20]], n=2)), completer.concurrency

    answer, concurrency = shared(use)
    body = body_of(answer)
    assert answer.status == 200 and answer.request_id == body["id"] and answer.output_tokens == 12
    assert body["object"] == "text_completion" and body["model"] == "tiny"
    assert [choice["token_ids"] for choice in body["choices"]] == [[7, 8, 7]] * 2 + [[20, 20, 20]] * 2
    assert body["usage"]["completion_tokens"] == 12
    assert concurrency == 16


def test_refusals_are_replies_in_openais_format(shared, monkeypatch):
    lines = {
        "stream": (COMPLETIONS, ask([1], stream=True)),
        "model": (COMPLETIONS, ask([1], model="gpt-4")),
        "too long": (COMPLETIONS, ask([7] * 3000)),
        "wrong type": (COMPLETIONS, ask([1], temperature="hot")),
        "no messages": ("/v1/chat/completions", b'{"messages": []}'),
        "fails alone": (COMPLETIONS, ask([BAD_OUTPUT])),
    }

    traces = []

    def end(span, error):
        traces.append((span.attributes["http.response.status_code"], error))

    async def use(completer, service):
        trace = SimpleNamespace(is_sampled=True, end=end)
        monkeypatch.setattr(service, "tracer", SimpleNamespace(start=lambda name, headers: trace))
        return {name: await completer.complete(*line) for name, line in lines.items()}

    answers = shared(use)
    statuses = {name: answer.status for name, answer in answers.items()}
    assert statuses == {name: 400 for name in lines} | {"model": 404, "fails alone": 500}
    assert traces == [(status, "status 500" if status == 500 else None) for status in statuses.values()]
    for answer in answers.values():
        assert body_of(answer)["error"]["message"]
        assert answer.request_id == "" and answer.output_tokens == 0


def test_tool_calls_are_parsed_as_over_http(tmp_path):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"k": 1}'}}
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}], "tools": tools}

    async def use(completer, service):
        return await completer.complete(CHAT, json.dumps(body).encode())

    lines: list[str] = []
    [choice] = body_of(serve(dialects.write(tmp_path), use, notify=lines.append))["choices"]
    assert "tool-call format: deepseek_v31; reasoning: separate" in lines
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"k": 1}'}


def test_a_full_queue_is_retried(model_dir):
    async def use(completer, service):
        return await asyncio.gather(*(completer.complete(COMPLETIONS, ask([20 + i])) for i in range(20)))

    answers = serve(model_dir, use, max_num_seqs=2, max_num_queued_reqs=1)
    assert [answer.status for answer in answers] == [200] * 20


@pytest.mark.parametrize(("failure", "restarts"), [(FAIL_STEP, 0), (CRASH_STEP, 3)])
def test_only_the_request_that_kills_engines_stays_unanswered(model_dir, failure, restarts):
    """The engine is restarted; only the line that kills engines gets no answer."""

    async def use(completer, service):
        harmless = [completer.complete(COMPLETIONS, ask([20 + i], max_tokens=500)) for i in range(3)]
        deadly = completer.complete(COMPLETIONS, ask([failure]))
        return await asyncio.gather(*harmless, deadly, return_exceptions=True)

    results = serve(model_dir, use, server=ServerOptions(max_request_restarts=restarts))
    if restarts:
        assert [result.status for result in results] == [200, 200, 200, 500]
        assert body_of(results[3])["error"]["code"] == "engine_died"
        return
    assert all(isinstance(result, BatchError) for result in results), results


def test_an_engine_that_cannot_start_is_an_error(model_dir):
    with pytest.raises(BatchError, match="engine"):
        serve(model_dir, None, factory_options={"fail": "the weights are missing"})


def test_an_invalid_tokenizer_is_an_error(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BatchError, match=r"tokenizer\.json"):
        serve(tmp_path, None)


def test_a_conversation_is_answered(shared):
    async def use(completer, service):
        return await completer.complete(CHAT, HELLO)

    answer = shared(use)
    assert answer.status == 200 and body_of(answer)["choices"][0]["message"]["role"] == "assistant"


def test_cancelling_a_line_aborts_its_request(shared):
    async def use(completer, service):
        task = asyncio.create_task(completer.complete(COMPLETIONS, ask([20], max_tokens=1000)))
        while not service.engine.num_in_flight:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return service.engine.num_in_flight

    assert shared(use) == 0


def test_lines_that_queue_for_a_slow_template_are_all_answered(tmp_path):
    """Together they take longer than the deadline of each."""
    directory = tiny.write(tmp_path)
    slow = "{% for a in range(100) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
    (directory / "chat_template.jinja").write_text(slow + "{{ messages[0].content }}")

    async def use(completer, service):
        return await asyncio.gather(*(completer.complete(CHAT, HELLO) for _ in range(50)))

    answers = serve(directory, use, template_deadline_s=1.5)
    assert [answer.status for answer in answers] == [200] * 50


async def with_failures(completer, service, monkeypatch, *failures):
    """Answers a line whose template workers raise `failures`, one by one, and then render."""
    left = list(failures)

    async def render(request):
        if left:
            raise left.pop(0)
        return "def add"

    monkeypatch.setattr(completer_module, "_BUSY_SECONDS", (0.001, 0.002))
    monkeypatch.setattr(service.templates, "render", render)
    return await completer.complete(CHAT, HELLO)


def test_temporary_failures_are_retried(shared, monkeypatch):
    async def use(completer, service):
        failures = [WorkersBusy("busy")] * 20 + [WorkerDied("died")] * 3
        return await with_failures(completer, service, monkeypatch, *failures)

    assert shared(use).status == 200


def test_template_workers_that_keep_dying_end_the_batch(shared, monkeypatch):
    async def use(completer, service):
        with pytest.raises(BatchError, match="no memory for a process"):
            await with_failures(completer, service, monkeypatch, *[WorkerDied("no memory for a process")] * 8)
        return await completer.complete(CHAT, HELLO)

    assert shared(use).status == 200


def test_few_lines_are_prepared_at_a_time(shared, monkeypatch):
    """The others wait as bytes; a line whose prompt is ready no longer counts."""
    preparing, most = set(), []

    async def render(request):
        preparing.add(id(request))
        most.append(len(preparing))
        await asyncio.sleep(0.001)
        preparing.discard(id(request))
        return "def add"

    async def use(completer, service):
        monkeypatch.setattr(service.templates, "render", render)
        return await asyncio.gather(*(completer.complete(CHAT, HELLO) for _ in range(60)))

    answers = shared(use)
    assert [answer.status for answer in answers] == [200] * 60
    assert 2 <= max(most) <= 16


def test_lines_may_set_a_priority_not_below_the_minimum(shared, monkeypatch):
    async def use(completer, service):
        found = []
        submit = service.engine.submit
        monkeypatch.setattr(
            service.engine, "submit", lambda requests, streams: (found.extend(requests), submit(requests, streams))
        )
        for minimum in (-5, 100):
            limited = ServiceCompleter(service, min_priority=minimum)
            for fields in ({}, {"priority": -3}, {"priority": 200}):
                assert (await limited.complete(COMPLETIONS, ask([5], **fields))).status == 200
        refused = await completer.complete(COMPLETIONS, ask([5], priority=2**31))
        return [request.priority for request in found], refused

    priorities, refused = shared(use)
    assert priorities == [0, -3, 200, 100, 100, 200]
    assert refused.status == 400 and body_of(refused)["error"]["param"] == "priority"
