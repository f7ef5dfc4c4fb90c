"""Ends the engine of a server with kill -9 under streaming clients, and says how long they have waited.

  python -m benchmarks.survival                  the bundled model, 32 clients, three kills
  python -m benchmarks.survival --kills 10
  python -m benchmarks.survival --processes 2    over several processes; the leader's engine and followers in turn
  python -m benchmarks.survival --processes 4 --kills 4 --stop           each of four is stopped, as a host that hangs
  python -m benchmarks.survival --processes 2 --kills 0 --away           a host goes for good, and later comes back
  python -m benchmarks.survival --processes 2 --kills 2 --split          a decode instance; another one has the prompts
  python -m benchmarks.survival --processes 2 --kills 4 --moving         experts move every few steps

Prints for each kill: seconds until the next engine was ready, the processor seconds that its process (the leader's)
had taken since the kill, for how long streams told nothing, and how many texts differ from those of an undisturbed run.
Below that stands what the next engine says of its start, phase by phase. Every other stream is sampled, with a seed.
Compiled programs come from the cache that the start has filled. What a pause is worth is told by how long the same
machine takes to start the server.

With --away the last process goes. The others go on without it after `--cluster_return_timeout` (15 s here). Then it
comes back, and the gang grows after `--cluster_grow_interval` (5 s). All of it happens twice: the first time the others
have no programs for one process fewer yet.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import httpx
import psutil

from benchmarks.disaggregation import LIMITS, ROOT, Instance, flags, free_port, key_file, serving

CLIENTS = 32
TOKENS = 320
_HEALTH_S = 0.02
_MOVING = ["--num_redundant_experts=4", "--enable_eplb", "--eplb_interval=1", "--eplb_threshold=1"]
_AWAY = ["--cluster_return_timeout=15", "--cluster_grow_interval=5"]


class Said:
    """What a server has written since it was ready."""

    def __init__(self, instance: Instance) -> None:
        self.lines: list[str] = []
        threading.Thread(target=self._read, args=(instance,), daemon=True).start()

    def last(self, pattern: str) -> str:
        """Returns the last match of a pattern, "" if there is none."""
        return next((found[0] for line in reversed(self.lines) if (found := re.search(pattern, line))), "")

    def _read(self, instance: Instance) -> None:
        assert instance.process.stdout is not None
        for line in instance.process.stdout:
            self.lines.append(line.rstrip())


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
        return follower_of(self.supervisors[i])

    def end(self) -> None:
        """Kills all of them."""
        for process in self.supervisors:
            process.kill()
            process.wait()


Body = dict[str, object]


def bodies() -> list[Body]:
    """Returns the requests: half of them greedy, half sampled."""
    return [
        {
            "prompt": f"def function_{i}(values):\n    ",
            "max_tokens": TOKENS,
            "temperature": i % 2,
            "seed": i,
            "ignore_eos": True,
            "stream": True,
        }
        for i in range(CLIENTS)
    ]


async def computed(prefill: Instance, asked: list[Body]) -> list[Body]:
    """Returns the requests with longer prompts, which the prefill instance has computed, and where their pages are."""
    found = []
    async with httpx.AsyncClient(base_url=prefill.url, timeout=60) as http:
        for i, body in enumerate(asked):
            body = body | {"prompt": [(7 * i + 3 * j) % 900 + 20 for j in range(100 + i)]}
            first = {"max_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
            answer = await http.post("/v1/completions", json=body | first)
            answer.raise_for_status()
            found.append(body | {"kv_transfer_params": answer.json()["kv_transfer_params"]})
    return found


async def told(http: httpx.AsyncClient) -> str:
    """Says what this engine has fetched and moved since it began, if anything."""
    lines = (await http.get("/metrics")).text.splitlines()

    def total(name: str, label: str = "") -> float:
        return sum(float(each.split()[-1]) for each in lines if each.startswith(name) and label in each)

    tokens, moves = total("dsv3:kv_tier_hits_total", 'tier="peer"'), total("dsv3:expert_rebalances_total")
    text = f"; {tokens:.0f} tokens of prompts came with pages" if tokens else ""
    return text + (f"; experts moved in {moves:.0f} of {total('dsv3:engine_steps_total'):.0f} steps" if moves else "")


async def stream(http: httpx.AsyncClient, body: Body) -> tuple[str, list[float]]:
    """Returns the text of an answer, and when each of its events came."""
    text, times = "", []
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "choices" not in event:
                raise RuntimeError(line)
            text += event["choices"][0]["text"]
            times.append(time.monotonic())
    return text, times


def pause(times: list[float], killed_at: float) -> float | None:
    """Returns the longest time without an event since the engine died; None for a stream that had ended."""
    after = [killed_at, *(each for each in times if each > killed_at)]
    return max((b - a for a, b in itertools.pairwise(after)), default=None)


def engine_of(instance: Instance) -> psutil.Process:
    """Returns the process of the engine that the server has now."""
    children = psutil.Process(instance.process.pid).children()
    return min((c for c in children if "dsv3.server.engine.process" in c.cmdline()), key=lambda c: c.create_time())


def follower_of(supervisor: subprocess.Popen[bytes]) -> psutil.Process:
    """Returns the process that follows; a younger one waits to take its place."""
    return min(psutil.Process(supervisor.pid).children(), key=lambda child: child.create_time())


def processor_s(process: psutil.Process) -> float:
    """Returns the processor seconds that a process has taken."""
    times = process.cpu_times()
    return times.user + times.system


def engines(instance: Instance) -> dict[int, float]:
    """Returns the processor seconds of the engine's process, and of one that waits to take its place."""
    children = psutil.Process(instance.process.pid).children()
    return {c.pid: processor_s(c) for c in children if "dsv3.server.engine.process" in c.cmdline()}


async def restarted(
    http: httpx.AsyncClient, instance: Instance, strike: Callable[[], None], after_s: float
) -> tuple[float, float, float]:
    """Strikes; returns when that was, and the seconds and processor seconds until the next engine was ready."""
    await asyncio.sleep(after_s)
    before = engines(instance)
    strike()
    struck_at = time.monotonic()
    for status in (503, 200):
        while (await http.get("/health")).status_code != status:
            await asyncio.sleep(_HEALTH_S)
    engine = engine_of(instance)
    return struck_at, time.monotonic() - struck_at, processor_s(engine) - before.get(engine.pid, 0.0)


@dataclasses.dataclass
class Run:
    """A server under the same streams again and again, and what they tell when nothing happens."""

    http: httpx.AsyncClient
    instance: Instance
    said: Said
    ask: Callable[[], Awaitable[list[Body]]]
    undisturbed: list[str]
    seconds: float

    async def strike(self, what: str, strike: Callable[[], None], after_s: float) -> None:
        """Prints the line of a strike while streams run."""
        asked = await self.ask()
        striking = asyncio.create_task(restarted(self.http, self.instance, strike, after_s))
        found = await asyncio.gather(*(stream(self.http, body) for body in asked))
        struck_at, ready_s, used_s = await striking
        pauses = [each for _, times in found if (each := pause(times, struck_at)) is not None] or [0.0]
        differ = sum(text != other for (text, _), other in zip(found, self.undisturbed, strict=True))
        print(
            f"| {what} after {after_s:.1f} s | {ready_s:.1f} s | {used_s:.1f} | {len(pauses)}, "
            f"{statistics.median(pauses):.1f} s, {max(pauses):.1f} s | {differ} of {CLIENTS} |",
            flush=True,
        )
        if phases := self.said.last(r"\d+ processes are ready after .*"):
            print(f"  {phases}{await told(self.http)}", flush=True)


async def measure(
    instance: Instance, kills: int, number: int, place: Place, away: bool, prefill: Instance | None
) -> None:
    """Prints a line per kill; the victims take turns, and get the signal `number`."""

    async def ask() -> list[Body]:
        return bodies() if prefill is None else await computed(prefill, bodies())

    victims = [functools.partial(engine_of, instance)]
    victims += [functools.partial(place.victim, i) for i in range(len(place.supervisors))]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=instance.url, timeout=600, limits=limits) as http:
        said, asked = Said(instance), await ask()
        began = time.monotonic()
        undisturbed = [text for text, _ in await asyncio.gather(*(stream(http, body) for body in asked))]
        run = Run(http, instance, said, ask, undisturbed, time.monotonic() - began)
        print(f"an undisturbed run takes {run.seconds:.1f} s{await told(http)}")
        print(
            "| what | next engine ready after | processor seconds | streams that paused, median, longest | "
            "texts that differ |"
        )
        print("|---|---|---|---|---|", flush=True)
        for i in range(kills):
            who = i % len(victims)
            strike = functools.partial(_signal, victims[who], number)
            await run.strike(f"process {who}", strike, run.seconds * (i + 1) / (kills + 1))
        for last in [len(place.supervisors) - 1] * (2 if away else 0):
            await run.strike(f"process {last + 1} for good", place.supervisors[last].kill, run.seconds / 4)
            await run.strike(f"process {last + 1} back", functools.partial(place.start, last), run.seconds / 4)


def _signal(find: Callable[[], psutil.Process], number: int) -> None:
    find().send_signal(number)


@contextlib.contextmanager
def placed(processes: int, folder: Path, away: bool, more: list[str]) -> Iterator[Place]:
    """Starts the followers of an instance with flags `more`."""
    if processes == 1:
        yield Place(more or ["--kv_offloading_size=0.05"], [], folder)
        return
    given = ["--enable_expert_parallel", f"--cluster_key_file={key_file(folder)}", *(_AWAY if away else []), *more]
    given += [f"--coordinator=127.0.0.1:{free_port()}", f"--num_processes={processes}"]
    command = [sys.executable, "-m", "launch.serve", *LIMITS, f"--max_num_seqs={CLIENTS // processes}", *given]
    place = Place([*given, "--process_id=0"], [[*command, f"--process_id={i}"] for i in range(1, processes)], folder)
    try:
        for i in range(processes - 1):
            place.start(i)
        yield place
    finally:
        place.end()


def main() -> None:
    """Starts a server and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--stop", action="store_true", help="SIGSTOP in place of SIGKILL")
    parser.add_argument("--split", action="store_true", help="strike a decode instance, beside a prefill instance")
    parser.add_argument("--away", action="store_true", help="have a host go for good, and come back")
    parser.add_argument("--moving", action="store_true", help="move experts all the time")
    given = parser.parse_args()
    if given.moving and given.processes < 2:
        parser.error("--moving needs --processes 2 or more")
    if given.away and given.processes < 2:
        parser.error("--away needs --processes 2 or more")
    began = time.monotonic()
    seqs = f"--max_num_seqs={CLIENTS // given.processes}"
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.ExitStack() as stack,
    ):
        prefill, more = None, _MOVING if given.moving else []
        if given.split:
            key = key_file(Path(folder))
            prefill, more = stack.enter_context(serving(*flags("prefill", key))), more + flags("decode", key)
        place = stack.enter_context(placed(given.processes, Path(folder), given.away, more))
        instance = stack.enter_context(serving(seqs, *place.flags))
        print(f"the server's start takes {time.monotonic() - began:.1f} s")
        number = signal.SIGSTOP if given.stop else signal.SIGKILL
        asyncio.run(measure(instance, given.kills, number, place, given.away, prefill))


if __name__ == "__main__":
    main()
