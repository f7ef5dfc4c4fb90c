"""Ends the engine of a server with kill -9 under streaming clients, and says how long they have waited.

  python -m benchmarks.survival                  the bundled model, 32 clients, three kills
  python -m benchmarks.survival --kills 10
  python -m benchmarks.survival --processes 2    over several processes; the leader's engine and a follower in turn

Prints for each kill: seconds until the next engine was ready, the processor seconds that its process (the leader's)
had taken since the kill, for how long streams told nothing, and how many texts differ from those of an undisturbed run.
Every other stream is sampled, with a seed. Compiled programs come from the cache that the start has filled. What a
pause is worth is told by how long the same machine takes to start the server.
"""

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil

from benchmarks.disaggregation import LIMITS, ROOT, Instance, free_port, key_file, serving

CLIENTS = 32
TOKENS = 320
_HEALTH_S = 0.02


def bodies() -> list[dict[str, object]]:
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


async def stream(http: httpx.AsyncClient, body: dict[str, object]) -> tuple[str, list[float]]:
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
    return min((c for c in children if "dsv3.api.engine.process" in c.cmdline()), key=lambda c: c.create_time())


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
    return {c.pid: processor_s(c) for c in children if "dsv3.api.engine.process" in c.cmdline()}


async def restarted(
    http: httpx.AsyncClient, instance: Instance, victim: psutil.Process, after_s: float
) -> tuple[float, float, float]:
    """Kills a process; returns when that was, and the seconds and processor seconds until the next engine was ready."""
    await asyncio.sleep(after_s)
    before = engines(instance)
    victim.kill()
    killed_at = time.monotonic()
    for status in (503, 200):
        while (await http.get("/health")).status_code != status:
            await asyncio.sleep(_HEALTH_S)
    engine = engine_of(instance)
    return killed_at, time.monotonic() - killed_at, processor_s(engine) - before.get(engine.pid, 0.0)


async def measure(instance: Instance, kills: int, victims: list[Callable[[], psutil.Process]]) -> None:
    """Prints a line per kill; the victims take turns."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=instance.url, timeout=600, limits=limits) as http:
        began = time.monotonic()
        undisturbed = [text for text, _ in await asyncio.gather(*(stream(http, body) for body in bodies()))]
        seconds = time.monotonic() - began
        print(f"an undisturbed run takes {seconds:.1f} s")
        print(
            "| kill after | next engine ready after | processor seconds | streams that paused, median, longest | "
            "texts that differ |"
        )
        print("|---|---|---|---|---|", flush=True)
        for i in range(kills):
            after_s = seconds * (i + 1) / (kills + 1)
            killing = asyncio.create_task(restarted(http, instance, victims[i % len(victims)](), after_s))
            found = await asyncio.gather(*(stream(http, body) for body in bodies()))
            killed_at, ready_s, used_s = await killing
            pauses = [each for _, times in found if (each := pause(times, killed_at)) is not None] or [0.0]
            differ = sum(text != other for (text, _), other in zip(found, undisturbed, strict=True))
            print(
                f"| {after_s:.1f} s | {ready_s:.1f} s | {used_s:.1f} | {len(pauses)}, "
                f"{statistics.median(pauses):.1f} s, {max(pauses):.1f} s | {differ} of {CLIENTS} |",
                flush=True,
            )


@contextlib.contextmanager
def place(processes: int, folder: Path) -> Iterator[tuple[list[str], list[subprocess.Popen[bytes]]]]:
    """Starts the followers of an instance; gives the leader's flags, and the followers' supervisors."""
    if processes == 1:
        yield ["--kv_offloading_size=0.05"], []
        return
    flags = ["--enable_expert_parallel", f"--cluster_key_file={key_file(folder)}"]
    flags += [f"--coordinator=127.0.0.1:{free_port()}", f"--num_processes={processes}"]
    command = [sys.executable, "-m", "launch.serve", *LIMITS, f"--max_num_seqs={CLIENTS // processes}", *flags]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    with contextlib.ExitStack() as stack:
        supervisors = []
        for i in range(1, processes):
            with (folder / f"follower{i}.log").open("w") as log:
                supervisors.append(
                    subprocess.Popen([*command, f"--process_id={i}"], cwd=ROOT, stdout=log, stderr=log, env=environment)
                )
            stack.callback(supervisors[-1].wait)
            stack.callback(supervisors[-1].kill)
        yield [*flags, "--process_id=0"], supervisors


def main() -> None:
    """Starts a server and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    began = time.monotonic()
    seqs = f"--max_num_seqs={CLIENTS // given.processes}"
    with (
        tempfile.TemporaryDirectory() as folder,
        place(given.processes, Path(folder)) as (flags, supervisors),
        serving(seqs, *flags) as instance,
    ):
        print(f"the server's start takes {time.monotonic() - began:.1f} s")
        victims = [functools.partial(engine_of, instance), *(functools.partial(follower_of, s) for s in supervisors)]
        asyncio.run(measure(instance, given.kills, victims))


if __name__ == "__main__":
    main()
