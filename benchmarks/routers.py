"""A prefill and a decode instance of the bundled model behind a router, ours or another's, and the death of each.

  python -m benchmarks.routers
  python -m benchmarks.routers --router 'smg launch --pd-disaggregation --prefill {prefill} {transfer_port} \
      --decode {decode} --host 127.0.0.1 --port {port} --prometheus-port {other_port} --policy round_robin'
  python -m benchmarks.routers --router 'python toy_proxy_server.py --port {port} --prefiller-ports {prefill_port} \
      --decoder-ports {decode_port} --prefiller-hosts 127.0.0.1 --decoder-hosts 127.0.0.1'

`--router` is the router's command, by default `launch.router`'s; what is in braces is filled in. The first table has
how many texts equal those of one instance asked directly, as answers and as streams, and how many tokens came with
pages. Then the prefill instance is killed under load, nothing is started in its place, and the second table says how
requests end; then the decode instance.
"""

import asyncio
import contextlib
import functools
import re
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.instances import Instance, flags, free_port, key_file, left_behind, running, serving, streamed
from benchmarks.record import Cell, Report, arguments, run

OURS = f"{sys.executable} -m launch.router --prefill {{prefill}} --decode {{decode}} --port {{port}}"
PATHS = ("/v1/completions", "/v1/chat/completions")
_START_S = 120.0
_PATIENCE_S = 60.0


def requests(count: int) -> list[tuple[str, dict[str, Any]]]:
    """Returns paths and bodies: prompts of 30 to 300 tokens, some sampled, some with choices or several prompts."""
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 5}, {"stop": ["\n\n"]}, {"n": 2, "seed": 3}]
    found = []
    for i in range(count):
        text = f"# {i}\n" + "def add(a, b):\n    return a + b\n\n" * (2 + i % 20)
        body = {"model": "dsv3-tiny", "max_tokens": 16, "temperature": 0.0, **kinds[i % len(kinds)]}
        if i % 5 == 4:
            found.append((PATHS[0], body | {"prompt": [text, text + "x"]}))
        elif i % 2:
            found.append((PATHS[1], body | {"messages": [{"role": "user", "content": text}]}))
        else:
            found.append((PATHS[0], body | {"prompt": text}))
    return found


def answers(url: str) -> bool:
    """Returns whether a router completes a text."""
    body = {"model": "dsv3-tiny", "prompt": "x", "max_tokens": 1}
    with contextlib.suppress(httpx.HTTPError):
        return httpx.post(f"{url}/v1/completions", json=body, timeout=5).status_code == 200
    return False


async def ask(http: httpx.AsyncClient, url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Returns an answer; raises httpx.HTTPError for one that is none."""
    answer = await http.post(url + path, json=body)
    answer.raise_for_status()
    found = answer.json()
    if "choices" not in found:
        raise httpx.HTTPError(str(found))
    return found


def texts_of(answer: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns text and end of each choice."""
    texts = (choice["text"] if "text" in choice else choice["message"]["content"] for choice in answer["choices"])
    return list(zip(texts, (choice["finish_reason"] for choice in answer["choices"]), strict=True))


async def compare(router: str, alone: Instance, count: int) -> list[list[Cell]]:
    """Asks both for each request, one at a time; the one instance has the prompt cached, as the decode instance has."""
    equal = streams = prompt = cached = 0
    async with httpx.AsyncClient(timeout=_PATIENCE_S) as http:
        for path, body in requests(count):
            await ask(http, alone.url, path, body | {"max_tokens": 1})
            here, there = await ask(http, alone.url, path, body), await ask(http, router, path, body)
            usage, (parts, _) = there["usage"], await streamed(http, router + path, body)
            equal += texts_of(here) == texts_of(there)
            streams += [parts.get(i, "") for i in range(len(parts))] == [text for text, _ in texts_of(here)]
            prompt += usage["prompt_tokens"]
            cached += usage["prompt_tokens_details"]["cached_tokens"]
    return [
        ["texts", equal, count],
        ["streams", streams, count],
        ["prompt tokens that came with pages", cached, prompt],
    ]


async def under_load(router: str, count: int, clients: int, victim: Instance | None) -> list[Cell]:
    """Sends requests from several clients, and kills an instance after a quarter of them; returns how they end."""
    queue, ends, longest = iter(requests(count)), {"answered": 0, "refused": 0, "broken off": 0}, 0.0

    async def client(http: httpx.AsyncClient) -> None:
        nonlocal longest
        for path, body in queue:
            started = time.perf_counter()
            try:
                await ask(http, router, path, body | {"cache_salt": f"{started}"})
                end = "answered"
            except httpx.HTTPStatusError:
                end = "refused"
            except httpx.HTTPError:
                end = "broken off"
            ends[end] += 1
            longest = max(longest, time.perf_counter() - started)
            if victim is not None and sum(ends.values()) == count // 4:
                victim.kill()

    async with httpx.AsyncClient(timeout=_PATIENCE_S) as http:
        await asyncio.gather(*(client(http) for _ in range(clients)))
    return [*ends.values(), longest]


def main(report: Report) -> None:
    args = arguments(__doc__, router=OURS, requests=20, clients=4)
    with contextlib.ExitStack() as stack:
        key = key_file(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        given = [flags(role, key) for role in ("prefill", "decode", "alone")]
        transfer_port = given[0][-1].rpartition(":")[2]
        prefill, decode, alone = (stack.enter_context(serving(*each)) for each in given)
        names = {"prefill": prefill.url, "decode": decode.url, "transfer_port": transfer_port}
        names |= {f"{role}_port": re.sub(r".*:", "", names[role]) for role in ("prefill", "decode")}
        names |= {"port": str(free_port()), "other_port": str(free_port())}
        router = f"http://127.0.0.1:{names['port']}"
        command = shlex.split(args.router.format(**names))
        stack.enter_context(running(command, functools.partial(answers, router), _START_S))
        compared = asyncio.run(compare(router, alone, args.requests))
        report.table("Beside one instance that does both", ["what", "equal", "of"], compared)
        if not args.clients:
            return
        lines = []
        for what, victim in (("nothing", None), ("kill -9 prefill", prefill), ("kill -9 decode", decode)):
            ends = asyncio.run(under_load(router, args.requests, args.clients, victim))
            lines.append(
                [what, *ends, None if victim is decode else left_behind(decode.url, 5.0).get("dsv3:pages_in_use", 0)]
            )
        columns = ["event", "answered", "refused", "broken off", "longest wait (s)", "pages left"]
        report.table(f"Under {args.clients} clients", columns, lines)


if __name__ == "__main__":
    run(main)
