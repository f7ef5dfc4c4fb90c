"""The queue of workers that all requests share: order, limits and cancellation."""

import asyncio
import functools
import threading
import types
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv3.server.config import ServerConfig
from dsv3.server.limits import SMALL_BYTES, BodyReader, WorkerQueue, WorkersBusy
from dsv3.server.protocol.errors import ApiError
from dsv3.server.protocol.openai import ChatMessage, ChatRequest
from dsv3.server.serving.prompts import RequestTools, chat_prompt
from dsv3.server.serving.service import Service
from dsv3.server.worker_process import WorkerDied


class Load:
    """Work on `workers`, each item of which ends on request."""

    def __init__(self, num_workers, **bounds):
        self.workers = WorkerQueue([f"worker {i}" for i in range(num_workers)], **bounds)
        self.begun, self.tasks, self.gates, self.busy = [], {}, {}, set()

    async def settle(self):
        for _ in range(8):
            await asyncio.sleep(0)

    async def ask(self, size):
        number = len(self.tasks)

        async def work(worker):
            assert worker not in self.busy
            self.begun.append(number)
            self.busy.add(worker)
            await self.gates.setdefault(number, asyncio.Event()).wait()
            self.busy.remove(worker)
            return number

        self.tasks[number] = asyncio.create_task(self.workers.run(size, work))
        await self.settle()

    def is_waiting(self, number):
        return not self.tasks[number].done() and number not in self.begun


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(1, 6)), st.tuples(st.sampled_from(["end", "leave"]), st.integers(0, 30))
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 3), STEPS)
def test_every_item_is_run_rejected_or_cancelled(num_workers, steps):
    """Work starts in order; the queue stays within its limits; work that is cancelled in the queue never starts."""

    async def run():
        load, sizes, left = Load(num_workers, requests=3, nbytes=10, wait_s=None), {}, set()
        for what, value in steps:
            if what == "ask":
                waiting = [n for n in load.tasks if load.is_waiting(n)]
                has_capacity = len(waiting) < 3 and sum(sizes[n] for n in waiting) + value <= 10
                must_take = len(load.busy) < num_workers or has_capacity
                sizes[len(sizes)] = value
                await load.ask(value)
                newest = load.tasks[len(sizes) - 1]
                assert must_take == (not newest.done()), "refused exactly when there is no room"
                if newest.done():
                    with pytest.raises(WorkersBusy):
                        await newest
                    left.add(len(sizes) - 1)
            elif value in load.tasks and what == "end" and value in load.begun:
                load.gates[value].set()
            elif value in load.tasks and not load.tasks[value].done() and what == "leave":
                load.tasks[value].cancel()
                left.add(value)
            await load.settle()
        for _ in load.tasks:
            for gate in load.gates.values():
                gate.set()
            await load.settle()
        assert load.begun == sorted(load.begun) and not load.busy
        for number, task in load.tasks.items():
            assert number in left or await task == number

    asyncio.run(run())


def test_cancelled_work_never_starts():
    async def run():
        load = Load(1, requests=8, nbytes=8, wait_s=None)
        for _ in range(4):
            await load.ask(1)
        for number in (1, 2):
            load.tasks[number].cancel()
        await load.settle()
        load.gates[0].set()
        await load.settle()
        return load.begun

    assert asyncio.run(run()) == [0, 3]


def test_a_closed_queue_ends_all_work_at_once():
    """Also work that waits, and work whose turn has come in the same moment."""

    async def run():
        load = Load(2, requests=8, nbytes=8, wait_s=None)
        for _ in range(4):
            await load.ask(1)
        starting = asyncio.create_task(load.workers.run(1, lambda worker: asyncio.sleep(60)))
        load.gates[0].set()
        await asyncio.sleep(0)
        await load.workers.close()
        with pytest.raises(WorkersBusy):
            await load.workers.run(1, lambda worker: asyncio.sleep(60))
        async with asyncio.timeout(30):
            return await asyncio.gather(*load.tasks.values(), starting, return_exceptions=True)

    first, *others = asyncio.run(run())
    assert first == 0 and all(isinstance(each, WorkersBusy | asyncio.CancelledError) for each in others)


def test_an_error_after_cancellation_is_not_logged(caplog):
    async def run():
        workers, gate = WorkerQueue(["worker"]), asyncio.Event()

        async def work(_):
            await gate.wait()
            raise ValueError

        asked = asyncio.create_task(workers.run(1, work))
        await asyncio.sleep(0)
        asked.cancel()
        gate.set()
        await asyncio.gather(asked, return_exceptions=True)
        return await workers.run(1, lambda worker: asyncio.sleep(0, worker))

    assert asyncio.run(run()) == "worker"
    assert not caplog.records


@pytest.mark.parametrize("error", [WorkersBusy("busy"), WorkerDied("died")])
def test_a_conversation_without_a_worker_gets_503(error):
    async def render(_):
        raise error

    pool = types.SimpleNamespace(render=render)
    service = Service(ServerConfig(Path(), ("m",)), types.SimpleNamespace(), types.SimpleNamespace(), pool)
    request = ChatRequest(messages=[ChatMessage(role="user", content="x")])
    with pytest.raises(ApiError) as raised:
        asyncio.run(chat_prompt(service, request, RequestTools()))
    assert raised.value.status == 503 and raised.value.retry_after == 1
    assert (raised.value.body.code == "queue_full") == isinstance(error, WorkersBusy)


@pytest.mark.parametrize("thread", ["prepare", "read"])
def test_waiting_too_long_for_a_thread_gets_503(thread):
    """An API server has one thread that checks long prompts, and one that decodes large bodies."""
    held = threading.Event()

    async def run():
        service = Service(ServerConfig(Path(), ("m",)), types.SimpleNamespace(), None, None, wait_s=0.01)
        is_body, size = thread == "read", SMALL_BYTES + 1
        start = functools.partial(service.read_body, size) if is_body else functools.partial(service.run, True)
        first = asyncio.create_task(start(lambda: held.wait(60)))
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as raised:
            await start(lambda: None)
        held.set()
        assert await first
        await service.close()
        return raised.value

    error = asyncio.run(run())
    assert (error.status, error.body.code, error.retry_after) == (503, "queue_full", 1)


def test_large_bodies_are_decoded_in_a_thread():
    async def run():
        bodies = BodyReader()
        found = [await bodies.run(size, threading.current_thread) for size in (1, SMALL_BYTES, SMALL_BYTES + 1)]
        await bodies.close()
        return [thread is threading.main_thread() for thread in found]

    assert asyncio.run(run()) == [True, True, False]
