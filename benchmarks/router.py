"""Loads instances of the bundled model through the router, and ends one of them with kill -9 in the middle.

  python -m benchmarks.router            two instances
  python -m benchmarks.router --split    one instance that computes prompts and two that answer

Prints how many requests of the load were answered and how many failed, how many were at the instance when
it died, and how often requests went on elsewhere. It is the first instance that dies, or the first that answers.
"""

import argparse
import asyncio
import contextlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from benchmarks.disaggregation import ROOT, flags, key_file, serving
from tools.bench import load

START_S = 60.0


@contextlib.contextmanager
def routing(*arguments: str) -> Iterator[str]:
    """Starts a router and yields its address."""
    command = [sys.executable, "-m", "launch.router", "--port=0", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split()[-1]
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        process.kill()
        process.stdout.close()


def samples(router: str, name: str) -> dict[str, float]:
    """Returns a metric of the router by instance; "" where it has none."""
    text = httpx.get(f"{router}/metrics").text
    pattern = f"^{name}" + r'(?:\{instance="(.*)"\})? (\S+)$'
    return {url or "": float(value) for url, value in re.findall(pattern, text, re.MULTILINE)}


def wait_for(router: str, name: str, url: str, least: float) -> float:
    """Waits until an instance's metric is `least` at least, and returns it."""
    deadline = time.monotonic() + START_S
    while (found := samples(router, name).get(url, 0.0)) < least:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{name} of {url} is {found:g} and not {least:g}")
        time.sleep(0.02)
    return found


def main() -> None:
    """Starts everything, loads it, ends an instance and prints the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", action="store_true")
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--clients", type=int, default=24)
    given = parser.parse_args()
    with contextlib.ExitStack() as stack:
        key = key_file(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        roles = ["prefill", "decode", "decode"] if given.split else ["alone", "alone"]
        instances = [stack.enter_context(serving(*flags(role, key))) for role in roles]
        answering = [each.url for each in instances[given.split :]]
        where = [f"--decode={','.join(answering)}", f"--prefill={instances[0].url}"]
        router = stack.enter_context(routing(*(where if given.split else [f"--instances={','.join(answering)}"])))
        for each in instances:
            wait_for(router, "dsv3:router_instance_up", each.url, 1)
        loading = load.run(router, input_len=64, output_len=384, concurrency=given.clients, num_prompts=given.requests)
        done = stack.enter_context(ThreadPoolExecutor(1)).submit(asyncio.run, loading)
        there = wait_for(router, "dsv3:router_running", answering[0], given.clients // 4)
        instances[given.split].kill()
        print(f"killed -9 with {there:g} requests there")
        requests = done.result()["requests"]
        print(f"requests completed / failed {requests['completed']} / {requests['failed']}")
        for name in ("resumed", "prefilled"):
            print(f"{name}: {samples(router, f'dsv3:router_{name}_total')['']:g}")


if __name__ == "__main__":
    main()
