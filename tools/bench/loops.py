"""Sends requests in a closed loop (a fixed number at a time) or in an open one (each due at a given time).

In the open loop the latencies of a request count from the moment it was due, not from the moment the client came to
send it. No request waits for another's answer. A server that stalls is charged for every request that was due
meanwhile (no coordinated omission).
"""

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

from tools.bench.stream import Record

Send = Callable[[int, bytes, float], Awaitable[Record]]
"""Sends one request, `send(index, body, scheduled_s)`, and returns what became of it."""


@dataclasses.dataclass(frozen=True)
class LoopResult:
    """The records of all requests that have ended, by index, and the time the client needed: `wall_s` and `cpu_s`."""

    records: tuple[Record, ...]
    wall_s: float
    cpu_s: float
    interrupted: bool = False


async def run(
    send: Send,
    bodies: Sequence[bytes],
    *,
    concurrency: int | None = None,
    offsets: Sequence[float] | None = None,
    on_record: Callable[[Record], None] = lambda record: None,
) -> LoopResult:
    """Sends every body and returns once each has its record; a run that is cancelled returns the records it has.

    Without `offsets` the loop is closed: `concurrency` requests at a time, each due as soon as another has ended. With
    `offsets` it is open: request i is due `offsets[i]` seconds after the start. There `concurrency` holds requests
    back, and the time they are held counts as latency.
    """
    records: dict[int, Record] = {}

    async def one(index: int, scheduled_s: float) -> None:
        record = await send(index, bodies[index], scheduled_s)
        records[index] = record
        on_record(record)

    began_s, began_cpu_s, interrupted = time.monotonic(), time.process_time(), False
    try:
        if offsets is None:
            await _closed(one, range(len(bodies)), concurrency or 1)
        else:
            await _open(one, [began_s + offset for offset in offsets], concurrency)
    except asyncio.CancelledError:
        interrupted = True
    ordered = tuple(records[index] for index in sorted(records))
    return LoopResult(ordered, time.monotonic() - began_s, time.process_time() - began_cpu_s, interrupted)


async def _closed(one: Callable[[int, float], Awaitable[None]], indices: Iterable[int], concurrency: int) -> None:
    queue = iter(indices)

    async def worker() -> None:
        for index in queue:
            await one(index, time.monotonic())

    async with asyncio.TaskGroup() as tasks:
        for _ in range(concurrency):
            tasks.create_task(worker())


async def _open(one: Callable[[int, float], Awaitable[None]], due_s: Sequence[float], concurrency: int | None) -> None:
    turns = asyncio.Semaphore(concurrency or len(due_s) or 1)

    async def held(index: int) -> None:
        async with turns:
            await one(index, due_s[index])

    async with asyncio.TaskGroup() as tasks:
        for index, due in enumerate(due_s):
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            tasks.create_task(held(index))
