"""Replaces the instances behind a router one by one under streaming clients, and says how long they have waited.

  python -m benchmarks.upgrade                 two instances of the bundled model, 32 clients
  python -m benchmarks.upgrade --instances 3 --grace 0     answers that still run go on at another instance at once

Each round starts an instance of the next version, waits until it has registered, and sends SIGTERM to an old one, which
has `--grace` seconds to finish its answers. A line per round: seconds until the old process had ended, for how long
streams were silent after the signal, how many went on at another instance, and how many texts are lost or differ from
those of an undisturbed run.
"""

import argparse
import asyncio
import contextlib
import functools
import re
import signal
import statistics
import sys
import time

import httpx

from benchmarks import survival
from benchmarks.instances import Instance, free_port, running, serving
from benchmarks.record import Cell, Report, run

_RESUMED = re.compile(r"^dsv3:router_resumed_total (\S+)$", re.MULTILINE)
_UP = re.compile(r'^dsv3:router_instance_up\{instance="(.*)"\} 1.0$', re.MULTILINE)
_POLL_S = 0.1


async def resumed(http: httpx.AsyncClient) -> float:
    """Returns how many requests the router has sent again."""
    return sum(map(float, _RESUMED.findall((await http.get("/metrics")).text)))


async def wait_registered(http: httpx.AsyncClient, instance: Instance) -> None:
    """Waits until the router sends requests to an instance."""
    async with asyncio.timeout(60):
        while instance.url not in _UP.findall((await http.get("/metrics")).text):
            await asyncio.sleep(_POLL_S)


async def replaced(http: httpx.AsyncClient, old: Instance, texts: list[str], after_s: float, name: str) -> list[Cell]:
    """Drains an instance while streams run; returns the line of that."""
    before = await resumed(http)
    streams = asyncio.gather(*(survival.stream(http, body) for body in survival.bodies()), return_exceptions=True)
    await asyncio.sleep(after_s)
    at = time.monotonic()
    old.process.send_signal(signal.SIGTERM)
    await asyncio.to_thread(old.process.wait, 120)
    ended_s, found = time.monotonic() - at, await streams
    whole = [each for each in found if not isinstance(each, BaseException)]
    pauses = [each for _, times in whole if (each := survival.pause(times, at)) is not None] or [0.0]
    same = sum(not isinstance(each, BaseException) and each[0] == text for each, text in zip(found, texts, strict=True))
    went_on = int(await resumed(http) - before)
    return [name, after_s, ended_s, len(pauses), statistics.median(pauses), max(pauses), went_on, len(found) - same]


async def measure(url: str, instances: int, grace: float, stack: contextlib.ExitStack) -> list[list[Cell]]:
    """Starts instances, and replaces each; returns a line per instance."""

    def start(version: int) -> Instance:
        given = [f"--register={url}", f"--served_version=v{version}", f"--shutdown_timeout={grace}"]
        return stack.enter_context(serving(f"--max_num_seqs={survival.CLIENTS}", *given))

    limits, lines = httpx.Limits(max_connections=None), []
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
        old = [await asyncio.to_thread(start, 1) for _ in range(instances)]
        for each in old:
            await wait_registered(http, each)
        began = time.monotonic()
        texts = [text for text, _ in await asyncio.gather(*(survival.stream(http, b) for b in survival.bodies()))]
        seconds = time.monotonic() - began
        for i, each in enumerate(old, 1):
            await wait_registered(http, await asyncio.to_thread(start, 2))
            lines.append(await replaced(http, each, texts, seconds / 4, f"instance {i} is replaced"))
    return lines


def main(report: Report) -> None:
    """Starts a router and instances, and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--grace", type=float, default=30.0, help="seconds for answers that still run")
    given = parser.parse_args()
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "launch.router", "--registration", f"--port={port}", "--health_interval=0.1"]
    listens = functools.partial(_listens, url)
    with running(command, listens), contextlib.ExitStack() as stack:
        lines = asyncio.run(measure(url, given.instances, given.grace, stack))
    columns = ["event", "after (s)", "old process ended after (s)", "streams that ran", "median pause (s)",
               "longest (s)", "sent again", f"texts lost or different, of {survival.CLIENTS}"]  # fmt: skip
    report.table(f"{survival.CLIENTS} streams, {given.instances} instances", columns, lines)


def _listens(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/health", timeout=5).status_code in (200, 503)
    return False


if __name__ == "__main__":
    run(main)
