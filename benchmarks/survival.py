"""Ends the engine of a server with kill -9 under streaming clients, and says how long they have waited.

  python -m benchmarks.survival                  the bundled model, 32 clients, three kills
  python -m benchmarks.survival --engines 2      two independent engines behind one server, killed in turn
  python -m benchmarks.survival --processes 2    over several processes; the leader's engine and followers in turn
  python -m benchmarks.survival --processes 4 --kills 4 --stop           each of four is stopped, as a host that hangs
  python -m benchmarks.survival --processes 2 --kills 0 --away           a host goes for good, and later comes back

A line per kill: seconds until the next engine was ready, the processor seconds that its process (the leader's) had
taken since the kill, for how long streams were silent, and how many texts differ from those of an undisturbed run.
Every other stream is sampled, with a seed. Compiled programs come from the cache that the start has filled. Compare a
pause with how long the same machine takes to start the server. With --engines the streams of the other engines should
not pause, and those of the killed one go on there, before its next process is ready.

With --away the last process goes. The others go on without it after `--cluster_return_timeout` (15 s here). Then it
comes back, and the instance grows after `--cluster_grow_interval` (5 s). All of it happens twice: the first time the
others have no programs for one process fewer yet.
"""

import asyncio
import contextlib
import dataclasses
import functools
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil

from benchmarks.instances import (
    LIMITS,
    ROOT,
    Instance,
    free_port,
    key_file,
    longest_gap,
    processor_s,
    serving,
    streamed,
)
from benchmarks.record import Cell, Report, arguments, run

PATH = "/v1/completions"
CLIENTS = 32
TOKENS = 320
_HEALTH_S, _PATIENCE_S = 0.02, 600.0
_DOWN = re.compile(r"^dsv3:engine_up\{.*\} 0\.0$", re.MULTILINE)
_AWAY = ["--cluster_return_timeout=15", "--cluster_grow_interval=5"]


@dataclasses.dataclass
class Place:
    """Where the processes of an instance run: the leader's flags, the followers' commands and supervisors."""

    flags: list[str]
    commands: list[list[str]]
    folder: Path
    supervisors: list[subprocess.Popen[bytes]] = dataclasses.field(default_factory=list)

    def start(self, i: int) -> None:
        """Starts follower i + 1, for the first time or anew."""
        with (self.folder / f"follower{i + 1}.log").open("a") as log:
            environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
            process = subprocess.Popen(self.commands[i], cwd=ROOT, stdout=log, stderr=log, env=environment)
        self.supervisors[i : i + 1] = [process]

    def victim(self, i: int) -> psutil.Process:
        """Returns the process that follows on host i + 1."""
        return oldest(psutil.Process(self.supervisors[i].pid).children())

    def end(self) -> None:
        """Kills all of them."""
        for process in self.supervisors:
            process.kill()
            process.wait()


Body = dict[str, object]


def bodies() -> list[Body]:
    """Returns the requests: half of them greedy, half sampled."""
    common: Body = {"max_tokens": TOKENS, "ignore_eos": True}
    return [
        {"prompt": f"def function_{i}(values):\n    ", "temperature": i % 2, "seed": i} | common for i in range(CLIENTS)
    ]


def pause(times: list[float], killed_at: float) -> float | None:
    """Returns the longest time without an event since the engine died; None for a stream that had ended."""
    after = [each for each in times if each > killed_at]
    return longest_gap([killed_at, *after]) if after else None


def engine_processes(instance: Instance) -> list[psutil.Process]:
    """Returns the processes of engines, and those that wait to take their places."""
    children = psutil.Process(instance.process.pid).children()
    return [child for child in children if "dsv3.server.engine.process" in child.cmdline()]


def oldest(processes: list[psutil.Process]) -> psutil.Process:
    """Returns the process that works now; younger ones wait to take its place."""
    return min(processes, key=lambda process: process.create_time())


async def are_up(http: httpx.AsyncClient) -> bool:
    """Returns whether the server answers and all its engines are ready."""
    if (await http.get("/health")).status_code != 200:
        return False
    return not _DOWN.search((await http.get("/metrics")).text)


async def restarted(
    http: httpx.AsyncClient, instance: Instance, strike: Callable[[], None], after_s: float
) -> tuple[float, float, float]:
    """Strikes; returns when that was, and the seconds and processor seconds until the next engine was ready."""
    await asyncio.sleep(after_s)
    before = {child.pid: processor_s(child) for child in engine_processes(instance)}
    strike()
    struck_at = time.monotonic()
    async with asyncio.timeout(_PATIENCE_S):
        for is_up in (False, True):
            while await are_up(http) != is_up:
                await asyncio.sleep(_HEALTH_S)
    seconds, engines = time.monotonic() - struck_at, engine_processes(instance)
    engine = oldest(engines)
    if "dsv3:engine_up" in (await http.get("/metrics")).text:  # without spares: the next process is the youngest
        engine = max(engines, key=lambda child: child.create_time())
    return struck_at, seconds, processor_s(engine) - before.get(engine.pid, 0.0)


async def measure(
    instance: Instance, kills: int, number: int, place: Place, away: bool
) -> tuple[float, list[list[Cell]]]:
    """Returns the seconds of an undisturbed run and a line per kill; victims take turns, and get signal `number`."""
    victims: list[Callable[[], psutil.Process]] = [lambda: oldest(engine_processes(instance))]
    victims += [functools.partial(place.victim, i) for i in range(len(place.supervisors))]
    limits = httpx.Limits(max_connections=None)
    lines: list[list[Cell]] = []
    async with httpx.AsyncClient(base_url=instance.url, timeout=600, limits=limits) as http:
        began = time.monotonic()
        undisturbed = [text for text, _ in await asyncio.gather(*(streamed(http, PATH, body) for body in bodies()))]
        seconds = time.monotonic() - began

        async def strike(what: str, act: Callable[[], None], after_s: float) -> None:
            """Adds the line of a strike while streams run."""
            striking = asyncio.create_task(restarted(http, instance, act, after_s))
            found = await asyncio.gather(*(streamed(http, PATH, body) for body in bodies()))
            struck_at, ready_s, used_s = await striking
            pauses = [each for _, times in found if (each := pause(times, struck_at)) is not None] or [0.0]
            differ = sum(text != other for (text, _), other in zip(found, undisturbed, strict=True))
            longest = max(pauses)
            lines.append([what, after_s, ready_s, used_s, len(pauses), statistics.median(pauses), longest, differ])

        for i in range(kills):
            victim = i % len(victims)
            act = functools.partial(_signal, victims[victim], number)
            await strike(f"process {victim} ends", act, seconds * (i + 1) / (kills + 1))
        for last in [len(place.supervisors) - 1] * (2 if away else 0):
            await strike(f"process {last + 1} goes", place.supervisors[last].kill, seconds / 4)
            await strike("it comes back", functools.partial(place.start, last), seconds / 4)
    return seconds, lines


def _signal(find: Callable[[], psutil.Process], number: int) -> None:
    find().send_signal(number)


@contextlib.contextmanager
def placed(processes: int, folder: Path, away: bool) -> Iterator[Place]:
    """Starts the followers of an instance."""
    if processes == 1:
        yield Place(["--kv_offloading_size=0.05"], [], folder)
        return
    given = ["--enable_expert_parallel", f"--cluster_key_file={key_file(folder)}", *(_AWAY if away else [])]
    given += [f"--coordinator=127.0.0.1:{free_port()}", f"--num_processes={processes}"]
    command = [sys.executable, "-m", "launch.serve", *LIMITS, f"--max_num_seqs={CLIENTS // processes}", *given]
    place = Place([*given, "--process_id=0"], [[*command, f"--process_id={i}"] for i in range(1, processes)], folder)
    try:
        for i in range(processes - 1):
            place.start(i)
        yield place
    finally:
        place.end()


def main(report: Report) -> None:
    """Starts a server and measures."""
    given = arguments(__doc__, kills=3, processes=1, engines=1, stop=False, away=False)
    if (given.away and given.processes < 2) or (given.engines > 1 and given.processes > 1):
        raise SystemExit("--away needs --processes 2 or more, and each of several --engines has one process")
    began, seqs = time.monotonic(), f"--max_num_seqs={CLIENTS // given.processes}"
    independent = ["--data_parallel_backend=mp", f"--data_parallel_size={given.engines}"] if given.engines > 1 else []
    with (
        tempfile.TemporaryDirectory() as folder,
        placed(given.processes, Path(folder), given.away) as place,
        serving(seqs, *place.flags, *independent) as instance,
    ):
        started, number = time.monotonic() - began, signal.SIGSTOP if given.stop else signal.SIGKILL
        seconds, lines = asyncio.run(measure(instance, given.kills, number, place, given.away))
    report.table("Undisturbed", ["the server's start (s)", "a run (s)"], [[started, seconds]])
    columns = ["event", "after (s)", "next engine ready after (s)", "processor (s)", "streams that paused",
               "median pause (s)", "longest (s)", f"texts that differ, of {CLIENTS}"]  # fmt: skip
    report.table(f"{CLIENTS} streams over {given.processes * given.engines} processes", columns, lines)


if __name__ == "__main__":
    run(main)
