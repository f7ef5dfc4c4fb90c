"""Compares the latency that honest clients see of this tree's server and another tree's, in turns, without attacks.

  python -m benchmarks.honest --tree OTHER
  python -m benchmarks.honest --tree OTHER --packages DIR     with packages that only OTHER needs

Both servers run the whole time, over their tests' engine: a step takes 1 ms. In each round one of them, then the other
answers streamed chats of 16 tokens, of one client and of 16 clients at a time. A line per round gives medians of the
time to the first token and to the end. Exit status 0 means that this tree's median over all rounds is at most 5 % above
the other's.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import uvloop

from benchmarks.bodies import ROOT
from dsv3.http_client import Address, Client
from tests.dsv3.text import tiny
from tools.bench.stream import complete

_MESSAGES = [{"role": role, "content": "Hello there, you."} for role in ("system", "user", "assistant", "user")]
_BODY = json.dumps({"model": "tiny", "messages": _MESSAGES, "max_tokens": 16, "stream": True, "ignore_eos": True})
_CLIENTS, _REQUESTS = (1, 16), 50  # requests of each client
_BOUND = 1.05

Latency = tuple[float, float]
"""Medians in milliseconds: to the first token, to the end."""


@contextlib.contextmanager
def _serving(tree: Path, packages: str, model_dir: str) -> Iterator[int]:
    """Yields the port of a server made of the code of `tree`, with everything at its default."""
    settings = {"model_dir": model_dir, "model_names": ["tiny"], "engine_factory": "tests.dsv3.server.fake_engine:make"}
    path = os.pathsep.join(filter(None, (str(tree), packages)))
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.dsv3.server.served", json.dumps(settings)],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline().split()[1])
        while process.stdout.readline() not in ("ready\n", ""):
            pass
        yield port
    finally:
        process.terminate()
        process.wait(60)


async def _ask(port: int, clients: int) -> Latency:
    """Returns the medians of some requests, each client's one after the other."""
    client = Client(Address.parse(f"http://127.0.0.1:{port}"))
    records = []

    async def repeat() -> None:
        for i in range(_REQUESTS):
            path, due = "/v1/chat/completions", time.monotonic()
            record = await complete(client, path, _BODY.encode(), index=i, scheduled_s=due, timeout_s=60.0)
            assert record.error is None, record
            records.append(record)

    await asyncio.gather(*(repeat() for _ in range(clients)))
    await client.close()
    first = statistics.median(record.ttft_s for record in records)
    return 1e3 * first, 1e3 * statistics.median(record.e2e_s for record in records)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, required=True)
    parser.add_argument("--packages", default="")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    found: dict[int, list[tuple[Latency, Latency]]] = {clients: [] for clients in _CLIENTS}
    print("| clients | first token, other | this | end, other | this |\n" + "|---" * 5 + "|")
    with contextlib.ExitStack() as stack:
        model_dir = str(tiny.write(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model"))
        other = stack.enter_context(_serving(arguments.tree.resolve(), arguments.packages, model_dir))
        this = stack.enter_context(_serving(ROOT, "", model_dir))
        for number in range(arguments.rounds + 1):
            for clients in _CLIENTS:
                order = (other, this) if number % 2 else (this, other)  # who is first alternates
                by_port = {port: uvloop.run(_ask(port, clients)) for port in order}
                if number:  # the round before warms up
                    found[clients].append((by_port[other], by_port[this]))
                    before, after = found[clients][-1]
                    cells = (f"{before[0]:.2f}", f"{after[0]:.2f}", f"{before[1]:.2f}", f"{after[1]:.2f} ms")
                    print(f"| {clients} | {' | '.join(cells)} |", flush=True)
    return 0 if all([_told(clients, pairs) for clients, pairs in found.items()]) else 1


def _told(clients: int, pairs: list[tuple[Latency, Latency]]) -> bool:
    """Prints the medians over all rounds; returns whether this tree's keep the bound."""
    kept = True
    for i, what in enumerate(("first token", "end")):
        other, this = (statistics.median(pair[side][i] for pair in pairs) for side in (0, 1))
        ratios = sorted(after[i] / before[i] for before, after in pairs)
        rounds = f"single rounds {ratios[0]:.2f} to {ratios[-1]:.2f}"
        print(f"{clients} clients, {what}: {other:.2f} and {this:.2f} ms, {this / other:.2f} times ({rounds})")
        kept &= this / other <= _BOUND
    return kept


if __name__ == "__main__":
    sys.exit(main())
