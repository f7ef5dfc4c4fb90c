"""A process that is asked one thing at a time, and killed when that takes too long, which a thread cannot be.

`WorkerProcess` is the side that asks, `answer_questions` the side of the process.
"""

import asyncio
import contextlib
import resource
import signal
import subprocess
import sys
from collections.abc import Callable

from dsv3.processes import frames
from dsv3.processes.child import LinkedChild, link_to_parent

_START_S = 60.0
# A process that has to wait for a core, or for its memory, gets so many seconds for each of its processor time.
_WALL_FACTOR = 6


class WorkerDied(Exception):
    """The process that is asked cannot be started, or gets no processor time; the question may be fine."""


class PoisonRequest(Exception):
    """Two processes in a row have died of the question."""


class _Ended(Exception):
    """The process has ended without an answer."""


class WorkerProcess:
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
        self._child: LinkedChild | None = None
        self._transport: asyncio.WriteTransport
        self._answers: asyncio.Queue[bytes | None]  # of this child; None at its end

    async def start(self) -> None:
        """Starts the process, if none runs; raises WorkerDied, and what `on_start` raises."""
        if self._child is not None:
            return
        await self._spawn()
        try:
            answer = await self._exchange(self._setup, _START_S)
        except (_Ended, TimeoutError):
            raise WorkerDied(f"a process that {self._does} has died at its start") from None
        self._on_start(answer)

    async def ask(self, frame: bytearray) -> bytes:
        """Returns the body of the answer; where the process dies over the question, a fresh one is asked once more.

        Raises TimeoutError past the deadline, PoisonRequest, WorkerDied, and what `on_start` raises.
        """
        for _ in range(2):
            await self.start()
            with contextlib.suppress(_Ended):
                return await self._exchange(frame, _WALL_FACTOR * self._deadline_s)
        raise PoisonRequest(f"two processes that {self._does} have died of it")

    async def stop(self) -> None:
        """Ends the process."""
        if self._child is not None:
            await self._end(self._child)

    async def _exchange(self, frame: bytearray, wall_s: float) -> bytes:
        """Returns the answer to a frame; raises _Ended, TimeoutError, and WorkerDied after `wall_s` seconds."""
        assert self._child is not None
        child, answers, body, is_late, status = self._child, self._answers, None, False, None
        self._transport.write(frame)
        try:
            async with asyncio.timeout(wall_s):
                body = await answers.get()
        except TimeoutError:
            is_late = True
        finally:
            if body is None:  # late or dead: the next question gets a fresh process
                status = await self._end(child)
        if body is not None:
            return body
        if is_late:
            raise WorkerDied(f"the process that {self._does} had no answer after {wall_s:g} s; try again")
        raise TimeoutError if status == -signal.SIGPROF else _Ended

    async def _end(self, child: LinkedChild) -> int | None:
        if child is self._child:
            self._child = None
            self._transport.close()
        return await asyncio.to_thread(child.end)

    async def _spawn(self) -> None:
        loop, null = asyncio.get_running_loop(), subprocess.DEVNULL
        try:
            child = LinkedChild(self._module, self._deadline_s, stdout=null, stderr=null)
        except OSError as error:
            raise WorkerDied(f"a process that {self._does} cannot be started: {error.strerror}") from None
        answers = self._answers = asyncio.Queue()

        def note_end(_: Exception | None) -> None:
            answers.put_nowait(None)
            if child is self._child:  # it has died
                self._child = None
                loop.run_in_executor(None, child.end)

        self._child = child
        self._transport, _ = await loop.create_connection(
            lambda: frames.FrameProtocol(lambda body: answers.put_nowait(bytes(body)), note_end), sock=child.link
        )


def answer_questions(answer: Callable[[bytes], bytearray], max_memory_bytes: int) -> None:
    """Answers the frames that come through the link, the first of which is the setup, until the other side closes it.

    A question that takes more than the processor's time in this process's argument ends the process by SIGPROF, in the
    midst of whatever it does. One that takes too much memory fails, or ends it too.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError, ValueError):  # macOS reserves more addresses than this and refuses the bound
        resource.setrlimit(resource.RLIMIT_AS, (max_memory_bytes, max_memory_bytes))
    link, deadline_s = link_to_parent(), 0.0  # the setup has none
    stream = frames.stream_of(link)
    while (body := frames.read_frame(stream)) is not None:
        signal.setitimer(signal.ITIMER_PROF, deadline_s)
        reply = answer(body)
        signal.setitimer(signal.ITIMER_PROF, 0)
        link.sendall(reply)
        deadline_s = float(sys.argv[1])
