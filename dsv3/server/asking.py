"""A process that is asked one thing at a time, and killed when that takes too long, which a thread cannot be.

`AskedProcess` is the side that asks, `answer_questions` the side of the process.
"""

import asyncio
import contextlib
import resource
import signal
import sys
from collections.abc import Callable

from dsv3.processes import frames

_START_S = 60.0
# A process that has to wait for a core, or for its memory, gets so many seconds for each of its processor time.
_WALL_FACTOR = 6


class WorkerDied(Exception):
    """The process that is asked cannot be started, or gets no processor time; the question may be fine."""


class DeadlyQuestion(Exception):
    """Two processes in a row have died of the question."""


class _Ended(Exception):
    """The process has ended without an answer."""


class AskedProcess:
    """`python -m module`, started when it is first needed, and again when it was late or has died.

    `setup` is its first frame; `on_start` gets the answer to that, and raises where it cannot be used. `does` says for
    people what the process does. A question has `deadline_s` seconds of the processor's time, so that no verdict
    depends on what else the machine does; the process's start is not counted.
    """

    def __init__(
        self, module: str, does: str, setup: bytearray, deadline_s: float, on_start: Callable[[bytes], None]
    ) -> None:
        self._module, self._does, self._setup = module, does, setup
        self._deadline_s, self._on_start = deadline_s, on_start
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Starts the process; raises WorkerDied, and what `on_start` raises."""
        await self._running()

    async def ask(self, frame: bytearray) -> bytes:
        """Returns the body of the answer; where the process dies over the question, a fresh one is asked once more.

        Raises TimeoutError past the deadline, DeadlyQuestion, WorkerDied, and what `on_start` raises.
        """
        try:
            return await self._ask(frame)
        except _Ended:
            pass
        try:
            return await self._ask(frame)
        except _Ended:
            raise DeadlyQuestion(f"two processes that {self._does} have died of it") from None

    async def stop(self) -> None:
        """Ends the process."""
        if self._process is not None:
            await self._kill(self._process)

    async def _ask(self, frame: bytearray) -> bytes:
        return await self._exchange(await self._running(), frame, _WALL_FACTOR * self._deadline_s)

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await self._spawn()
            try:
                answer = await self._exchange(self._process, self._setup, _START_S)
            except (_Ended, TimeoutError):
                raise WorkerDied(f"a process that {self._does} has died at its start") from None
            self._on_start(answer)
        return self._process

    async def _exchange(self, process: asyncio.subprocess.Process, frame: bytearray, wall_s: float) -> bytes:
        """Returns the answer to a frame; raises _Ended, TimeoutError, and WorkerDied after `wall_s` seconds."""
        assert process.stdin is not None and process.stdout is not None
        body, is_late = None, False
        try:
            async with asyncio.timeout(wall_s):
                process.stdin.write(frame)
                await process.stdin.drain()
                body = await frames.read_frame_async(process.stdout)
        except TimeoutError:
            is_late = True
        except ConnectionError:
            pass
        finally:
            if body is None:  # late or dead: the next question gets a fresh process
                await self._kill(process)
        if body is not None:
            return body
        if is_late:
            raise WorkerDied(f"the process that {self._does} had no answer after {wall_s:g} s; try again")
        raise TimeoutError if process.returncode == -signal.SIGPROF else _Ended

    async def _kill(self, process: asyncio.subprocess.Process) -> None:
        self._process = None
        if process.returncode is None:
            process.kill()
        await process.wait()

    async def _spawn(self) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                self._module,
                str(self._deadline_s),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise WorkerDied(f"a process that {self._does} cannot be started: {error.strerror}") from None


def answer_questions(answer: Callable[[bytes], bytearray], max_memory_bytes: int) -> None:
    """Answers the frames on the standard input, the first of which is the setup, until the other side closes it.

    A question that takes more than the processor's time in this process's argument ends the process by SIGPROF, in the
    midst of whatever it does. One that takes too much memory fails, or ends it too.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError, ValueError):  # macOS reserves more addresses than this and refuses the bound
        resource.setrlimit(resource.RLIMIT_AS, (max_memory_bytes, max_memory_bytes))
    deadline_s = 0.0  # the setup has none
    while (body := frames.read_frame(sys.stdin.buffer)) is not None:
        signal.setitimer(signal.ITIMER_PROF, deadline_s)
        reply = answer(body)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(reply)
        sys.stdout.buffer.flush()
        deadline_s = float(sys.argv[1])
