"""Tokenising for many requests at a time: who waits for whom, what is refused, what is dropped."""

import asyncio
import threading
import types
from pathlib import Path

import pytest

from dsv3.server.config import ServerConfig
from dsv3.server.protocol.errors import ApiError
from dsv3.server.serving.service import Service
from dsv3.text.tokenizer import Tokenizer
from tests.dsv3.text import tiny

TOKENIZER = Tokenizer(tiny.backend(), tiny.config())
LARGE, SMALL = "large" * 2**20, "an honest prompt " * 140


class Held:
    """A tokenizer that encodes no large text before it is told to, and notes what it has begun."""

    max_token_chars = 100

    def __init__(self):
        self.release, self.begun = threading.Event(), []

    def encode(self, text, add_special_tokens):
        self.begun.append(len(text))
        if len(text) > 2**16:
            assert self.release.wait(60)
        return [len(text)]


def serve(use, tokenizer, max_model_len=2**20, **settings_):
    """Runs `use(service)` with an engine of which only the rules are known."""
    info = types.SimpleNamespace(rules=types.SimpleNamespace(max_model_len=max_model_len))
    engine = types.SimpleNamespace(info=info, state="ready")

    async def run():
        service = Service(ServerConfig(Path(), ("m",)), engine, tokenizer, None, **settings_)
        try:
            return await use(service)
        finally:
            await service.close()

    return asyncio.run(run())


def ask(service, text):
    return asyncio.create_task(service.encode(text, True, "prompt"))


def test_a_small_text_waits_for_no_large_one():
    tokenizer = Held()

    async def use(service):
        large = [ask(service, LARGE) for _ in range(3)]
        await asyncio.sleep(0.05)
        small = await asyncio.wait_for(ask(service, SMALL), 60)
        assert not any(task.done() for task in large)
        tokenizer.release.set()
        return small.tolist(), [ids.tolist() for ids in await asyncio.gather(*large)]

    assert serve(use, tokenizer) == ([len(SMALL)], [[len(LARGE)]] * 3)


def test_the_text_of_a_client_that_has_gone_is_not_encoded():
    tokenizer = Held()

    async def use(service):
        first, *others = [ask(service, LARGE + "x" * i) for i in range(20)]
        await asyncio.sleep(0.05)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        tokenizer.release.set()
        await first
        await ask(service, LARGE + "last")

    serve(use, tokenizer)
    assert tokenizer.begun == [len(LARGE), len(LARGE + "last")]


def test_too_many_texts_are_told_to_come_again():
    """Their bytes count, which are four per character here."""
    tokenizer, text = Held(), LARGE + "🙂"

    async def use(service):
        tasks = [ask(service, text) for _ in range(12)]
        await asyncio.sleep(0.05)
        refused = [task for task in tasks if task.done()]
        tokenizer.release.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        return len(refused), [error for error in results if isinstance(error, ApiError)]

    refused, errors = serve(use, tokenizer)
    assert refused == len(errors) == 12 - 1 - 3  # one of 20 MiB is encoded, three fit into 64 MiB
    assert {(e.status, e.body.code, e.retry_after) for e in errors} == {(503, "queue_full", 1)}


def test_who_waits_too_long_is_told_to_come_again():
    tokenizer = Held()

    async def use(service):
        first = ask(service, LARGE)
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="busy"):
            await ask(service, LARGE)
        tokenizer.release.set()
        return await first

    assert serve(use, tokenizer, wait_s=0.01).tolist() == [len(LARGE)]


def test_a_hopeless_text_is_not_encoded_whole(monkeypatch):
    """Only as much of it as it takes to be certain."""
    seen = []
    encode = TOKENIZER.encode
    monkeypatch.setattr(TOKENIZER, "encode", lambda text, *a, **k: seen.append(len(text)) or encode(text, *a, **k))

    async def use(service):
        with pytest.raises(ApiError, match="maximum context length is 40000 tokens"):
            await ask(service, "hello wörld " * 30_000)

    serve(use, TOKENIZER, max_model_len=40_000)
    assert 0 < sum(seen) < 200_000
