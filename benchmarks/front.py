"""The API server alone: the real one over an engine without a model, with many streams at once.

  python -m benchmarks.front                                  a table of some sizes
  python -m benchmarks.front --streams 10000 --rate 1         one size
  python -m benchmarks.front --streams 1000 --rate 10 --servers 2
  python -m benchmarks.front --streams 1000 --traces 3        without and with traces, in turn, three times
  python -m benchmarks.front --streams 10000 --rate 2 --seconds 45 --traces 1

Every stream gets `rate` tokens per second: the engine gives each request a token per step, `rate` steps per second. It
gives the first token at once and the second when all streams have come, so all have the same length. The token of step
n has the text "n " (four digits, modulo 10,000), and when the step was made stands at place n of a shared file. So a
client detects a missing token and measures how long each was on its way. The clients are a process of their own on the
same machine, with one connection and one endless stream each; each stream's text is checked to the last token. They
parse no JSON and build no objects per event, so that they take less of the machine than what they measure.

Processor time is that of all API servers together, per token that came to a client. Latency is from the step that made
a token to its arrival at the client. Memory is the growth of all API servers. Exit status 0 means that no token was
lost. With `--traces` a table compares processor time without and with `--otlp_traces_endpoint`: while all streams run,
and over their whole lives, in which each makes a trace; the collector's time does not count.
"""

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import psutil
import tokenizers
import uvloop
from tokenizers import decoders, models, pre_tokenizers

from benchmarks.instances import processor_s
from benchmarks.record import Cell, Report, arguments, run
from dsv3.engine.step_log import EngineSnapshot, StepLog
from dsv3.scheduler.request import EngineOutput, RequestRules, StepOutputs, Tokens
from dsv3.scheduler.timing import RequestTiming
from dsv3.server.engine.messages import EngineInfo
from tests.dsv3.server.collector import Collector

TABLE = ((128, 20.0), (1000, 5.0), (10_000, 0.25))
STEPS = 10_000
VOCAB = 256 + STEPS
MAX_MODEL_LEN = 65_536
_MARGIN_S = 3.0  # that streams run besides the measured seconds
_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
_TOKENS = re.compile(rb'"content":"((?:\d{4} )+)"')
_OPENING = 100  # streams that wait for their first token; more are not opened
_RAMP_STEP_S = 0.05  # between steps while streams still come
_RAMP_END_S = 10.0  # without another stream, after which those that are missing have failed
_TRACES_S = 1.5  # in which the last traces are sent


def main(report: Report) -> int:
    """Reports the table; exit status 0 means that no token was lost."""
    given = arguments(__doc__, streams=int, rate=10.0, servers=1, seconds=10.0, traces=int, clients=None)
    if given.clients:
        return uvloop.run(_run_clients(json.loads(given.clients)))
    sizes = [(given.streams, given.rate)] if given.streams else TABLE
    if given.traces:
        columns = ["streams", "tokens of each", "traces", "processor per token while all run (us)", "more (%)",
                   "over their lives (us)", "more (%)", "lost"]  # fmt: skip
        rows = (row for size in sizes for row in _compare(*size, given))
        return int(any(row[-1] for row in report.table("Traces", columns, rows).rows))
    columns = ["streams", "tokens per second of each", "API servers", "tokens/s", "processor per token (us)",
               "latency p50 (ms)", "p99 (ms)", "memory per stream (KiB)", "lost"]  # fmt: skip
    table = report.table("Streams of chat", columns, ([*size, *_measure(*size, given).row] for size in sizes))
    return int(any(row[-1] for row in table.rows))


class Measured(NamedTuple):
    """The line of a size, whose last cell is the number of streams that failed, and what a comparison needs.

    Processor time is that of the API servers per token in microseconds.
    """

    row: list[Cell]
    while_all_run: float
    over_their_lives: float


def _compare(streams: int, rate: float, given: argparse.Namespace) -> Iterator[list[Cell]]:
    """Yields a line without traces and one with them, means of several turns."""
    collector = Collector()
    found: dict[str, list[Measured]] = {"off": [], "on": []}
    for _ in range(given.traces):
        for name, endpoint in (("off", None), ("on", collector.url)):
            found[name].append(_measure(streams, rate, given, endpoint))
            collector.spans.clear()
    collector.close()
    off = np.mean([each[1:] for each in found["off"]], axis=0)
    for name, mine in found.items():
        means = np.mean([each[1:] for each in mine], axis=0)
        pairs = zip(means, off, strict=True)
        more = [100 * (each / base - 1) if base and name == "on" else None for each, base in pairs]
        lost = sum(int(each.row[-1] or 0) for each in mine)
        yield [streams, _tokens_of(rate, given), name, means[0], more[0], means[1], more[1], lost]


def _tokens_of(rate: float, given: argparse.Namespace) -> int:
    return int((given.seconds + _MARGIN_S) * rate) + 2


def _measure(streams: int, rate: float, given: argparse.Namespace, endpoint: str | None = None) -> Measured:
    """Measures one size, with traces to `endpoint` if it is given."""
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory))
        config = {
            "model_dir": directory,
            "model_names": ["empty"],
            "options": {"api_server_count": given.servers, "otlp_traces_endpoint": endpoint},
            "engine": {"max_num_queued_reqs": streams},
            "engine_factory": "benchmarks.front:make",
            "factory_options": {"rate": rate, "max_num_seqs": streams},
        }
        settings = {"directory": directory, "streams": streams, "seconds": given.seconds,
                    "max_tokens": _tokens_of(rate, given)}  # fmt: skip
        server = _start("tests.dsv3.server.served", json.dumps(config))
        try:
            settings["port"] = int(_line(server).split()[1])
            while (line := _line(server)) != "ready":
                assert line, "the server does not start"
            return _under_load(server, settings)
        finally:
            server.terminate()
            server.wait(60)


def _under_load(server: subprocess.Popen[str], settings: dict) -> Measured:
    first = psutil.Process(server.pid)
    children = (child for child in first.children() if "dsv3.server.http.api_server_child" in child.cmdline())
    processes = [first, *children]
    empty, idle = _memory(processes), processor_s(*processes)
    client = _start("benchmarks.front", "--clients", json.dumps(settings))
    try:
        assert _line(client) == "begin", "the streams do not begin"
        before, full = processor_s(*processes), _memory(processes)
        assert _line(client) == "end"
        used = processor_s(*processes) - before
        found = json.loads(_line(client))
        time.sleep(_TRACES_S)
        lives = processor_s(*processes) - idle
    finally:
        client.kill()
    print("\n".join(found["failures"]), file=sys.stderr, end="")
    streams, tokens, each = settings["streams"], found["tokens"], used / max(1, found["tokens"]) * 1e6
    row: list[Cell] = [
        len(processes), round(tokens / settings["seconds"]), each, *found["latency_ms"],
        (full - empty) / streams / 1024, found["failed"]]  # fmt: skip
    return Measured(row, each, lives / (streams * settings["max_tokens"]) * 1e6)


def _memory(processes: list[psutil.Process]) -> int:
    return sum(process.memory_info().rss for process in processes)


def _start(module: str, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", module, *words], stdout=subprocess.PIPE, text=True)


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


# The model, and the engine behind the server.


def write_model(directory: Path) -> None:
    """Writes the tokenizer and the chat template, and the file with the times of steps."""
    vocab = {token: i for i, token in enumerate([*_ALPHABET, *(f"{step:04d}Ġ" for step in range(STEPS))])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(directory / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.content }}{% endfor %}</think>"
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    np.zeros(STEPS).tofile(directory / "steps")


def step_times(directory: Path) -> np.ndarray:
    """Returns the times of the steps, by `time.monotonic`: [STEPS] float64, shared with the engine."""
    return np.memmap(directory / "steps", np.float64, "r+")


class EmptyEngine:
    """What `dsv3.server.engine.process` needs of an engine."""

    failure = None
    room = 2**20

    def __init__(self, times: np.ndarray, rate: float, streams: int):
        self._times, self._period = times, 1 / rate
        self._waiting: list = []
        self._missing, self._came_at = streams, time.monotonic()
        self._ids = np.zeros(0, np.int64)
        self._left = np.zeros(0, np.int64)
        self._timed: set[int] = set()
        self._steps = 0
        self._next_at = time.monotonic()
        self._host_times = [0] * 10
        self.log = StepLog()

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or len(self._ids))

    def submit(self, request) -> None:
        self._waiting.append(request)
        self._missing, self._came_at = self._missing - 1, time.monotonic()
        if request.return_timing:
            self._timed.add(request.request_id)

    def abort(self, request_id: int) -> None:
        self._waiting = [request for request in self._waiting if request.request_id != request_id]
        self._keep(self._ids != request_id)

    def step(self) -> StepOutputs:
        is_late = time.monotonic() - self._came_at > _RAMP_END_S
        are_coming = bool(self._waiting) or (self._missing > 0 and not is_late)
        self._next_at = max(self._next_at + (_RAMP_STEP_S if are_coming else self._period), time.monotonic())
        time.sleep(max(0.0, self._next_at - time.monotonic()))
        self._steps += not are_coming
        place = self._steps % STEPS
        token = len(_ALPHABET) + place
        self._times[place] = time.monotonic()
        outputs = [self._detail(request.request_id, token, None) for request in self._waiting]
        columns = []
        if not are_coming:
            last = self._left == 1
            outputs = [self._detail(request_id, token, "length") for request_id in self._ids[last].tolist()]
            self._keep(~last)
            columns = [Tokens(self._ids, np.ones(len(self._ids), np.int64), np.full(len(self._ids), token, np.int32))]
            self._left = self._left - 1
        self._ids = np.concatenate([self._ids, np.array([r.request_id for r in self._waiting], np.int64)])
        left = [r.max_length - len(r.prompt) - 1 for r in self._waiting]
        self._left = np.concatenate([self._left, np.array(left, np.int64)])
        self._waiting = []
        return StepOutputs(columns if len(self._ids) else [], outputs)

    def stats(self) -> dict[str, object]:
        return {
            "running": len(self._ids),
            "waiting": len(self._waiting),
            "pages_in_use": len(self._ids),
            "cache_usage": 0.0,
            "steps": self._steps,
            "host_time_counts": self._host_times,
        }

    def snapshot(self) -> EngineSnapshot:
        return EngineSnapshot(self.log.snapshot(), None)

    def _keep(self, live: np.ndarray) -> None:
        if not live.all():
            self._ids, self._left = self._ids[live], self._left[live]

    def _detail(self, request_id: int, token: int, reason) -> EngineOutput:
        output = EngineOutput(request_id=request_id, token_ids=[token], finish_reason=reason, queue_seconds=0.0)
        if request_id not in self._timed:
            return output
        now = time.monotonic()
        events = ["queue", now, "prefill", now, *("chunk", now, now, 512) * 2, "decode", now]
        timing = RequestTiming("decode", now, events, first_token_at=now, ended_at=now if reason else None)
        return msgspec.structs.replace(output, timing=timing)


def make(start, host):
    """The factory that the server is given."""
    options = start.factory_options
    engine = EmptyEngine(step_times(Path(start.model_dir)), options["rate"], options["max_num_seqs"])
    rules = RequestRules(vocab_size=VOCAB, max_model_len=MAX_MODEL_LEN)
    return engine, EngineInfo(rules, max_num_seqs=options["max_num_seqs"], num_pages=1)


# The clients.


class Clients:
    """All streams, and what came of them."""

    def __init__(self, settings: dict):
        self.settings = settings
        self.times = step_times(Path(settings["directory"]))
        self.begun = self.done = self.tokens = 0
        self.failures: list[str] = []
        self.measures = False
        self.latencies: list[float] = []
        self.all_begun, self.all_done = asyncio.Event(), asyncio.Event()

    def note_begun(self) -> None:
        self.begun += 1
        if self.begun == self.settings["streams"]:
            self.all_begun.set()

    def note_done(self, problem: str | None) -> None:
        self.failures += [problem] if problem else []
        self.done += 1
        if self.done == self.settings["streams"]:
            self.all_begun.set()
            self.all_done.set()


class Stream(asyncio.Protocol):
    """One request and its events; the numbers of its tokens must follow each other without a gap."""

    def __init__(self, clients: Clients, request: bytes):
        self._clients, self._request = clients, request
        self._rest = b""
        self._count = 0
        self._next: int | None = None
        self._is_done = False

    def connection_made(self, transport) -> None:
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        data = self._rest + data
        end = data.rfind(b"\n\n") + 2
        if end < 2:
            self._rest = data
            return
        self._rest = data[end:]
        for found in _TOKENS.findall(data, 0, end):
            for start in range(0, len(found), 5):
                self._take(int(found[start : start + 4]), now)
        if data.endswith(b"0\r\n\r\n") or b"[DONE]" in data[:end]:
            self._finish()

    def _take(self, number: int, now: float) -> None:
        clients = self._clients
        if self._next is None:
            clients.note_begun()
        elif number != self._next:
            self._end(f"token {number} came where {self._next} was due")
        self._next = (number + 1) % STEPS
        self._count += 1
        if clients.measures:
            clients.tokens += 1
            clients.latencies.append(now - clients.times[number])

    def _finish(self) -> None:
        wanted = self._clients.settings["max_tokens"]
        self._end(None if self._count == wanted else f"{self._count} tokens, expected {wanted}: {self._rest[-300:]!r}")

    def _end(self, problem: str | None) -> None:
        if not self._is_done:
            self._is_done = True
            self._clients.note_done(problem)
            self._transport.close()

    def connection_lost(self, error) -> None:
        self._end(f"the connection was lost after {self._count} tokens: {self._rest[-300:]!r}")


def request_of(settings: dict) -> bytes:
    """Returns the bytes that each client sends."""
    body = {"max_tokens": settings["max_tokens"], "stream": True, "ignore_eos": True}
    data = json.dumps({"messages": [{"role": "user", "content": "x"}]} | body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


async def _run_clients(settings: dict) -> int:
    """Connects all clients, measures for a while, and waits for all streams to end."""
    clients, request = Clients(settings), request_of(settings)
    loop = asyncio.get_running_loop()
    for i in range(settings["streams"]):
        await loop.create_connection(lambda: Stream(clients, request), "127.0.0.1", settings["port"])
        while i - clients.begun - len(clients.failures) > _OPENING:
            await asyncio.sleep(_RAMP_STEP_S / 5)
    await clients.all_begun.wait()
    await asyncio.sleep(1.0)  # the last heads and first tokens are behind us
    print("begin", flush=True)
    clients.measures = True
    await asyncio.sleep(settings["seconds"])
    clients.measures = False
    print("end", flush=True)
    await clients.all_done.wait()
    latency = np.percentile(clients.latencies or [np.nan], [50, 99]) * 1e3
    result = {"tokens": clients.tokens, "latency_ms": latency.tolist(), "failed": len(clients.failures)}
    print(json.dumps(result | {"failures": clients.failures[:3]}), flush=True)
    return 0


if __name__ == "__main__":
    run(main)
