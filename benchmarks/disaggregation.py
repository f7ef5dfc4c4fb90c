"""Serves the bundled model with prefill and decode instances behind a minimal router, and kills some of them.

  python -m benchmarks.disaggregation            two and two, 64 requests, then kill -9 of each role under 32 clients
  python -m benchmarks.disaggregation --prefill 1 --decode 1 --requests 8 --clients 0
  python -m benchmarks.disaggregation --carrier nixl     the same with pages read by NIXL

Prints how many texts equal those of one instance that computes everything, and how many tokens came with pages. For
each kill it prints how many requests were answered, how many were refused, and the longest wait. Times say nothing
beyond this machine.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[1]
LIMITS = ["--max_num_seqs=16", "--max_model_len=512", "--max_num_batched_tokens=256"]
PATIENCE_S = 10.0


@dataclasses.dataclass
class Instance:
    """A server and where it answers."""

    process: subprocess.Popen[str]
    url: str

    def kill(self) -> None:
        """Ends its processes at once, as a crash of the host does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def free_port() -> int:
    """Returns a port that nobody has now, nor the next one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def key_file(folder: Path) -> Path:
    """Writes the secret that the instances share."""
    path = folder / "transfer.key"
    path.write_text("benchmark " * 5)
    path.chmod(0o600)
    return path


def flags(role: str, key: Path, carrier: str = "sockets") -> list[str]:
    """Returns the flags of an instance of a role; "alone" computes everything itself."""
    if role == "alone":
        return ["--kv_offloading_size=0.05"]
    shared = [
        f"--role={role}",
        "--kv_offloading_size=0.05",
        f"--transfer_key_file={key}",
        f"--transfer_carrier={carrier}",
    ]
    return [*shared, f"--transfer_address=127.0.0.1:{free_port()}"] if role == "prefill" else shared


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[Instance]:
    """Starts a server and waits until it is ready; gives its shared memory back at the end."""
    command = [sys.executable, "-m", "launch.serve", "--port", "0", *LIMITS, *arguments]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        start_new_session=True,
    )  # fmt: skip
    lines: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if ready := re.search(r"ready at (http://\S+)", line):
                instance = Instance(process, ready[1])
                break
        else:
            raise RuntimeError("".join(lines))
        yield instance
        instance.kill()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for path in re.findall(r"host memory in (\S+):", "".join(lines)):
            Path(path).unlink(missing_ok=True)


class Router:
    """Has one instance compute a prompt and another one answer: vLLM's `kv_transfer_params`, in turns, no state."""

    def __init__(self, prefill: list[Instance], decode: list[Instance]) -> None:
        self._prefill, self._decode = itertools.cycle(prefill), decode
        self._turn = itertools.count()
        self._http = httpx.AsyncClient(timeout=PATIENCE_S)

    async def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        """Returns an answer's body; raises httpx.HTTPError where no instance gives one."""
        params = await self._computed(request)
        body = request if params is None else request | {"kv_transfer_params": params}
        turn, count = next(self._turn), len(self._decode)
        for left in reversed(range(count)):
            try:
                answer = await self._http.post(f"{self._decode[(turn + left) % count].url}/v1/completions", json=body)
                answer.raise_for_status()
                return answer.json()
            except httpx.HTTPError:
                if not left:
                    raise
        raise AssertionError

    async def _computed(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Has a prompt computed; None where no prefill instance does it: then decode does."""
        first = request | {"max_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
        with contextlib.suppress(httpx.HTTPError):
            answer = await self._http.post(f"{next(self._prefill).url}/v1/completions", json=first)
            answer.raise_for_status()
            return answer.json()["kv_transfer_params"]
        return None


def requests(count: int) -> list[dict[str, Any]]:
    """Returns mixed requests of 10 to 330 tokens: greedy and seeded, with penalties, stops and log-probabilities."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "seed": 5},
        {"temperature": 1.0, "seed": 6, "presence_penalty": 0.5, "min_tokens": 0},
        {"logprobs": 2},
        {"stop": ["\n\n"]},
        {"temperature": 0.7, "seed": 7, "top_p": 0.9, "n": 2},
    ]
    return [
        {
            "model": "dsv3-tiny",
            "prompt": [(7 * i + 3 * j) % 900 + 20 for j in range(10 + (i * 53) % 320)],
            "max_tokens": 24,
            "temperature": 0.0,
            **kinds[i % len(kinds)],
        }
        for i in range(count)
    ]


def told(answer: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns what counts of an answer: text and end of each choice."""
    return [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]]


async def compare(router: Router, alone: Instance, asked: list[dict[str, Any]]) -> tuple[int, int]:
    """Sends each request to both, one at a time; returns how many texts are equal, and the tokens that were fetched.

    The one instance computes a prompt and answers the second time, so that both compute the same rows at once: other
    shapes round differently.
    """
    equal = cached = 0
    async with httpx.AsyncClient(timeout=60) as http:
        for request in asked:
            await http.post(f"{alone.url}/v1/completions", json=request | {"max_tokens": 1})
            here = (await http.post(f"{alone.url}/v1/completions", json=request)).json()
            there = await router.complete(request)
            equal += told(here) == told(there)
            cached += there["usage"]["prompt_tokens_details"]["cached_tokens"]
    return equal, cached


async def killed(router: Router, victim: Instance, asked: list[dict[str, Any]], clients: int) -> dict[str, Any]:
    """Kills an instance under load; returns how the requests ended."""
    queue = iter(enumerate(asked))
    ended: dict[str, int] = {"answered": 0, "refused": 0}
    waits: list[float] = []

    async def client() -> None:
        for i, request in queue:
            salted = request | {"cache_salt": f"kill {id(victim)} {i}"}
            started = time.perf_counter()
            try:
                await router.complete(salted)
                ended["answered"] += 1
            except httpx.HTTPError:
                ended["refused"] += 1
            waits.append(time.perf_counter() - started)

    async def killer() -> None:
        while len(waits) < len(asked) // 4:
            await asyncio.sleep(0.01)
        victim.kill()

    await asyncio.gather(killer(), *(client() for _ in range(clients)))
    return ended | {"longest": max(waits)}


async def pages_left(instance: Instance) -> float:
    """Returns the pages that requests hold; waits a moment until those that were given up are free."""
    async with httpx.AsyncClient(timeout=10) as http:
        for _ in range(50):
            text = (await http.get(f"{instance.url}/metrics")).text
            left = sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("dsv3:pages_in_use"))
            if not left:
                break
            await asyncio.sleep(0.1)
    return left


async def carried(instances: list[Instance]) -> str:
    """Returns what `/metrics` says of the carriers of pages."""
    sums: dict[str, float] = {}
    async with httpx.AsyncClient(timeout=10) as http:
        for instance in instances:
            for line in (await http.get(f"{instance.url}/metrics")).text.splitlines():
                if found := re.match(r'dsv3:kv_transfer_(\w+)_total\{.*carrier="(\w+)".* (\S+)$', line):
                    name = f"{found[1]} by {found[2]}"
                    sums[name] = sums.get(name, 0.0) + float(found[3])
    return ", ".join(f"{name} {value:.6g}" for name, value in sums.items())


@contextlib.asynccontextmanager
async def deployment(
    num_prefill: int, num_decode: int, carrier: str = "sockets"
) -> AsyncIterator[tuple[list[Instance], list[Instance]]]:
    """Starts the instances of both roles."""
    with contextlib.ExitStack() as stack:
        key = key_file(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        roles = {"prefill": num_prefill, "decode": num_decode}
        started = {
            role: [stack.enter_context(serving(*flags(role, key, carrier))) for _ in range(count)]
            for role, count in roles.items()
        }
        yield started["prefill"], started["decode"]


async def main(arguments: argparse.Namespace) -> None:
    """Runs everything and prints it."""
    with serving(*flags("alone", Path())) as alone:
        async with deployment(arguments.prefill, arguments.decode, arguments.carrier) as (prefill, decode):
            router, asked = Router(prefill, decode), requests(arguments.requests)
            equal, cached = await compare(router, alone, asked)
            prompts = sum(len(request["prompt"]) for request in asked)
            print(f"equal texts: {equal} of {len(asked)}; {cached} of {prompts} prompt tokens came with pages")
            print(f"what carried them, all decode instances together: {await carried(decode)}")
            if not arguments.clients:
                return
            for role, instances in (("prefill", prefill), ("decode", decode)):
                ended = await killed(router, instances[-1], asked * 2, arguments.clients)
                if role == "prefill":
                    print(f"what carried them: {await carried(decode)}")
                living = [each for each in (*prefill, *decode) if each.process.poll() is None]
                left = [await pages_left(each) for each in living]
                print(
                    f"kill -9 of a {role} instance, {arguments.clients} clients: {ended['answered']} answered, "
                    f"{ended['refused']} refused, longest wait {ended['longest']:.1f} s, pages left {sum(left):.0f}"
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("prefill", 2), ("decode", 2), ("requests", 64), ("clients", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--carrier", default="sockets", choices=["sockets", "auto", "nixl"])
    asyncio.run(main(parser.parse_args()))
