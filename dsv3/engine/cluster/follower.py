"""A follower: no HTTP, no scheduler; it builds the same engine parts and executes the leader's commands in their order.

The main thread loads, compiles and launches; others receive, send, watch the leader, and read results. Whatever the
main thread is stuck in, the process ends when the leader says so, is silent or is gone.
"""

import dataclasses
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn

import numpy as np

from dsv3.engine.cluster import messages
from dsv3.engine.cluster.digest import Chain
from dsv3.engine.cluster.fingerprint import fields_of
from dsv3.engine.cluster.membership import read_key
from dsv3.engine.cluster.messages import (
    Begin,
    Build,
    Digest,
    Drain,
    Failed,
    Heartbeat,
    Hello,
    Loaded,
    Ready,
    Step,
    Stop,
)
from dsv3.engine.cluster.peer import Peer
from dsv3.engine.cluster.start import Load, Phases, load_model, loaded_fields, program_store, start_jax
from dsv3.engine.cluster.wire import HANDSHAKE_S, Wire, WireError, connect
from dsv3.engine.commands import StepCommand
from dsv3.engine.executor import Executor, Launched
from dsv3.options import ClusterOptions, EngineOptions

_log = logging.getLogger("dsv3.cluster")
_RETRY_S = 0.2
_FAREWELL_S = 1.0
# A collective that a peer's end breaks raises at once; the leader tells the reason soon after.
_EXPLANATION_S = 3.0
_SWITCH_INTERVAL_S = 0.0005  # the end of the leader is seen here before jax's coordination client aborts the process


def run(cluster: ClusterOptions, model_dir: Path, options: EngineOptions, load: Load = load_model) -> NoReturn:
    """Follows the leader until it ends; ends the process with status 0 if that was in order, else 1.

    `options` are the engine's, the same as the leader's. Raises ValueError for a key file that cannot be used.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    key = read_key(cluster.cluster_key_file)
    signals = _Signals()
    try:
        wire = _reach(cluster, key)
    except WireError as error:
        _end(1, str(error))
    follower = _Follower(cluster, wire)
    signals.hand_to(follower)
    try:
        follower.follow(model_dir, options, load)
    except Exception as error:
        follower.give_up(error)


class _Follower:
    def __init__(self, cluster: ClusterOptions, wire: Wire) -> None:
        self._cluster = cluster
        self._inbox: queue.SimpleQueue[Begin | Build | Step] = queue.SimpleQueue()
        self._launched: queue.SimpleQueue[tuple[StepCommand, Launched]] = queue.SimpleQueue()
        self._last_launched = -1
        self._peer = Peer(wire, self._heartbeat, self._take, lambda end: _end(1, f"the leader (process 0) {end}"))
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def follow(self, model_dir: Path, options: EngineOptions, load: Load) -> NoReturn:
        """Starts with the leader, then executes what it sends."""
        phases = Phases()
        fields = fields_of(model_dir, options, self._cluster)
        self._send(Hello(fields, socket.gethostname(), os.getpid()))
        self._expect(Begin)
        phases.end("all have come")
        start_jax(self._cluster)
        phases.end("jax")
        parts = load(model_dir, options)
        phases.end("weights")
        self._send(Loaded(loaded_fields(parts), parts.cfg.num_pages))
        parts = dataclasses.replace(parts, cfg=self._expect(Build).config)
        executor = Executor(parts.functions, parts.params, parts.model_cfg, parts.cfg, parts.devices)
        executor.programs.store = store = program_store(self._cluster, model_dir, options, parts)
        del parts  # the executor alone holds the weights: experts that it moves are written in place
        executor.programs.compile_all()
        phases.end("compiling")
        _log.info("process %d is ready after %s; %s", self._cluster.process_id, phases, store)
        self._send(Ready())
        threading.Thread(target=self._report, name="results", daemon=True).start()
        while True:
            command = self._expect(Step).command
            self._launched.put((command, executor.launch(command)))
            self._last_launched = command.number

    def ask_to_drain(self, signal_name: str) -> None:
        """Has the leader finish what runs and stop the instance."""
        text = f"process {self._cluster.process_id} has received {signal_name}"
        _log.info("%s: asking the leader to drain; once more ends this process at once", text)
        self._send(Drain(text))

    def give_up(self, error: Exception) -> NoReturn:
        """Ends with the leader's reason if it comes, since another process may be the cause, else with this error."""
        time.sleep(_EXPLANATION_S)  # a message or the end of the leader ends the process meanwhile
        expected = isinstance(error, ValueError | OSError)
        text = f"{type(error).__name__}: {error}" if expected else "".join(traceback.format_exception(error))
        self._peer.send_last(messages.encode(Failed(type(error).__name__, text)))
        self._peer.join(_FAREWELL_S)
        _end(1, text)

    def _expect[Message: (Begin, Build, Step)](self, kind: type[Message]) -> Message:
        message = self._inbox.get()
        if not isinstance(message, kind):
            raise WireError(f"the leader sent {type(message).__name__}, expected {kind.__name__}")
        return message

    def _heartbeat(self) -> bytes:
        return messages.encode(Heartbeat(self._last_launched))

    def _send(self, message: messages.ToLeader) -> None:
        self._peer.send(messages.encode(message))

    def _take(self, body: bytes) -> None:
        message = messages.decode_for_follower(body)
        match message:
            case Stop(failure=None):
                _end(0, "the leader has ended in order")
            case Stop(failure=str(failure)):
                _end(1, f"the leader ends the instance: {failure}")
            case Begin() | Build() | Step():
                self._inbox.put(message)

    def _report(self) -> None:
        """Reads the results of each step and sends their digest."""
        chain = Chain()
        try:
            while True:
                command, launched = self._launched.get()
                self._send(Digest(command.number, chain.add(command.number, _read(command, launched))))
        except Exception as error:
            self.give_up(error)

    def _watch(self) -> None:
        limit = self._cluster.cluster_silence_timeout
        interval, last = min(0.25, limit / 8), time.monotonic()
        while True:
            time.sleep(interval)
            now = time.monotonic()
            suspended, last = now - last > interval + limit / 2, now
            if suspended:
                self._peer.forgive()
            elif self._peer.silent_s > limit:
                _end(1, f"the leader (process 0) has been silent for {limit:g} s: it hangs, or its host is gone")


def _read(command: StepCommand, launched: Launched) -> list[np.ndarray]:
    """Waits for the results of a step; those of a prefill that samples nothing are not the same in all processes."""
    samples = command.prefill is not None and command.prefill.variant is not None
    prefill = [np.asarray(array) for array in launched.prefill or ()]
    return [*(prefill if samples else ()), *(np.asarray(array) for array in launched.decode or ())]


def _reach(cluster: ClusterOptions, key: bytes) -> Wire:
    """Connects to the leader, which may start later; raises WireError when it cannot within the time to start."""
    host, port = cluster.control_address
    deadline = time.monotonic() + cluster.cluster_start_timeout
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=HANDSHAKE_S)
        except OSError as error:
            if time.monotonic() > deadline:
                raise WireError(
                    f"cannot reach the leader at {host}:{port} within {cluster.cluster_start_timeout:g} s: {error}"
                ) from None
            time.sleep(_RETRY_S)
            continue
        return connect(connection, key, cluster.process_id)


class _Signals:
    """SIGTERM and SIGINT, taken by a thread: Python's own handlers wait for the main thread to leave a collective.

    The first asks the leader to drain and stop the instance, the second ends this process, as the first does before
    there is a leader.
    """

    def __init__(self) -> None:
        self._follower: _Follower | None = None
        self._reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self._run, name="signals", daemon=True).start()

    def hand_to(self, follower: _Follower) -> None:
        """From now on there is a leader to ask."""
        self._follower = follower

    def _run(self) -> None:
        asked = False
        while True:
            name = signal.Signals(os.read(self._reader, 1)[0]).name
            if asked or self._follower is None:
                _end(1, f"ended by {name}")
            asked = True
            self._follower.ask_to_drain(name)


def _end(status: int, text: str) -> NoReturn:
    """Ends the process from whatever thread, without waiting for jax, which would wait for the other processes."""
    (_log.error if status else _log.info)("%s", text)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
