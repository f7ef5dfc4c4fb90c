"""The loops, with requests that are answered by the test instead of a server; time is real but never asserted on."""

import asyncio
import time

import pytest

from tools.bench import loops
from tools.bench.stream import Record


def finish(index, scheduled_s):
    now = time.monotonic()
    return Record(index=index, scheduled_s=scheduled_s, sent_s=now, finished_s=now)


class Server:
    """Counts how many requests it is working on."""

    def __init__(self):
        self.running = self.most_running = 0
        self.order = []

    async def send(self, index, body, scheduled_s):
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.order.append((index, body))
        await asyncio.sleep(0.001)
        self.running -= 1
        return finish(index, scheduled_s)


def bodies(count):
    return [b"%d" % i for i in range(count)]


@pytest.mark.parametrize("concurrency", [1, 3, 50])
def test_closed_loop_keeps_as_many_as_asked_for(concurrency):
    server, seen = Server(), []
    result = asyncio.run(loops.run(server.send, bodies(10), concurrency=concurrency, on_record=seen.append))
    assert server.most_running == min(concurrency, 10)
    assert server.order == list(enumerate(bodies(10)))
    assert [record.index for record in result.records] == list(range(10))
    assert len(seen) == 10 and not result.interrupted


def test_open_loop_does_not_wait_for_answers():
    release = asyncio.Event()
    waiting = []

    async def send(index, body, scheduled_s):
        waiting.append(index)
        if len(waiting) == 5:
            release.set()
        await release.wait()
        return finish(index, scheduled_s)

    result = asyncio.run(loops.run(send, bodies(5), offsets=[0.0] * 5))
    assert len(result.records) == 5


def test_open_loop_counts_from_the_time_a_request_was_due():
    """The bound holds the second request back until the first has ended; it is charged for the wait."""
    server = Server()
    result = asyncio.run(loops.run(server.send, bodies(2), offsets=[0.0, 0.0], concurrency=1))
    first, second = result.records
    assert server.most_running == 1
    assert second.scheduled_s == first.scheduled_s
    assert second.sent_s >= first.finished_s
    assert second.e2e_s >= first.e2e_s


def test_requests_are_never_sent_before_they_are_due():
    result = asyncio.run(loops.run(Server().send, bodies(4), offsets=[0.0, 0.004, 0.004, 0.01]))
    assert all(record.sent_s >= record.scheduled_s for record in result.records)
    due = [record.scheduled_s - result.records[0].scheduled_s for record in result.records]
    assert due == pytest.approx([0.0, 0.004, 0.004, 0.01])


@pytest.mark.parametrize("offsets", [None, [0.0] * 6])
def test_a_cancelled_load_returns_what_it_has(offsets):
    async def cancel_after_three():
        done = []

        async def send(index, body, scheduled_s):
            if len(done) >= 3:
                task.cancel()
                await asyncio.sleep(3600)
            done.append(index)
            return finish(index, scheduled_s)

        task = asyncio.ensure_future(loops.run(send, bodies(6), concurrency=1, offsets=offsets))
        return await task

    result = asyncio.run(cancel_after_three())
    assert result.interrupted and [record.index for record in result.records] == [0, 1, 2]


def test_no_requests_is_an_empty_load():
    assert asyncio.run(loops.run(Server().send, [], concurrency=4)).records == ()
    assert asyncio.run(loops.run(Server().send, [], offsets=[])).records == ()
