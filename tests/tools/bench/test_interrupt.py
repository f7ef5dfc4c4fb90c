"""Interrupts: the first keeps a result, the second ends the process."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest
import uvloop

from tools.bench.interrupt import SIGNALS, Interrupts


@pytest.fixture
def interrupts():
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield Interrupts("test")
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_cancels_what_waits(interrupts, number):
    async def work() -> str:
        try:
            os.kill(os.getpid(), number)
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            return "what there is"
        return "all"

    assert uvloop.run(interrupts.run(work())) == "what there is"


def test_a_result_that_is_there_already_is_kept(interrupts):
    async def work() -> str:
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGINT)
        return "all"

    assert uvloop.run(interrupts.run(work())) == "all"


def test_one_that_comes_before_the_start_counts(interrupts):
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(asyncio.CancelledError):
        uvloop.run(interrupts.run(asyncio.sleep(3600)))


def test_the_second_ends_a_process_that_is_busy():
    code = "from tools.bench.interrupt import *; Interrupts('test'); print('ready', flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code], stdout=-1, stderr=-1, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGINT)
            assert process.stderr.readline() == "test: SIGINT: reporting what was measured; once more ends at once\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 128 + signal.SIGTERM
        finally:
            process.kill()
