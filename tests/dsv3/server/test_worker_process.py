"""Worker processes: limits on a request's processor time, crashes and restarts."""

import asyncio

import psutil
import pytest

from dsv3.server import worker_process
from dsv3.server.worker_process import PoisonRequest, WorkerDied, WorkerProcess


def frame(action: bytes) -> bytearray:
    return bytearray(len(action).to_bytes(4, "little") + action)


def run_worker(work, deadline_s: float):
    """Runs `work(process)` on an event loop of its own."""

    async def run():
        process = WorkerProcess("tests.dsv3.server.toy_worker", "handles requests", frame(b""), deadline_s, ValueError)
        try:
            return await work(process)
        finally:
            await process.stop()

    return asyncio.run(run())


@pytest.mark.parametrize("action", [b"work", b"search"])
def test_a_request_has_a_limit_of_processor_time(action: bytes) -> None:
    """It ends anywhere, also inside one long call, and the next request succeeds."""

    async def work(process):
        with pytest.raises(TimeoutError):
            await process.call(frame(action))
        return await process.call(frame(b"fine"))

    assert run_worker(work, deadline_s=0.2).text.isdigit()


def test_waiting_for_the_processor_does_not_count_as_processor_time(monkeypatch) -> None:
    """A request that waits longer than its limit of processor time succeeds in the same process."""
    monkeypatch.setattr(worker_process, "_WALL_FACTOR", 1000)

    async def work(process):
        return {await process.call(frame(action)) for action in (b"fine", b"sleep", b"fine")}

    assert len(run_worker(work, deadline_s=0.5)) == 1


def test_a_worker_without_processor_time_counts_as_dead(monkeypatch) -> None:
    monkeypatch.setattr(worker_process, "_WALL_FACTOR", 1)

    async def work(process):
        with pytest.raises(WorkerDied, match="did not respond within"):
            await process.call(frame(b"hang"))

    run_worker(work, deadline_s=0.1)


def test_a_request_that_crashes_two_workers_is_poison() -> None:
    async def work(process):
        with pytest.raises(PoisonRequest):
            await process.call(frame(b"die"))
        return await process.call(frame(b"fine"))

    assert run_worker(work, deadline_s=5.0).text.isdigit()


def test_a_worker_that_dies_while_idle_is_reaped_and_replaced() -> None:
    async def work(process):
        first = psutil.Process(int((await process.call(frame(b"fine"))).text))
        first.kill()
        async with asyncio.timeout(60):
            while first.is_running():  # a zombie is
                await asyncio.sleep(0.01)
        return first.pid, int((await process.call(frame(b"fine"))).text)

    first, second = run_worker(work, deadline_s=5.0)
    assert first != second
