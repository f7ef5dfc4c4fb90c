"""Runs a follower: it builds the same components as the leader and executes the leader's commands in order.

It has neither HTTP nor a scheduler. The main thread loads, compiles and launches; other threads receive, send, watch
the leader and read results. The process ends when the leader sends `Stop`, is silent or has ended, even while the main
thread hangs.
"""

import contextlib
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

from dsv3.config.options import ClusterOptions, EngineOptions
from dsv3.engine.build import load_components
from dsv3.engine.cluster import messages
from dsv3.engine.cluster.channel import Channel, ChannelError
from dsv3.engine.cluster.digest import chained, collective_orders, order_digests
from dsv3.engine.cluster.flight_recorder import FlightRecorder
from dsv3.engine.cluster.link import FollowerReport, Incarnation
from dsv3.engine.cluster.start import (
    LoadComponents,
    Phases,
    adapt_to_devices,
    first_gpu,
    loaded_fields,
    open_program_store,
    process_options,
    start_jax,
)
from dsv3.engine.cluster.wire import PATIENCE_S, NoAnswer, Wire, WireError, connect
from dsv3.engine.device.pool import set_memory_fraction
from dsv3.engine.executor import LocalExecutor
from dsv3.engine.fingerprint import fields_of
from dsv3.engine.job import FollowerHandler, StepCommand
from dsv3.engine.jobs import JOB_KINDS
from dsv3.engine.kernel_checks import apply_fallbacks, check_kernels
from dsv3.files import read_key
from dsv3.processes.certificates import Credentials, credentials_of

_log = logging.getLogger("dsv3.cluster")
_RETRY_S = 0.2
# How long the process waits, before it ends, until the leader has read its error; the leader answers in milliseconds.
_SHUTDOWN_S = 10.0
# A collective broken by the end of another process raises at once; the leader's reason follows soon after.
_EXPLANATION_S = 3.0
# This process must notice the end of the leader before jax's coordination client does, which aborts the process.
_SWITCH_INTERVAL_S = 0.0005


def run(
    cluster: ClusterOptions,
    model_dir: Path,
    options: EngineOptions,
    load: LoadComponents = load_components,
    last: Incarnation | None = None,
    report: Callable[[FollowerReport], None] = lambda _: None,
) -> NoReturn:
    """Follows the leader until it ends, then ends the process: with status 0 if that was orderly, else 1.

    `options` are those of the leader, `last` is the generation of the process before. `report` sends the supervisor the
    progress of the start. Raises ValueError for an unusable key file.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    credentials = credentials_of(read_key(cluster.cluster_key_file))
    signals = _Signals()
    try:
        wire = _connect_to_leader(cluster, credentials)
    except WireError as error:
        report(FollowerReport("alone"))
        _end(1, str(error))
    follower = _Follower(cluster, wire, last, report)
    signals.attach(follower)
    try:
        follower.follow(model_dir, options, load)
    except Exception as error:
        follower.fail(error)


class _Follower:
    def __init__(
        self,
        cluster: ClusterOptions,
        wire: Wire,
        last: Incarnation | None = None,
        report: Callable[[FollowerReport], None] = lambda _: None,
    ) -> None:
        self._cluster, self._last, self._report_state = cluster, last, report
        self._inbox: queue.SimpleQueue[messages.ToFollower] = queue.SimpleQueue()
        self._launched: queue.SimpleQueue[tuple[StepCommand, list[Any]]] = queue.SimpleQueue()
        self._recorder = FlightRecorder()
        self._silence_s = cluster.starting_silence_s
        self._channel = Channel(wire, self._heartbeat, self._on_message, self._on_disconnect, cluster.heartbeat_s)
        self._channel.start()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def follow(self, model_dir: Path, options: EngineOptions, load: LoadComponents) -> NoReturn:
        """Starts together with the leader, then executes its commands."""
        phases = Phases()
        fields = fields_of(model_dir, options, self._cluster)
        self._send(messages.Hello(fields, socket.gethostname(), os.getpid(), self._last))
        begin = self._expect(messages.Begin)
        generation = begin.generation
        if generation.is_over_for(self._last):
            raise WireError(f"the leader is of {generation}, which is over: this process was in {self._last}")
        self._report_state(FollowerReport("joined", generation))
        _log.info("process %d begins in %s of %s", self._cluster.process_id, generation, generation.server)
        phases.end("connected")
        if options.check_kernels:
            self._send(messages.Checked(check_kernels(first_gpu(self._cluster))))
            apply_fallbacks(self._expect(messages.Checked).replaced)
            phases.end("checks")
        cluster = renumbered(self._cluster, begin)
        set_memory_fraction(options.gpu_memory_utilization)
        start_jax(cluster, generation)
        phases.end("jax")
        options = adapt_to_devices(process_options(options, cluster), model_dir, self._cluster, cluster)
        components = load(model_dir, options, num_nodes=cluster.num_nodes)
        phases.end("weights")
        self._send(
            messages.Loaded(loaded_fields(components), components.cfg.num_pages, components.cfg.transfer_address or "")
        )
        components = dataclasses.replace(components, cfg=self._expect(messages.Build).config)
        handlers = {
            kind.name: kind.follower_handler(components, functools.partial(self._publish, kind.name))
            for kind in JOB_KINDS
            if kind.follower_handler is not None and kind.applies(components)
        }
        executor = LocalExecutor(components, JOB_KINDS)
        store = open_program_store(cluster, model_dir, options, components)
        del components  # only the executor refers to the weights: experts that it moves are written in place
        executor.compile_all(store=store)
        phases.end("compiling")
        self._send(messages.Compiled(order_digests(collective_orders(executor.devices.programs))))
        self._expect(messages.Compiled)
        executor.launch_all()
        self._recorder.programs = executor.devices.programs
        phases.end("first launches")
        _log.info("process %d is ready after %s; %s", self._cluster.process_id, phases, store)
        self._send(messages.Ready())
        threading.Thread(target=self._report, args=(executor, handlers), name="results", daemon=True).start()
        while True:
            message = self._inbox.get()
            if isinstance(message, messages.Operate):
                self._operate(executor, message)
            elif isinstance(message, messages.Step):
                command = messages.command_of(message, JOB_KINDS)
                self._recorder.launching = command.number
                jobs = ((kind, handlers[kind].prepare(job) if kind in handlers else job) for kind, job in command.jobs)
                command = StepCommand(command.number, tuple(jobs))
                self._launched.put((command, executor.launch(command)))
                self._recorder.launched = command.number
            else:
                raise WireError(f"the leader sent {type(message).__name__}, expected Step or Operate")

    def ask_to_drain(self, signal_name: str) -> None:
        """Asks the leader to finish running requests and stop the instance."""
        text = f"process {self._cluster.process_id} has received {signal_name}"
        _log.info("%s: asking the leader to drain; once more ends this process at once", text)
        try:
            self._send(messages.Drain(text))
        except ChannelError as error:
            _end(1, f"the leader (process 0) {error}")

    def fail(self, error: Exception) -> NoReturn:
        """Ends the process because of `error`, or because of the leader's `Stop` if that comes first.

        Another process may be the cause of `error`, so the leader has `_EXPLANATION_S` seconds to send a reason. Then
        the error is sent to the leader. Its answer ends this process, which waits for it at most `_SHUTDOWN_S` seconds.
        """
        time.sleep(_EXPLANATION_S)  # the receiving thread ends the process if the leader sends Stop, or has ended
        expected = isinstance(error, ValueError | OSError)
        text = f"{type(error).__name__}: {error}" if expected else "".join(traceback.format_exception(error))
        _log.error("%s", text)
        self._channel.send_last(messages.encode(messages.FollowerFailed(type(error).__name__, text)))
        answered = self._channel.closed.wait(_SHUTDOWN_S)
        _end(1, f"the leader (process 0) {'has received' if answered else 'has not confirmed'} this error")

    def _expect[Message](self, kind: type[Message]) -> Message:
        message = self._inbox.get()
        if not isinstance(message, kind):
            raise WireError(f"the leader sent {type(message).__name__}, expected {kind.__name__}")
        return message

    def _heartbeat(self) -> bytes:
        return messages.encode(self._recorder.heartbeat())

    def _send(self, message: messages.ToLeader) -> None:
        self._channel.send(messages.encode(message))

    def _publish(self, kind: str, body: bytes) -> None:
        try:
            self._send(messages.WorkEvent(kind, body))
        except ChannelError as error:
            self.fail(error)

    def _on_message(self, body: bytes) -> None:
        message = messages.decode_for_follower(body)
        match message:
            case messages.Stop(failure=None):
                _end(0, "the leader has ended the instance in order")
            case messages.Stop(failure=str(failure)):
                _end(1, f"the leader ends the instance: {failure}")
            case messages.Ready():
                self._silence_s = self._cluster.cluster_silence_timeout
                self._report_state(FollowerReport("serving"))
            case messages.Wait():
                _log.info("the others have started without process %d: it waits", self._cluster.process_id)
                self._report_state(FollowerReport("waiting"))
            case (
                messages.Begin()
                | messages.Checked()
                | messages.Build()
                | messages.Compiled()
                | messages.Step()
                | messages.Operate()
            ):
                self._inbox.put(message)

    def _on_disconnect(self, end: str) -> None:
        text = f"the leader (process 0) {end}"
        if self._channel.closed.is_set():
            _end(1, text)
        threading.Thread(target=self.fail, args=(WireError(text),), daemon=True).start()

    def _report(self, executor: LocalExecutor, handlers: Mapping[str, FollowerHandler]) -> None:
        """Reads the results of each step, sends their digest to the leader, and passes them to the handlers."""
        digest = b""
        try:
            while True:
                command, launched = self._launched.get()
                results = executor.fetch(command, launched)
                self._recorder.fetched = command.number
                digest = chained(digest, command.number, executor.replicated_results(command, results))
                self._send(messages.Digest(command.number, digest))
                for (kind, job), arrays in zip(command.jobs, results, strict=True):
                    if kind in handlers:
                        handlers[kind].on_results(job, arrays)
        except Exception as error:
            self.fail(error)

    def _operate(self, executor: LocalExecutor, operation: messages.Operate) -> None:
        """Executes an operation, a plan on a thread of its own; the leader decides what follows from an error."""

        def execute(work: Callable[[], None]) -> None:
            error = ""
            try:
                work()
            except Exception as failure:
                expected = isinstance(failure, ValueError | OSError)
                _log.error("the operation %r has failed", operation.work, exc_info=not expected)
                error = f"{type(failure).__name__}: {failure}"
            with contextlib.suppress(ChannelError):  # the receiving thread ends the process
                self._send(messages.Operated(error))

        match operation.work:
            case "plan":
                work = executor.plan_weights(operation.source)
                threading.Thread(target=execute, args=(work,), name="plan", daemon=True).start()
            case "replace":
                execute(lambda: executor.replace_weights(lambda: None))
            case "sleep":
                execute(lambda: executor.sleep(operation.level))
            case "wake":
                execute(executor.wake)

    def _watch(self) -> None:
        interval, last = min(0.25, self._cluster.cluster_silence_timeout / 8), time.monotonic()
        while True:
            time.sleep(interval)
            now, limit = time.monotonic(), self._silence_s
            suspended, last = now - last > interval + limit / 2, now
            if suspended:
                self._channel.last_received_s = time.monotonic()
            elif now - self._channel.last_received_s > limit:
                _end(1, f"the leader (process 0) has been silent for {limit:g} s: it hangs, or its host is gone")


def renumbered(cluster: ClusterOptions, begin: messages.Begin) -> ClusterOptions:
    """Returns the options of a follower among the processes that start."""
    if begin.num_processes is None:
        return cluster
    return dataclasses.replace(cluster, num_processes=begin.num_processes, process_id=begin.process_id)


def _connect_to_leader(cluster: ClusterOptions, credentials: Credentials) -> Wire:
    """Connects to the leader, which may start later, be busy, or have many unauthenticated connections.

    Raises WireError where the leader refuses this process, and at the start timeout.
    """
    host, port = cluster.control_address
    deadline = time.monotonic() + cluster.cluster_start_timeout
    while True:
        try:
            return _dial((host, port), credentials, cluster.process_id)
        except UnicodeError:  # an empty label, or one that is too long
            raise WireError(f"cannot reach the leader at {host}:{port}: {host!r} is not a host name") from None
        except (OSError, NoAnswer) as error:
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
    """Receives SIGTERM and SIGINT on a thread: Python's own handlers wait until the main thread leaves a collective.

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

    def attach(self, follower: _Follower) -> None:
        """Sends the first signal's request through `follower` from now on."""
        self._follower = follower

    def _run(self) -> None:
        has_asked = False
        while True:
            name = signal.Signals(os.read(self._reader, 1)[0]).name
            if has_asked or self._follower is None:
                _end(1, f"ended by {name}")
            has_asked = True
            self._follower.ask_to_drain(name)


def _end(status: int, text: str) -> NoReturn:
    """Ends the process from any thread, without jax's own shutdown, which would wait for the other processes."""
    (_log.error if status else _log.info)("%s", text)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
