"""A process that is asked: what a question may cost, and who is to blame for an end."""

import asyncio

import psutil
import pytest

from dsv3.server import worker_process
from dsv3.server.worker_process import PoisonRequest, WorkerDied, WorkerProcess


def frame(question: bytes) -> bytearray:
    return bytearray(len(question).to_bytes(4, "little") + question)


def asked(work, deadline_s: float):
    """Runs `work(process)` on an event loop of its own."""

    async def run():
        process = WorkerProcess("tests.dsv3.server.asked", "answers", frame(b""), deadline_s, lambda told: None)
        try:
            return await work(process)
        finally:
            await process.stop()

    return asyncio.run(run())


@pytest.mark.parametrize("question", [b"work", b"search"])
def test_a_question_has_some_time_of_the_processor(question: bytes) -> None:
    """It ends wherever it is then, inside of one long call too, and the next one is answered."""

    async def work(process):
        with pytest.raises(TimeoutError):
            await process.ask(frame(question))
        return await process.ask(frame(b"fine"))

    assert asked(work, deadline_s=0.2).isdigit()


def test_a_machine_that_is_busy_is_not_held_against_a_question(monkeypatch) -> None:
    """What waits twice as long as it may compute is answered, by the process that it was asked of."""
    monkeypatch.setattr(worker_process, "_WALL_FACTOR", 1000)

    async def work(process):
        return {await process.ask(frame(question)) for question in (b"fine", b"sleep", b"fine")}

    assert len(asked(work, deadline_s=0.5)) == 1


def test_a_process_that_gets_no_time_is_given_up(monkeypatch) -> None:
    monkeypatch.setattr(worker_process, "_WALL_FACTOR", 1)

    async def work(process):
        with pytest.raises(WorkerDied, match="no answer"):
            await process.ask(frame(b"hang"))

    asked(work, deadline_s=0.1)


def test_a_question_that_two_processes_die_of_is_to_blame() -> None:
    async def work(process):
        with pytest.raises(PoisonRequest):
            await process.ask(frame(b"die"))
        return await process.ask(frame(b"fine"))

    assert asked(work, deadline_s=5.0).isdigit()


def test_a_process_that_dies_between_two_questions_is_reaped_and_replaced() -> None:
    async def work(process):
        first = psutil.Process(int(await process.ask(frame(b"fine"))))
        first.kill()
        async with asyncio.timeout(60):
            while first.is_running():  # a zombie is
                await asyncio.sleep(0.01)
        return first.pid, int(await process.ask(frame(b"fine")))

    first, second = asked(work, deadline_s=5.0)
    assert first != second
