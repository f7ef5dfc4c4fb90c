"""Restarts the engine: starts its process, and a new one when it dies or hangs.

Engine processes are numbered from 0. The next one starts after the last one has ended, so that the devices are free.
Reports of a dead engine carry its number, so that a late report does not end the next one.
"""

import asyncio
import dataclasses
import logging
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from dsv3.engine.cluster.link import Incarnation
from dsv3.processes.child import REAP_TIMEOUT_S, DeathCounter, LinkedChild, RestartPolicy
from dsv3.server.engine.client import EngineClient
from dsv3.server.engine.messages import Start

_END_S = 5.0
_BACKLOG = 1024  # API servers that connect while the engine starts
_MAX_DIRECTORY_BYTES = 70  # the path of a Unix socket has at most 103
# A spare process imports these ahead: that halves the processor time of a leader's restart. An instance of one process
# traces its programs again, which takes longer, so the memory of a spare process would not pay there.
_IMPORTS = ("dsv3.engine.build", "dsv3.engine.cluster.leader_engine")
_log = logging.getLogger("dsv3.server")


class EngineProcess(LinkedChild):
    """The engine process. API server 0 uses its link; other API servers connect to the Unix socket at `address`.

    It imports the modules `imports` before it reads its first message. Raises OSError if it cannot be started.
    """

    def __init__(self, address: str, imports: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> None:
        self.address = address
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(_BACKLOG)
            descriptor = listener.fileno()
            super().__init__(
                "dsv3.server.engine.process", descriptor, *imports, inherited=[descriptor], environment=environment
            )


class EngineSupervisor:
    """Runs in API server 0, whose client is `engine`, and restarts the engine process by `policy`; None: never.

    Calls `on_loss` with the number of a dead engine, and the reason, if a restart follows, and `engine.on_failure` if
    not. Calls `on_start` with the number of each restarted engine and the path of its socket. The process has the
    variables `environment`, None: those of this one. Raises OSError if the process cannot be started.
    """

    def __init__(
        self,
        engine: EngineClient,
        start: Start,
        policy: RestartPolicy | None,
        environment: Mapping[str, str] | None = None,
    ):
        self.number, self._environment = 0, environment
        self.on_loss: Callable[[int, str], None] = lambda number, reason: None
        self.on_start: Callable[[int, str], None] = lambda number, address: None
        self._engine = engine
        temporary = tempfile.gettempdir()
        self._scratch = tempfile.TemporaryDirectory(  # mode 0700: no other user reaches the socket
            prefix="dsv3-", dir=temporary if len(os.fsencode(temporary)) < _MAX_DIRECTORY_BYTES else "/tmp"
        )
        self._start = start if policy is None else _with_expert_state(start, Path(self._scratch.name))
        self._name = secrets.token_hex(4)  # distinguishes two servers that were started for the same instance
        self._num_processes = 0
        self._process = self._launch()
        self._spare: EngineProcess | None = None
        self._started_at = time.monotonic()
        self._first_start_s = 0.0
        self._deaths = None if policy is None else DeathCounter(policy)
        self._is_dead = False
        self._starting: asyncio.Task[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        engine.on_loss = engine.on_silence = lambda reason: self.engine_lost(self.number, reason)
        engine.on_ready = self._on_ready

    async def connect(self) -> None:
        start = msgspec.structs.replace(self._start, generation=Incarnation(self.number, self._name))
        await self._engine.connect(self._process.link, start)

    @property
    def address(self) -> str | None:
        """The path of the engine's socket; None while it is dead."""
        return None if self._is_dead else self._process.address

    def engine_lost(self, number: int, reason: str) -> None:
        """Kills the engine `number`, which has died or hangs, and restarts it or fails; ignores late reports."""
        if number != self.number or self._is_dead:
            return
        self._is_dead = True
        self._cancel_deadline()
        self._process.kill()
        if self._engine.info is None or self._deaths is None:
            self._engine.fail(reason)
        elif (too_many := self._deaths.record()) is not None:
            self._engine.suspend(reason)
            self._engine.fail(f"the engine {too_many}; last reason: {reason}")
        else:
            self._engine.suspend(reason)
            self.on_loss(number, reason)
            self._starting = asyncio.create_task(self._restart(reason, self._deaths.policy))

    def kill(self) -> None:
        self._process.kill()

    async def close(self) -> None:
        """Stops the process, and kills it after `_END_S`; logs the exit status of a failed engine."""
        self._cancel_deadline()
        self._is_dead = True
        if self._starting is not None:
            self._starting.cancel()
        if self._engine.state == "restarting" and self._start.cluster is None:
            self._process.kill()
        self._engine.close()  # sends StopEngine, which a leader passes on to its followers
        if self._spare is not None:
            await asyncio.to_thread(self._spare.end)
        status = await asyncio.to_thread(self._process.end, _END_S)
        self._scratch.cleanup()
        if self._engine.state == "failed":
            _log.error("%s (engine process %d, exit status %s)", self._engine.reason, self._process.pid, status)

    async def _restart(self, reason: str, policy: RestartPolicy) -> None:
        try:
            status = await asyncio.to_thread(self._process.end)
            if status is None:
                text = f"its process still exists {REAP_TIMEOUT_S:.0f} s after kill -9"
                self._engine.fail(f"the engine could not be restarted ({text})")
                return
            _log.error("%s (engine process %d, exit status %d)", reason, self._process.pid, status)
            Path(self._process.address).unlink(missing_ok=True)
            await self._start_next(policy)
        except OSError as error:
            self._engine.fail(f"the engine could not be restarted ({error.strerror})")
        except Exception as error:  # else the requests would wait for an engine forever
            _log.exception("the engine could not be restarted")
            self._engine.fail(f"the engine could not be restarted ({type(error).__name__})")

    async def _start_next(self, policy: RestartPolicy) -> None:
        """Starts the next process, or uses the spare one, and connects all API servers to it."""
        spare, self._spare = self._spare, None
        self._process = spare if spare is not None and spare.status is None else self._launch()
        self.number, self._is_dead, self._started_at = self.number + 1, False, time.monotonic()
        seconds = max(policy.min_start_s, policy.start_factor * self._first_start_s)
        text = f"the restarted engine was not ready after {seconds:.0f} s"
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(seconds, self.engine_lost, self.number, text)
        self.on_start(self.number, self._process.address)
        await self.connect()

    def _on_ready(self) -> None:
        self._cancel_deadline()
        seconds = time.monotonic() - self._started_at
        self._first_start_s = self._first_start_s or seconds
        if self.number:
            _log.warning("the engine is ready again after %.1f s (process %d)", seconds, self._process.pid)
        cluster = self._start.cluster
        if cluster is not None and cluster.cluster_spare and self._deaths is not None and self._spare is None:
            try:
                self._spare = self._launch(_IMPORTS)
            except OSError as error:  # the engine itself is well
                _log.warning("there is no spare process until the next restart (%s)", error.strerror)

    def _launch(self, imports: Sequence[str] = ()) -> EngineProcess:
        self._num_processes += 1
        return EngineProcess(
            str(Path(self._scratch.name) / f"engine-{self._num_processes}"), imports, self._environment
        )

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _with_expert_state(start: Start, directory: Path) -> Start:
    """Returns `start` with a file in `directory` for the expert placement, to keep it over restarts, if none is set."""
    if not start.engine.enable_eplb or start.engine.eplb_state is not None:
        return start
    engine = dataclasses.replace(start.engine, eplb_state=str(directory / "experts"))
    return msgspec.structs.replace(start, engine=engine)
