"""Runs a follower: it builds the same parts of an engine as the leader and executes the leader's commands in order.

It has neither HTTP nor a scheduler. The main thread loads, compiles and launches; other threads receive, send, watch
the leader and read results. The process ends when the leader says so, is silent or is gone, whatever the main thread is
stuck in.
"""

import dataclasses
import functools
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from dsv3.config.options import ClusterOptions, EngineOptions
from dsv3.engine.cluster import messages
from dsv3.engine.cluster.channel import Channel, ChannelError
from dsv3.engine.cluster.digest import Chain, digests_of, orders_of
from dsv3.engine.cluster.link import Alone, Begun, FromFollower, Incarnation, Serving, Waits
from dsv3.engine.cluster.messages import (
    Begin,
    Build,
    Checked,
    Compiled,
    Digest,
    Drain,
    FollowerFailed,
    Heartbeat,
    Hello,
    Loaded,
    Ready,
    Started,
    Step,
    Stop,
    Wait,
    WorkEvent,
)
from dsv3.engine.cluster.start import (
    LoadComponents,
    Phases,
    first_gpu,
    fitted,
    kept_programs,
    load_model,
    loaded_fields,
    own_options,
    start_jax,
)
from dsv3.engine.cluster.wire import PATIENCE_S, Unanswered, Wire, WireError, connect
from dsv3.engine.device.pool import set_pool_share
from dsv3.engine.executor import LocalExecutor, Results
from dsv3.engine.fingerprint import fields_of
from dsv3.engine.job import Command, FollowerHandler, StepCommand
from dsv3.engine.jobs.registry import JOB_KINDS
from dsv3.engine.kernel_checks import check_kernels, fall_back
from dsv3.processes.certificates import Credentials, credentials_of
from dsv3.processes.key_file import read_key

_log = logging.getLogger("dsv3.cluster")
_RETRY_S = 0.2
# How long the process waits, before it ends, until the leader has read why; the leader answers in milliseconds.
_FAREWELL_S = 10.0
# A collective that another process's end has broken raises at once; the leader tells the reason soon after.
_EXPLANATION_S = 3.0
# The end of the leader must be seen here before jax's coordination client sees it and aborts the process.
_SWITCH_INTERVAL_S = 0.0005


def run(
    cluster: ClusterOptions,
    model_dir: Path,
    options: EngineOptions,
    load: LoadComponents = load_model,
    last: Incarnation | None = None,
    tell: Callable[[FromFollower], None] = lambda _: None,
) -> NoReturn:
    """Follows the leader until it ends, then ends the process: with status 0 if that was in order, else 1.

    `options` are those of the leader, `last` is the generation that this place was in before. A supervisor hears by
    `tell` how far it has come. Raises ValueError for a key file that cannot be used.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    credentials = credentials_of(read_key(cluster.cluster_key_file))
    signals = _Signals()
    try:
        wire = _reach(cluster, credentials)
    except WireError as error:
        tell(Alone())
        _end(1, str(error))
    follower = _Follower(cluster, wire, last, tell)
    signals.hand_to(follower)
    try:
        follower.follow(model_dir, options, load)
    except Exception as error:
        follower.give_up(error)


class FollowingExecutor:
    """Executes the leader's commands; `follower_handlers` do, by kind of job, what these ask for beside programs."""

    def __init__(self, local: LocalExecutor, follower_handlers: Mapping[str, FollowerHandler]) -> None:
        self._local, self._follower_handlers = local, follower_handlers

    def launch(self, command: StepCommand) -> tuple[StepCommand, list[Any]]:
        """Starts a step; returns it as it was launched, and the arrays that will hold its results."""
        jobs = tuple((kind, self._prepared(kind, each)) for kind, each in command.jobs)
        command = StepCommand(command.number, jobs)
        return command, self._local.launch(command)

    def fetch(self, command: StepCommand, launched: list[Any]) -> tuple[Results, list[np.ndarray]]:
        """Waits for the results of a step; returns them, and those that must be the same in every process."""
        results = self._local.fetch(command, launched)
        return results, self._local.agreed(command, results)

    def take(self, command: StepCommand, results: Results) -> None:
        """Hands the results of a step to those who want them."""
        for (kind, each), arrays in zip(command.jobs, results, strict=True):
            if (follower_handler := self._follower_handlers.get(kind)) is not None:
                follower_handler.take(each, arrays)

    def _prepared(self, kind: str, command: Command) -> Command:
        follower_handler = self._follower_handlers.get(kind)
        return command if follower_handler is None else follower_handler.prepared(command)


class _Follower:
    def __init__(
        self,
        cluster: ClusterOptions,
        wire: Wire,
        last: Incarnation | None = None,
        tell: Callable[[FromFollower], None] = lambda _: None,
    ) -> None:
        self._cluster, self._last, self._tell = cluster, last, tell
        self._inbox: queue.SimpleQueue[Begin | Checked | Build | Compiled | Step] = queue.SimpleQueue()
        self._launched: queue.SimpleQueue[tuple[StepCommand, list[Any]]] = queue.SimpleQueue()
        self._last_launched = -1
        self._silence_s = cluster.starting_silence_s
        self._channel = Channel(wire, self._heartbeat, self._take, self._lost, cluster.heartbeat_s)
        self._channel.start()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def follow(self, model_dir: Path, options: EngineOptions, load: LoadComponents) -> NoReturn:
        """Starts together with the leader, then executes what it sends."""
        phases = Phases()
        fields = fields_of(model_dir, options, self._cluster)
        self._send(Hello(fields, socket.gethostname(), os.getpid(), self._last))
        begin = self._expect(Begin)
        generation = begin.generation
        if generation.is_over_for(self._last):
            raise WireError(f"the leader is of {generation}, which is over: this process has been in {self._last}")
        self._tell(Begun(generation))
        _log.info("process %d begins in %s of %s", self._cluster.process_id, generation, generation.front)
        phases.end("all have come")
        if options.check_kernels:
            self._send(Checked(check_kernels(first_gpu(self._cluster))))
            fall_back(self._expect(Checked).replaced)
            phases.end("checks")
        cluster = place_in(self._cluster, begin)
        set_pool_share(options.gpu_memory_utilization)
        start_jax(cluster, generation)
        phases.end("jax")
        options = fitted(own_options(options, cluster), model_dir, self._cluster, cluster)
        parts = load(model_dir, options, num_nodes=cluster.num_nodes)
        phases.end("weights")
        self._send(Loaded(loaded_fields(parts), parts.cfg.num_pages, parts.cfg.transfer_address or ""))
        parts = dataclasses.replace(parts, cfg=self._expect(Build).config)
        makers = {
            kind.name: kind.follower_handler
            for kind in JOB_KINDS
            if kind.follower_handler is not None and kind.applies(parts)
        }
        follower_handlers = {name: make(parts, functools.partial(self._pass_on, name)) for name, make in makers.items()}
        local = LocalExecutor(parts, JOB_KINDS)
        store = kept_programs(cluster, model_dir, options, parts)
        del parts  # the executor alone holds the weights: experts that it moves are written in place
        local.compile_all(store=store)
        phases.end("compiling")
        self._send(Compiled(digests_of(orders_of(local.devices.programs))))
        self._expect(Compiled)
        local.launch_all()
        phases.end("first launches")
        _log.info("process %d is ready after %s; %s", self._cluster.process_id, phases, store)
        self._send(Ready())
        executor = FollowingExecutor(local, follower_handlers)
        threading.Thread(target=self._report, args=(executor,), name="results", daemon=True).start()
        while True:
            command = messages.command_of(self._expect(Step), JOB_KINDS)
            self._launched.put(executor.launch(command))
            self._last_launched = command.number

    def ask_to_drain(self, signal_name: str) -> None:
        """Asks the leader to finish what runs and stop the instance."""
        text = f"process {self._cluster.process_id} has received {signal_name}"
        _log.info("%s: asking the leader to drain; once more ends this process at once", text)
        try:
            self._send(Drain(text))
        except ChannelError as error:
            _end(1, f"the leader (process 0) {error}")

    def give_up(self, error: Exception) -> NoReturn:
        """Ends the process because of `error`, or because of what the leader says first.

        Another process may be the cause of `error`, so the leader has `_EXPLANATION_S` seconds to tell a reason. Then
        the leader is told the error. Its answer ends this process, which waits for it at most `_FAREWELL_S` seconds.
        """
        time.sleep(_EXPLANATION_S)  # the receiving thread ends the process if the leader says so, or has gone
        expected = isinstance(error, ValueError | OSError)
        text = f"{type(error).__name__}: {error}" if expected else "".join(traceback.format_exception(error))
        _log.error("%s", text)
        self._channel.send_last(messages.encode(FollowerFailed(type(error).__name__, text)))
        answered = self._channel.wait_closed(_FAREWELL_S)
        _end(1, f"the leader (process 0) {'has' if answered else 'does not seem to have'} heard of that")

    def _expect[Message: (Begin, Checked, Build, Compiled, Step)](self, kind: type[Message]) -> Message:
        message = self._inbox.get()
        if not isinstance(message, kind):
            raise WireError(f"the leader sent {type(message).__name__}, expected {kind.__name__}")
        return message

    def _heartbeat(self) -> bytes:
        return messages.encode(Heartbeat(self._last_launched))

    def _send(self, message: messages.ToLeader) -> None:
        self._channel.send(messages.encode(message))

    def _pass_on(self, kind: str, body: bytes) -> None:
        try:
            self._send(WorkEvent(kind, body))
        except ChannelError as error:
            self.give_up(error)

    def _take(self, body: bytes) -> None:
        message = messages.decode_for_follower(body)
        match message:
            case Stop(failure=None):
                _end(0, "the leader has ended in order")
            case Stop(failure=str(failure)):
                _end(1, f"the leader ends the instance: {failure}")
            case Started():
                self._silence_s = self._cluster.cluster_silence_timeout
                self._tell(Serving())
            case Wait():
                _log.info("the others have gone on without process %d: it waits", self._cluster.process_id)
                self._tell(Waits())
            case Begin() | Checked() | Build() | Compiled() | Step():
                self._inbox.put(message)

    def _lost(self, end: str) -> None:
        text = f"the leader (process 0) {end}"
        if self._channel.closed:
            _end(1, text)
        threading.Thread(target=self.give_up, args=(WireError(text),), daemon=True).start()

    def _report(self, executor: FollowingExecutor) -> None:
        """Reads the results of each step, sends their digest to the leader, and takes in what stays here."""
        chain = Chain()
        try:
            while True:
                command, launched = self._launched.get()
                results, agreed = executor.fetch(command, launched)
                self._send(Digest(command.number, chain.add(command.number, agreed)))
                executor.take(command, results)
        except Exception as error:
            self.give_up(error)

    def _watch(self) -> None:
        interval, last = min(0.25, self._cluster.cluster_silence_timeout / 8), time.monotonic()
        while True:
            time.sleep(interval)
            now, limit = time.monotonic(), self._silence_s
            suspended, last = now - last > interval + limit / 2, now
            if suspended:
                self._channel.forgive()
            elif now - self._channel.last_heard_s > limit:
                _end(1, f"the leader (process 0) has been silent for {limit:g} s: it hangs, or its host is gone")


def place_in(cluster: ClusterOptions, begin: Begin) -> ClusterOptions:
    """Returns the place of a follower among those that begin."""
    if begin.num_processes is None:
        return cluster
    return dataclasses.replace(cluster, num_processes=begin.num_processes, process_id=begin.process_id)


def _reach(cluster: ClusterOptions, credentials: Credentials) -> Wire:
    """Connects to the leader, which may start later, be busy, or be besieged by strangers.

    Raises WireError where the leader refuses this process, and when the time to start is over.
    """
    host, port = cluster.control_address
    deadline = time.monotonic() + cluster.cluster_start_timeout
    while True:
        try:
            return _dial((host, port), credentials, cluster.process_id)
        except (OSError, Unanswered) as error:
            if time.monotonic() > deadline:
                raise WireError(
                    f"cannot reach the leader at {host}:{port} within {cluster.cluster_start_timeout:g} s: {error}"
                ) from None
        time.sleep(_RETRY_S)


def _dial(address: tuple[str, int], credentials: Credentials, process_id: int) -> Wire:
    connection = socket.create_connection(address, timeout=PATIENCE_S)
    try:
        return connect(connection, credentials, process_id)
    except WireError:
        connection.close()
        raise


class _Signals:
    """Takes SIGTERM and SIGINT on a thread: Python's own handlers wait until the main thread leaves a collective.

    The first asks the leader to drain and stop the instance. The second ends this process at once, and so does the
    first while there is no leader yet.
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
        """Lets `follower` ask the leader from now on."""
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
    """Ends the process from any thread. jax's own shutdown, which would wait for the other processes, does not run."""
    (_log.error if status else _log.info)("%s", text)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
