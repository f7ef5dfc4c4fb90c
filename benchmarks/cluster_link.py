"""The link between the leader and its followers: our TLS frames beside ZeroMQ's CURVE, on one machine.

One process leads. `--players` processes play the followers, each as many sockets: a follower of the TLS link is a
`Channel`, one of CURVE is a DEALER socket in a poll loop. Each step sends every follower its own message of
so many bytes, then sleeps as the device would work. Links take turns, so that other work on the machine meets both. A
PUB socket is left out: every follower gets other bytes. Figures are medians over all steps of all rounds:

- processor time of the leader's process per step, all of its threads, and that of the thread that sends;
- how long after the first send the last follower has its whole message, and the first byte of Python runs on it;
- bytes on the wire of one message, counted by a relay in front of one follower.

`--faults` shows instead what the leader notices of a follower that stops reading, of one whose process is stopped as
a dead host is, and of strangers.

  python -m benchmarks.cluster_link [--followers 143] [--bytes 12362] [--steps 100] [--rounds 3] [--players 4]
  python -m benchmarks.cluster_link --faults
"""

import argparse
import contextlib
import dataclasses
import hashlib
import hmac
import multiprocessing
import os
import signal
import socket
import statistics
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Protocol

import zmq
import zmq.auth.thread
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from dsv3.engine.cluster.channel import Channel, ChannelError
from dsv3.engine.cluster.leader_engine import _SWITCH_INTERVAL_S
from dsv3.engine.cluster.wire import WireError, accept, connect
from dsv3.processes.certificates import credentials_of
from dsv3.processes.unauthenticated import listen

KEY = b"0123456789abcdef0123456789abcdef"
_STEP = struct.Struct("<qd")  # number of the step, when its first message was sent; -1 is the end
_DEVICE_S = 0.02
_SILENCE_S = 2.0
_BEAT_S = 0.4
_FAULT_S = 10.0
_START_S = 60.0

_SPAWN = multiprocessing.get_context("spawn")
Latencies = dict[int, float]


class Link(Protocol):
    """The leader's end; `failures` are sentences about followers, in the order in which the link says them."""

    port: int
    failures: list[str]

    def gather(self, followers: int) -> None: ...
    def send(self, follower: int, body: bytes) -> None: ...
    def close(self) -> None: ...


class Tls:
    """Our frames: `Channel` over `Wire`."""

    def __init__(self) -> None:
        self._listener = listen("127.0.0.1", 0)
        self._listener.settimeout(_START_S)
        self.port = self._listener.getsockname()[1]
        self.failures: list[str] = []
        self._channels: dict[int, Channel] = {}

    def gather(self, followers: int) -> None:
        while len(self._channels) < followers:
            connection, _ = self._listener.accept()
            connection.settimeout(None)
            try:
                number, wire = accept(connection, credentials_of(KEY), followers + 1)
            except WireError as error:
                self.failures.append(f"refused a stranger: {error}")
                connection.close()
                continue
            ended = lambda end, number=number: self.failures.append(f"{number} {end}")  # noqa: E731
            self._channels[number] = Channel(wire, lambda: b"", lambda _: None, ended, _BEAT_S)
            self._channels[number].start()
        threading.Thread(target=self._watch, daemon=True).start()

    def send(self, follower: int, body: bytes) -> None:
        self._channels[follower].send(body)

    def close(self) -> None:
        for channel in self._channels.values():
            channel.wait_closed(5)
        self._listener.close()

    def _watch(self) -> None:
        """Does what `Leader` does each quarter of a second."""
        while not self.failures:
            time.sleep(0.25)
            for number, channel in self._channels.items():
                if time.monotonic() - channel.last_heard_s > _SILENCE_S:
                    self.failures.append(f"{number} has been silent for {_SILENCE_S:g} s")


class Curve:
    """A ROUTER socket with CURVE: keys derived from the secret, an authenticator's thread that knows the client's."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._authenticator = zmq.auth.thread.ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", _Members())
        self._router = self._context.socket(zmq.ROUTER)
        _beat(self._router)
        self._router.curve_server = True
        self._router.curve_secretkey, _ = curve_keys("leader")
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.RCVTIMEO, int(_START_S * 1000))
        self.failures: list[str] = []
        events = self._router.get_monitor_socket()
        threading.Thread(target=self._watch, args=(events,), daemon=True).start()
        self.port = self._router.bind_to_random_port("tcp://127.0.0.1")

    def gather(self, followers: int) -> None:
        come = set()
        while len(come) < followers:
            identity, _ = self._router.recv_multipart()
            come.add(identity)

    def send(self, follower: int, body: bytes) -> None:
        self._router.send_multipart((follower.to_bytes(2, "big"), body), zmq.DONTWAIT)

    def close(self) -> None:
        self._router.disable_monitor()
        self._router.close(linger=0)
        self._authenticator.stop()

    def _watch(self, events: zmq.Socket) -> None:
        """Notes what the monitor says. It names a file descriptor, and no follower."""
        said = {
            zmq.EVENT_DISCONNECTED: "has ended",
            zmq.EVENT_HANDSHAKE_FAILED_AUTH: "has another key",
            zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "is no peer",
            zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "has not completed the handshake",
        }
        with contextlib.suppress(zmq.ZMQError):
            while (event := recv_monitor_message(events))["event"] != zmq.EVENT_MONITOR_STOPPED:
                if event["event"] in said:
                    self.failures.append(f"descriptor {event['value']} {said[event['event']]}")


class _Members:
    def callback(self, domain: str, key: bytes) -> bool:
        return key == curve_keys("follower")[1]


def curve_keys(name: str) -> tuple[bytes, bytes]:
    """Returns the secret and the public key of a role, in the Z85 form, derived from the instance's secret."""
    secret = z85.encode(hmac.digest(KEY, name.encode(), hashlib.sha256))
    return secret, zmq.curve_public(secret)


def _beat(end: zmq.Socket) -> None:
    end.setsockopt(zmq.HEARTBEAT_IVL, int(_BEAT_S * 1000))
    end.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(_SILENCE_S * 1000))


LINKS: dict[str, Callable[[], Link]] = {"tls": Tls, "curve": Curve}


def play(name: str, port: int, numbers: range, reads: bool, answers: Connection) -> None:
    """Plays followers; sends the latencies of the steps, and ends. Where it does not read it waits for its end."""
    latencies: Latencies = {}
    {"tls": _play_tls, "curve": _play_curve}[name](port, numbers, reads, latencies)
    answers.send(latencies)


def _take(body: bytes | memoryview, latencies: Latencies) -> bool:
    """Notes when a message has come; returns whether another one will."""
    number, sent = _STEP.unpack_from(body)
    if number >= 0:
        latencies[number] = max(latencies.get(number, 0.0), time.monotonic() - sent)
    return number >= 0


def _play_tls(port: int, numbers: range, reads: bool, latencies: Latencies) -> None:
    left = [threading.Event() for _ in numbers]
    channels = []
    for number, ended in zip(numbers, left, strict=True):
        wire = connect(socket.create_connection(("127.0.0.1", port)), credentials_of(KEY), number)

        def hear(body: bytes, ended: threading.Event = ended) -> None:
            if body and not _take(body, latencies):
                ended.set()

        channels.append(Channel(wire, lambda: b"", hear, lambda end: None, _BEAT_S))
        if reads:
            channels[-1].start()
    for ended in left:
        ended.wait()


def _play_curve(port: int, numbers: range, reads: bool, latencies: Latencies) -> None:
    context, poller = zmq.Context(), zmq.Poller()
    ends = []
    for number in numbers:
        end = context.socket(zmq.DEALER)
        _beat(end)
        end.curve_secretkey, end.curve_publickey = curve_keys("follower")
        end.curve_serverkey = curve_keys("leader")[1]
        end.setsockopt(zmq.ROUTING_ID, number.to_bytes(2, "big"))
        end.connect(f"tcp://127.0.0.1:{port}")
        end.send(b"")
        poller.register(end, zmq.POLLIN)
        ends.append(end)
    while not reads:
        time.sleep(1)
    left = len(ends)
    while left:
        for end, _ in poller.poll():
            while True:
                try:
                    left -= not _take(end.recv(zmq.DONTWAIT), latencies)
                except zmq.Again:
                    break
    context.destroy(linger=0)


@contextlib.contextmanager
def playing(
    name: str, port: int, followers: int, players: int, reads: bool = True
) -> Iterator[list[tuple[multiprocessing.process.BaseProcess, Connection]]]:
    """Runs the players; those that are there at the end of the block are killed."""
    started = []
    for numbers in (range(1 + i, 1 + followers, players) for i in range(players)):
        ours, theirs = _SPAWN.Pipe(duplex=False)
        process = _SPAWN.Process(target=play, args=(name, port, numbers, reads, theirs), daemon=True)
        process.start()
        started.append((process, ours))
    try:
        yield started
    finally:
        for process, _ in started:
            process.kill()
            process.join()


@dataclasses.dataclass
class Figures:
    """Per step, in seconds."""

    process: list[float] = dataclasses.field(default_factory=list)
    thread: list[float] = dataclasses.field(default_factory=list)
    latency: list[float] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        process, thread, latency = (statistics.median(each) * 1e6 for each in (self.process, self.thread, self.latency))
        return (
            f"leader's processor {process:.0f} us per step, {thread:.0f} us of them the sending thread; "
            f"last follower has it after {latency:.0f} us"
        )


def measure(name: str, followers: int, size: int, steps: int, players: int, figures: Figures) -> None:
    """Adds the figures of a round of one link."""
    link, padding = LINKS[name](), bytes(size - _STEP.size)
    with playing(name, link.port, followers, min(players, followers)) as started:
        link.gather(followers)
        for number in range(steps):
            time.sleep(_DEVICE_S)
            process, thread = time.process_time(), time.thread_time()
            head = _STEP.pack(number, time.monotonic())
            for follower in range(1, followers + 1):
                link.send(follower, head + padding)
            figures.thread.append(time.thread_time() - thread)
            time.sleep(_DEVICE_S)
            figures.process.append(time.process_time() - process)
        for follower in range(1, followers + 1):
            link.send(follower, _STEP.pack(-1, 0.0))
        latencies = [answers.recv() for _, answers in started]
    figures.latency += [max(each[number] for each in latencies) for number in range(steps)]
    link.close()


def bytes_of(name: str, size: int, count: int = 20) -> float:
    """Returns what a relay counts from the leader to a follower, per message of `size` bytes."""
    link, padding = LINKS[name](), bytes(size - _STEP.size)
    counted = [0]
    with socket.create_server(("127.0.0.1", 0)) as relay:
        threading.Thread(target=_relay, args=(relay, link.port, counted), daemon=True).start()
        with playing(name, relay.getsockname()[1], 1, 1) as [(_, answers)]:
            link.gather(1)
            time.sleep(_DEVICE_S)
            before = counted[0]
            for number in range(count):
                link.send(1, _STEP.pack(number, 0.0) + padding)
            link.send(1, _STEP.pack(-1, 0.0))
            answers.recv()
    link.close()
    return (counted[0] - before) / count


def _relay(relay: socket.socket, port: int, counted: list[int]) -> None:
    follower, _ = relay.accept()
    leader = socket.create_connection(("127.0.0.1", port))
    threading.Thread(target=_pass_on, args=(follower, leader, [0]), daemon=True).start()
    _pass_on(leader, follower, counted)


def _pass_on(source: socket.socket, target: socket.socket, counted: list[int]) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(2**16):
            counted[0] += len(data)
            target.sendall(data)


def faults(name: str, size: int) -> Iterator[str]:
    """Yields what the leader notices, a sentence per fault."""
    link = LINKS[name]()
    with playing(name, link.port, 1, 1, reads=False):
        link.gather(1)
        yield f"a follower stops reading: {_unread(link, bytes(size))}"
    link = LINKS[name]()
    with playing(name, link.port, 1, 1) as [(process, _)]:
        link.gather(1)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        yield f"a host is dead: {_noticed(link)}"
    link = LINKS[name]()
    greeting = threading.Thread(target=link.gather, args=(1,), daemon=True)
    greeting.start()
    with socket.create_connection(("127.0.0.1", link.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
        yield f"a stranger talks: {_noticed(link)}"
    link.failures.clear()
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(socket.create_connection(("127.0.0.1", link.port)))
        yield f"strangers are silent: {_noticed(link)}"


def _unread(link: Link, body: bytes) -> str:
    for count in range(10**6):
        try:
            link.send(1, body)
        except (ChannelError, zmq.ZMQError) as error:
            return f"{type(error).__name__} after {count * len(body) / 1e6:.1f} MB, {error}"
        if link.failures:
            return f"{link.failures[0]} after {count * len(body) / 1e6:.1f} MB"
    return "nothing"


def _noticed(link: Link) -> str:
    started = time.monotonic()
    while not link.failures and time.monotonic() - started < _FAULT_S:
        time.sleep(0.01)
    return f"{link.failures[0] if link.failures else 'nothing'} after {time.monotonic() - started:.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("followers", 143), ("bytes", 12362), ("steps", 100), ("rounds", 3), ("players", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--faults", action="store_true")
    arguments = parser.parse_args()
    if arguments.faults:
        for name in LINKS:
            for sentence in faults(name, arguments.bytes):
                print(f"{name}: {sentence}", flush=True)
        return
    sys.setswitchinterval(_SWITCH_INTERVAL_S)  # as the leader does
    figures = {name: Figures() for name in LINKS}
    for _ in range(arguments.rounds):
        for name, each in figures.items():
            measure(name, arguments.followers, arguments.bytes, arguments.steps, arguments.players, each)
    for name, each in figures.items():
        carried = bytes_of(name, arguments.bytes)
        print(f"{name}: {each}; {carried:.0f} bytes on the wire of {arguments.bytes}", flush=True)


if __name__ == "__main__":
    main()
