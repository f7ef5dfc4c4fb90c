"""Batch lines through the server's application, with an engine process that has no model."""

import asyncio
import json

import pytest

from dsv3.api.server import ServerConfig
from dsv3.batch.completer import call, server_completer
from dsv3.batch.journal import BatchError
from tests.dsv3.batch.fake_engine import DEADLY, POISON

COMPLETIONS = "/v1/completions"


def ask(prompt, **fields):
    return json.dumps({"prompt": prompt, "max_tokens": 3, "return_token_ids": True} | fields).encode()


def serve(tmp_path, use, **options):
    """Runs `use(completer, service)` against a fresh engine process; a directory without tokenizer is enough."""
    config = ServerConfig(
        model_dir=tmp_path,
        model_names=("tiny",),
        engine_options=options,
        max_num_queued_reqs=options.get("max_num_queued_reqs", 1024),
        engine_factory="tests.dsv3.batch.fake_engine:start",
        notify=lambda line: None,
    )

    async def run():
        async with server_completer(config) as completer:
            return await use(completer, completer._service)

    return asyncio.run(run())


def body_of(answer):
    return json.loads(bytes(answer.body))


def test_a_line_is_answered_as_the_server_answers(tmp_path):
    async def use(completer, service):
        return await completer.complete(COMPLETIONS, ask([[7], [20]], n=2)), completer.concurrency

    answer, concurrency = serve(tmp_path, use)
    body = body_of(answer)
    assert answer.status == 200 and answer.request_id == body["id"] and answer.output_tokens == 12
    assert body["object"] == "text_completion" and body["model"] == "tiny"
    assert [choice["token_ids"] for choice in body["choices"]] == [[8, 9, 10]] * 2 + [[21, 22, 23]] * 2
    assert body["usage"]["completion_tokens"] == 12
    assert concurrency == 4


def test_refusals_are_answers_in_openais_shape(tmp_path):
    lines = {
        "stream": (COMPLETIONS, ask([1], stream=True)),
        "model": (COMPLETIONS, ask([1], model="gpt-4")),
        "too long": (COMPLETIONS, ask([1] * 80)),
        "wrong type": (COMPLETIONS, ask([1], temperature="hot")),
        "no tokenizer": ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "x"}]}'),
        "poisoned": (COMPLETIONS, ask([POISON])),
    }

    async def use(completer, service):
        return {name: await completer.complete(*line) for name, line in lines.items()}

    answers = serve(tmp_path, use)
    statuses = {name: answer.status for name, answer in answers.items()}
    assert statuses == {name: 400 for name in lines} | {"model": 404, "poisoned": 500}
    for answer in answers.values():
        assert body_of(answer)["error"]["message"]
        assert answer.request_id == "" and answer.output_tokens == 0


def test_a_full_queue_is_waited_out(tmp_path):
    async def use(completer, service):
        return await asyncio.gather(*(completer.complete(COMPLETIONS, ask([i])) for i in range(20)))

    answers = serve(tmp_path, use, max_num_queued_reqs=1)
    assert [answer.status for answer in answers] == [200] * 20


def test_the_engines_death_leaves_its_requests_unanswered(tmp_path):
    async def use(completer, service):
        harmless = [completer.complete(COMPLETIONS, ask([i], max_tokens=50)) for i in range(3)]
        deadly = completer.complete(COMPLETIONS, ask([DEADLY]))
        return await asyncio.gather(*harmless, deadly, return_exceptions=True)

    results = serve(tmp_path, use)
    assert isinstance(results[-1], BatchError)
    assert all(isinstance(result, BatchError) or result.status == 200 for result in results)
    assert any(isinstance(result, BatchError) for result in results[:-1])


def test_an_engine_that_cannot_start_is_an_error(tmp_path):
    with pytest.raises(BatchError, match="engine"):
        serve(tmp_path, None, broken=True)


def test_a_cancelled_line_leaves_nothing_in_the_engine(tmp_path):
    async def use(completer, service):
        task = asyncio.create_task(completer.complete(COMPLETIONS, ask([1], max_tokens=60)))
        while not service.engine.num_live:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return service.engine.num_live

    assert serve(tmp_path, use) == 0


def test_call_speaks_asgi():
    async def app(scope, receive, send):
        message = await receive()
        assert scope["path"] == "/v1/x" and dict(scope["headers"])[b"content-length"] == b"2"
        await send({"type": "http.response.start", "status": 418, "headers": []})
        await send({"type": "http.response.body", "body": message["body"], "more_body": True})
        await send({"type": "http.response.body", "body": b"!"})

    assert asyncio.run(call(app, "/v1/x", b"{}")) == (418, b"{}!")
