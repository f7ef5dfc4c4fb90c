"""Measures the front: the real server over an engine without a model, with many streams at once.

  python -m benchmarks.front                                  a table of some sizes
  python -m benchmarks.front --streams 10000 --rate 1         one size
  python -m benchmarks.front --streams 1000 --rate 10 --fronts 2

Every stream gets `rate` tokens per second. The clients are a process of their own on the same machine. Each stream's
text is checked to the last token. Processor time is that of all fronts together, per token that came to a client.
"Added latency" is from the step that made a token to its arrival at the client. Memory is the growth of all fronts.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
from absl import flags as absl_flags

from benchmarks.front_engine import write_model
from benchmarks.http_servers import OTHERS, OWN
from launch import flags

_STREAMS = absl_flags.DEFINE_integer("streams", None, "Run one size alone: this many streams.", 1)
_RATE = absl_flags.DEFINE_float("rate", 10.0, "Send every stream this many tokens per second.", 0.01)
_FRONTS = absl_flags.DEFINE_integer("fronts", 1, "Answer with this many HTTP processes.", 1)
_SECONDS = absl_flags.DEFINE_float("seconds", 10.0, "Measure for this many seconds.", 1.0)
_HTTP = absl_flags.DEFINE_enum("http", OWN, [OWN, *OTHERS], "Answer with this server (`benchmarks.http_servers`).")
_KIND = absl_flags.DEFINE_enum("kind", "chat", ["chat", "completions"], "Ask for this kind of answer.")

_TABLE = ((128, 20.0), (1000, 5.0), (1000, 10.0), (10_000, 1.0))
_START_S = 4.0  # the longest that the first stream waits for the last to begin, besides the ramp
_COLUMNS = "| streams | fronts | tokens/s | tokens per event | us per token | p50 | p99 | KiB per stream | failed |"


def main() -> int:
    """Prints the table; exit status 0 means that no token was lost."""
    sizes = [(_STREAMS.value, _RATE.value)] if _STREAMS.value else _TABLE
    print(_COLUMNS + "\n" + "|---" * 9 + "|", flush=True)
    return int(any([_measure(streams, rate) for streams, rate in sizes]))


def _measure(streams: int, rate: float) -> int:
    """Prints one line of the table; returns the number of streams that failed."""
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory))
        settings = {
            "model_dir": directory,
            "streams": streams,
            "rate": rate,
            "fronts": _FRONTS.value,
            "kind": _KIND.value,
            "http": _HTTP.value,
            "seconds": _SECONDS.value,
            "max_tokens": int((_SECONDS.value + streams / 150 + _START_S) * rate) + 1,
        }
        server = _start("benchmarks.front_server", settings)
        try:
            settings["port"] = int(_line(server).split()[1])
            assert _line(server) == "ready", "the server does not start"
            return _run(server, settings)
        finally:
            server.terminate()
            server.wait(60)


def _run(server: subprocess.Popen[str], settings: dict) -> int:
    fronts = _fronts(server)
    empty = _memory(fronts)
    client = _start("benchmarks.front_client", settings)
    try:
        assert _line(client) == "begin", "the streams do not begin"
        before, full = _processor_s(fronts), _memory(fronts)
        assert _line(client) == "end"
        used = _processor_s(fronts) - before
        found = json.loads(_line(client))
    finally:
        client.kill()
    tokens = found["tokens"]
    print(
        f"| {settings['streams']:,} | {len(fronts)} | {tokens / settings['seconds']:,.0f} "
        f"| {tokens / max(1, found['events']):.2f} | {used / max(1, tokens) * 1e6:.1f} "
        f"| {found['p50_s'] * 1e3:.1f} ms | {found['p99_s'] * 1e3:.1f} ms "
        f"| {(full - empty) / settings['streams'] / 1024:.1f} | {found['failed']} {' '.join(found['failures'])} |",
        flush=True,
    )
    return found["failed"]


def _fronts(server: subprocess.Popen[str]) -> list[psutil.Process]:
    first = psutil.Process(server.pid)
    return [first, *(child for child in first.children() if "dsv3.server.http.api_server_child" in child.cmdline())]


def _processor_s(processes: list[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def _memory(processes: list[psutil.Process]) -> int:
    return sum(process.memory_info().rss for process in processes)


def _start(module: str, settings: dict) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", module, json.dumps(settings)], stdout=subprocess.PIPE, text=True)


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


if __name__ == "__main__":
    flags.run(main)
