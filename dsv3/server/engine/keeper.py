"""Keeps an engine running for all fronts of an instance: starts its process, and another one when it dies.

The processes are numbered, from 0. Before the next one starts the last one has ended, so that the devices are free.
Fronts say which one they have lost, so that late news of one does not end the next.
"""

import asyncio
import dataclasses
import logging
import secrets
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from dsv3.engine.cluster.link import Generation
from dsv3.processes.restarts import Deaths, RestartPolicy
from dsv3.server.engine.client import EngineClient
from dsv3.server.engine.fronts import FIRST
from dsv3.server.engine.launcher import EngineProcess
from dsv3.server.engine.messages import Start

_KILL_S = 60.0  # the system takes back the memory of a process that was killed
_END_S = 5.0
# A process that leads several takes 3.4 processor seconds to start anew, and 1.8 where these were imported before. With
# one process programs are traced again, which takes longer, and nobody waits with 170 MB of modules for a rare death.
_IMPORTS = ("dsv3.engine.build", "dsv3.engine.cluster.lead")
_log = logging.getLogger("dsv3.server")


class EngineKeeper:
    """The engine's process of the moment, for the first front, whose `engine` is, and for others that `join`.

    Without a `policy` the first death is the last. `on_loss` is called with the number of the one that has died, and
    the reason, when another one follows; `engine.on_failure` when none does. Raises OSError where the system has no
    room.
    """

    def __init__(self, engine: EngineClient, start: Start, policy: RestartPolicy | None):
        self.number = 0
        self.on_loss: Callable[[int, str], None] = lambda number, reason: None
        self._engine, self._policy = engine, policy
        self._scratch = tempfile.TemporaryDirectory(prefix="dsv3-")
        self._start = start if policy is None else _keeping_experts(start, Path(self._scratch.name))
        self._name = secrets.token_hex(4)  # another server that was started for the same instance has another one
        self._members: dict[int, Callable[[int, socket.socket], None]] = {}
        self._next_sender = FIRST + 1
        self._process = EngineProcess()
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
        start = msgspec.structs.replace(self._start, generation=Generation(self.number, self._name))
        await self._engine.connect(self._process.connect(FIRST), start)

    def join(self, take: Callable[[int, socket.socket], None]) -> int:
        """Gives a front its connections, now and after each start; returns its sender's number."""
        sender, self._next_sender = self._next_sender, self._next_sender + 1
        self._members[sender] = take
        if not self._is_lost:
            take(self.number, self._process.connect(sender))
        return sender

    def leave(self, sender: int) -> None:
        """Forgets a front that has gone."""
        self._members.pop(sender, None)

    def lose(self, number: int, reason: str) -> None:
        """Replaces the engine with that number, which has died or hangs; late news of it changes nothing."""
        if number != self.number or self._is_lost:
            return
        self._is_lost = True
        self._forget_deadline()
        self._process.kill()
        if self._engine.info is None or self._policy is None or self._deaths is None:
            self._engine.fail(reason)
        elif self._deaths.note():
            self._engine.fail(
                f"the engine has died {len(self._deaths)} times within {self._policy.within_s:.0f} s, and is not "
                f"started anew; the last time: {reason}"
            )
        else:
            self._engine.lose(reason)
            self.on_loss(number, reason)
            self._starting = asyncio.create_task(self._start_anew(reason, self._policy))

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
            self._spare.kill()
            await self._spare.wait(_END_S)
        status = await self._process.wait(_END_S)
        self._scratch.cleanup()
        if self._engine.state == "failed":
            _log.error("%s (engine process %d, exit status %d)", self._engine.reason, self._process.pid, status)

    def _lose(self, reason: str) -> None:
        self.lose(self.number, reason)

    async def _start_anew(self, reason: str, policy: RestartPolicy) -> None:
        try:
            status = await self._process.reap(_KILL_S)
            _log.error("%s (engine process %d, exit status %d)", reason, self._process.pid, status)
            await self._begin(policy)
        except OSError as error:  # a TimeoutError is one, without a strerror
            text = error.strerror or f"its process is there {_KILL_S:.0f} s after kill -9"
            self._engine.fail(f"the engine could not be started anew ({text})")
        except Exception as error:  # nobody else would end what waits for the next engine
            _log.exception("the engine could not be started anew")
            self._engine.fail(f"the engine could not be started anew ({type(error).__name__})")

    async def _begin(self, policy: RestartPolicy) -> None:
        """Starts the next process and gives every front a connection to it."""
        spare, self._spare = self._spare, None
        self._process = spare if spare is not None and spare.is_running else EngineProcess()
        self.number, self._is_lost, self._began = self.number + 1, False, time.monotonic()
        seconds = max(policy.least_s, policy.slack * self._first_start_s)
        text = f"the engine that was started anew was not ready after {seconds:.0f} s"
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(seconds, self.lose, self.number, text)
        for sender, take in list(self._members.items()):
            take(self.number, self._process.connect(sender))
        await self.connect()

    def _note_ready(self) -> None:
        self._forget_deadline()
        seconds = time.monotonic() - self._began
        self._first_start_s = self._first_start_s or seconds
        if self.number:
            _log.warning("the engine is there again after %.1f s (process %d)", seconds, self._process.pid)
        cluster = self._start.cluster
        if cluster is not None and cluster.cluster_spare and self._policy is not None and self._spare is None:
            self._spare = EngineProcess(_IMPORTS)

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
