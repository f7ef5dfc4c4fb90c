"""Ends the engine of a server with kill -9 under streaming clients, and says how long they have waited.

  python -m benchmarks.survival                  the bundled model, 32 clients, three kills
  python -m benchmarks.survival --kills 10

Prints for each kill: seconds until the next engine was ready, for how long streams told nothing, and how many texts
differ from those of an undisturbed run. Every other stream is sampled, with a seed. Compiled programs come from the
cache that the start has filled. What a pause is worth is told by how long the same machine takes to start the server.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import time

import httpx
import psutil

from benchmarks.disaggregation import Instance, serving

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
    return next(child for child in children if "dsv3.api.engine.process" in child.cmdline())


async def restarted(http: httpx.AsyncClient, instance: Instance, after_s: float) -> tuple[float, float]:
    """Kills the engine; returns when that was, and the seconds until the next one was ready."""
    await asyncio.sleep(after_s)
    engine_of(instance).kill()
    killed_at = time.monotonic()
    for status in (503, 200):
        while (await http.get("/health")).status_code != status:
            await asyncio.sleep(_HEALTH_S)
    return killed_at, time.monotonic() - killed_at


async def measure(instance: Instance, kills: int) -> None:
    """Prints a line per kill."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=instance.url, timeout=600, limits=limits) as http:
        began = time.monotonic()
        undisturbed = [text for text, _ in await asyncio.gather(*(stream(http, body) for body in bodies()))]
        seconds = time.monotonic() - began
        print(f"an undisturbed run takes {seconds:.1f} s")
        print("| kill after | next engine ready after | streams that paused, median, longest | texts that differ |")
        print("|---|---|---|---|", flush=True)
        for i in range(kills):
            after_s = seconds * (i + 1) / (kills + 1)
            killing = asyncio.create_task(restarted(http, instance, after_s))
            found = await asyncio.gather(*(stream(http, body) for body in bodies()))
            killed_at, ready_s = await killing
            pauses = [each for _, times in found if (each := pause(times, killed_at)) is not None]
            differ = sum(text != other for (text, _), other in zip(found, undisturbed, strict=True))
            print(
                f"| {after_s:.1f} s | {ready_s:.1f} s | {len(pauses)}, {statistics.median(pauses):.1f} s, "
                f"{max(pauses):.1f} s | {differ} of {CLIENTS} |",
                flush=True,
            )


def main() -> None:
    """Starts a server and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=3)
    given = parser.parse_args()
    began = time.monotonic()
    with serving(f"--max_num_seqs={CLIENTS}", "--kv_offloading_size=0.05") as instance:
        print(f"the server's start takes {time.monotonic() - began:.1f} s")
        asyncio.run(measure(instance, given.kills))


if __name__ == "__main__":
    main()
