"""Keeps an engine running for all fronts of an instance: starts its process, and another one when it dies.

The processes are numbered, from 0. Before the next one starts the last one has ended, so that the devices are free.
Fronts say which one they have lost, so that late news of one does not end the next.
"""

import asyncio
import dataclasses
import logging
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from dsv3.engine.cluster.link import Incarnation
from dsv3.processes.child import KILLED_S, Deaths, LinkedChild, RestartPolicy
from dsv3.server.engine.client import EngineClient
from dsv3.server.engine.messages import Start

_END_S = 5.0
_MOST_WAITING = 1024  # fronts that connect while it starts
_MOST_PATH_BYTES = 70  # of a directory: the address of a Unix socket has at most 103
# A process that leads several takes 3.4 processor seconds to start anew, and 1.8 where these were imported before. With
# one process programs are traced again, which takes longer, and nobody waits with 170 MB of modules for a rare death.
_IMPORTS = ("dsv3.engine.build", "dsv3.engine.cluster.leader_engine")
_log = logging.getLogger("dsv3.server")


class EngineProcess(LinkedChild):
    """The engine's process. Its link is the connection of the first front; others connect to the socket at `address`.

    It imports the modules `imports` at once, whenever its first message comes. Raises OSError where the system has no
    room for it.
    """

    def __init__(self, address: str, imports: Sequence[str] = ()) -> None:
        self.address = address
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(_MOST_WAITING)
            descriptor = listener.fileno()
            super().__init__("dsv3.server.engine.process", descriptor, *imports, inherited=[descriptor])


class EngineSupervisor:
    """The engine's process of the moment, for the first front, whose `engine` is, and for others.

    Without a `policy` the first death is the last. `on_loss` is called with the number of the one that has died, and
    the reason, when another one follows; `engine.on_failure` when none does. `on_start` is called with the number of
    that one, and the address of its socket. Raises OSError where the system has no room.
    """

    def __init__(self, engine: EngineClient, start: Start, policy: RestartPolicy | None):
        self.number = 0
        self.on_loss: Callable[[int, str], None] = lambda number, reason: None
        self.on_start: Callable[[int, str], None] = lambda number, address: None
        self._engine = engine
        temporary = tempfile.gettempdir()
        self._scratch = tempfile.TemporaryDirectory(  # no other user may enter it
            prefix="dsv3-", dir=temporary if len(os.fsencode(temporary)) < _MOST_PATH_BYTES else "/tmp"
        )
        self._start = start if policy is None else _keeping_experts(start, Path(self._scratch.name))
        self._name = secrets.token_hex(4)  # another server that was started for the same instance has another one
        self._num_processes = 0
        self._process = self._launch()
        self._spare: EngineProcess | None = None
        self._began = time.monotonic()
        self._first_start_s = 0.0
        self._deaths = None if policy is None else Deaths(policy)
        self._is_lost = False
        self._starting: asyncio.Task[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        engine.on_loss = engine.on_silence = self._lose
        engine.on_ready = self._note_ready

    async def connect(self) -> None:
        """Connects the first front, whose news of the engine decides."""
        start = msgspec.structs.replace(self._start, generation=Incarnation(self.number, self._name))
        await self._engine.connect(self._process.link, start)

    @property
    def address(self) -> str | None:
        """Where fronts connect to the engine; None where it has died."""
        return None if self._is_lost else self._process.address

    def lose(self, number: int, reason: str) -> None:
        """Replaces the engine with that number, which has died or hangs; late news of it changes nothing."""
        if number != self.number or self._is_lost:
            return
        self._is_lost = True
        self._forget_deadline()
        self._process.kill()
        if self._engine.info is None or self._deaths is None:
            self._engine.fail(reason)
        elif (too_many := self._deaths.note()) is not None:
            self._engine.fail(f"the engine {too_many}; the last time: {reason}")
        else:
            self._engine.lose(reason)
            self.on_loss(number, reason)
            self._starting = asyncio.create_task(self._start_anew(reason, self._deaths.policy))

    def kill(self) -> None:
        """Ends the process by force."""
        self._process.kill()

    async def close(self) -> None:
        """Ends the process, by force if it does not end by itself; a failure is logged with its exit status."""
        self._forget_deadline()
        self._is_lost = True
        if self._starting is not None:
            self._starting.cancel()
        if self._engine.state == "restarting" and self._start.cluster is None:  # nobody waits for it any more
            self._process.kill()
        self._engine.close()  # tells it to stop, and it tells its followers
        if self._spare is not None:
            await asyncio.to_thread(self._spare.end)
        status = await asyncio.to_thread(self._process.end, _END_S)
        self._scratch.cleanup()
        if self._engine.state == "failed":
            _log.error("%s (engine process %d, exit status %s)", self._engine.reason, self._process.pid, status)

    def _lose(self, reason: str) -> None:
        self.lose(self.number, reason)

    async def _start_anew(self, reason: str, policy: RestartPolicy) -> None:
        try:
            status = await asyncio.to_thread(self._process.end)
            if status is None:
                self._engine.fail(
                    f"the engine could not be started anew (its process is there {KILLED_S:.0f} s after kill -9)"
                )
                return
            _log.error("%s (engine process %d, exit status %d)", reason, self._process.pid, status)
            Path(self._process.address).unlink(missing_ok=True)
            await self._begin(policy)
        except OSError as error:
            self._engine.fail(f"the engine could not be started anew ({error.strerror})")
        except Exception as error:  # nobody else would end what waits for the next engine
            _log.exception("the engine could not be started anew")
            self._engine.fail(f"the engine could not be started anew ({type(error).__name__})")

    async def _begin(self, policy: RestartPolicy) -> None:
        """Starts the next process and has every front connect to it."""
        spare, self._spare = self._spare, None
        self._process = spare if spare is not None and spare.status is None else self._launch()
        self.number, self._is_lost, self._began = self.number + 1, False, time.monotonic()
        seconds = max(policy.least_s, policy.slack * self._first_start_s)
        text = f"the engine that was started anew was not ready after {seconds:.0f} s"
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(seconds, self.lose, self.number, text)
        self.on_start(self.number, self._process.address)
        await self.connect()

    def _note_ready(self) -> None:
        self._forget_deadline()
        seconds = time.monotonic() - self._began
        self._first_start_s = self._first_start_s or seconds
        if self.number:
            _log.warning("the engine is there again after %.1f s (process %d)", seconds, self._process.pid)
        cluster = self._start.cluster
        if cluster is not None and cluster.cluster_spare and self._deaths is not None and self._spare is None:
            self._spare = self._launch(_IMPORTS)

    def _launch(self, imports: Sequence[str] = ()) -> EngineProcess:
        self._num_processes += 1
        return EngineProcess(str(Path(self._scratch.name) / f"engine-{self._num_processes}"), imports)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _keeping_experts(start: Start, directory: Path) -> Start:
    """Has engines that move experts keep their places in this directory, where no file is named."""
    if not start.engine.enable_eplb or start.engine.eplb_state is not None:
        return start
    engine = dataclasses.replace(start.engine, eplb_state=str(directory / "experts"))
    return msgspec.structs.replace(start, engine=engine)
