"""A worker process that handles one request at a time and is killed at a time limit, which a thread cannot be.

`WorkerProcess` runs in the API server, `serve_requests` in the worker.
"""

import asyncio
import contextlib
import resource
import signal
import subprocess
import sys
from collections.abc import Callable

import msgspec

from dsv3.processes import frames
from dsv3.processes.child import LinkedChild, link_to_parent

_START_S = 60.0
# Limit of the wall-clock time per second of processor time, for a process that waits for a core or for memory.
_WALL_FACTOR = 6


class WorkerDied(Exception):
    """The worker cannot be started, or gets no processor time; the request may be valid."""


class PoisonRequest(Exception):
    """Two workers in a row died of the request."""


class WorkerReply(msgspec.Struct, frozen=True):
    """The response to a request, or to the setup: a text, or what is wrong with it."""

    text: str = ""
    error: str | None = None


_replies = msgspec.msgpack.Decoder(WorkerReply)


class WorkerProcess:
    """`python -m module`, started for the first request and restarted after a timeout or a crash.

    `setup` is its first frame; all requests fail with `setup_error` if the worker rejects it. `task` describes the
    worker in error texts ("a process that TASK"). A request may take `deadline_s` seconds of processor time, so that
    the result does not depend on the load of the machine; the start of the process does not count.
    """

    def __init__(
        self, module: str, task: str, setup: bytearray, deadline_s: float, setup_error: type[Exception]
    ) -> None:
        self._module, self._task, self._setup = module, task, setup
        self._deadline_s, self._setup_error = deadline_s, setup_error
        self._child: LinkedChild | None = None
        self._rejection: str | None = None  # of the setup, by this child
        self._transport: asyncio.WriteTransport
        self._responses: asyncio.Queue[WorkerReply | None]  # of this child; None at its end

    async def start(self) -> None:
        """Starts the process, if none runs; raises WorkerDied and `setup_error`."""
        if self._child is None:
            await self._spawn()
            if (reply := await self._exchange(self._setup, _START_S)) is None:
                raise WorkerDied(f"a process that {self._task} has died at its start")
            self._rejection = reply.error
        if self._rejection is not None:
            raise self._setup_error(self._rejection)

    async def call(self, frame: bytearray) -> WorkerReply:
        """Returns the response; retries once in a new process if the first one dies.

        Raises TimeoutError at the deadline, PoisonRequest, WorkerDied and `setup_error`.
        """
        for _ in range(2):
            await self.start()
            if (reply := await self._exchange(frame, _WALL_FACTOR * self._deadline_s)) is not None:
                return reply
        raise PoisonRequest(f"two processes that {self._task} have died of it")

    async def stop(self) -> None:
        if self._child is not None:
            await self._end(self._child)

    async def _exchange(self, frame: bytearray, wall_s: float) -> WorkerReply | None:
        """Returns the response to a frame, None if the worker exits without one.

        Raises TimeoutError at the limit of processor time, which the setup does not have, and WorkerDied after `wall_s`
        seconds.
        """
        assert self._child is not None
        child, responses, reply, timed_out, status = self._child, self._responses, None, False, None
        self._transport.write(frame)
        try:
            async with asyncio.timeout(wall_s):
                reply = await responses.get()
        except TimeoutError:
            timed_out = True
        finally:
            if reply is None:  # timed out or dead: the next request gets a new process
                status = await self._end(child)
        if timed_out:
            raise WorkerDied(f"the process that {self._task} did not respond within {wall_s:g} s; try again")
        if status == -signal.SIGPROF:
            raise TimeoutError
        return reply

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
            raise WorkerDied(f"a process that {self._task} cannot be started: {error.strerror}") from None
        responses = self._responses = asyncio.Queue()

        def on_end(_: Exception | None) -> None:
            responses.put_nowait(None)
            if child is self._child:  # else `_end` reaps it
                self._child = None
                loop.run_in_executor(None, child.end)

        self._child = child
        self._transport, _ = await loop.create_connection(
            lambda: frames.FrameProtocol(lambda body: responses.put_nowait(_replies.decode(body)), on_end),
            sock=child.link,
        )


def serve_requests(
    begin: Callable[[bytes], Callable[[bytes], str]], explain: Callable[[Exception], str], max_memory_bytes: int
) -> None:
    """Responds to the frames from the link until it closes: `begin` gets the setup and returns what handles requests.

    `explain` turns an exception of either into the text of the response: a crash would make the API server retry.
    A request that takes more processor time than the process's argument, in seconds, ends the process by SIGPROF. One
    that allocates more than `max_memory_bytes` fails or ends the process, too.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError, ValueError):  # macOS has reserved more addresses already and rejects the limit
        resource.setrlimit(resource.RLIMIT_AS, (max_memory_bytes, max_memory_bytes))
    link, deadline_s = link_to_parent(), 0.0  # no limit for the setup
    handle: Callable[[bytes], str] | None = None
    while (body := frames.receive_frame(link)) is not None:
        signal.setitimer(signal.ITIMER_PROF, deadline_s)
        try:
            if handle is None:
                handle, response = begin(body), frames.encode(WorkerReply())
            else:
                response = frames.encode(WorkerReply(handle(body)))
        except Exception as error:
            response = frames.encode(WorkerReply(error=explain(error)))
        signal.setitimer(signal.ITIMER_PROF, 0)
        link.sendall(response)
        deadline_s = float(sys.argv[1])
