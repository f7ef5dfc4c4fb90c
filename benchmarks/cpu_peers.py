"""This server beside others on the same CPU: decode speed at 1, 4 and 16 requests, and the time to the first token.

    python -m benchmarks.cpu_peers --make DIR [--layers 12]
    python -m benchmarks.cpu_peers --model DIR [--dtypes bfloat16 float32] [--tree OTHER_CHECKOUT]
        [--llama-server PATH --gguf FILE...] [--rounds 3]

The first form writes a random model of 745 million parameters at 12 layers (`benchmarks/cpu_step.py` has its shape) as
a Hugging Face checkpoint. The second starts a server per dtype, one per dtype from another checkout of this repository,
and one llama-server per GGUF file, with as many threads as cores. The load generator of `launch.bench` measures one
after the other, in turns over the rounds; idle servers wait. Without `--model` it measures the bundled model.

Per server and number of requests: output tokens per second (their tokens over the median time of a request, its prompt
included), and the time to the first token of a prompt of `--long` tokens. Ratios are the first server's over each other
one's, the median of the rounds and their range; above 1 the first is faster. Last comes the share of the memory's speed
at one request: bytes of the weights that a token needs, over what a copy by all cores moves (both ways) meanwhile.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.cpu_step import COPIED_BYTES, RANDOM, Copy, timed, weight_bytes
from dsv3.bench import serve
from dsv3.bench.workload import RandomPrompts
from dsv3.checkpoint import save_hf
from dsv3.checkpoint.quantize import quantized_shapes
from dsv3.config import ModelConfig
from dsv3.engine.build import bundled_model
from dsv3.hf_config import load_config
from dsv3.model.params import Params, abstract, declare, initialize

START_SECONDS = 600
STOP_SECONDS = 30
ROOT = Path(__file__).parent.parent
FORMATS = {"fp8": ("--dtype=bfloat16", "--fp8=quantize")}
"""Options of what is no type of its own."""


@dataclasses.dataclass(frozen=True)
class Server:
    """A server to start: its name in the tables, its command without the port, and where it runs."""

    name: str
    command: tuple[str, ...]
    tree: Path = ROOT


@dataclasses.dataclass(frozen=True)
class Cell:
    """What is measured at once: requests in flight, tokens of a prompt and of an answer, and how many requests."""

    requests: int
    prompt: int
    answer: int
    total: int


def make(directory: Path, layers: int) -> None:
    """Writes the random model in bfloat16, with the tokenizer of the bundled one: prompts are token ids."""
    cfg = dataclasses.replace(RANDOM, num_hidden_layers=layers)
    params = jax.jit(lambda: initialize(cfg, jax.random.key(0), jnp.bfloat16))()
    save_hf(directory, cfg, params)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled_model() / name, directory / name)


def servers(arguments: argparse.Namespace) -> list[Server]:
    """Returns the servers to compare, ours first."""
    python = (sys.executable, "-m", "launch.serve", f"--model={arguments.model}", "--max_num_seqs=16",
              f"--max_model_len={arguments.long + 512}", "--host=127.0.0.1")  # fmt: skip
    trees = {"": ROOT} | ({f" at {arguments.tree}": arguments.tree.resolve()} if arguments.tree else {})
    ours = [
        Server(f"ours {dtype}{name}", (*python, *FORMATS.get(dtype, (f"--dtype={dtype}",))), tree)
        for name, tree in trees.items()
        for dtype in arguments.dtypes
    ]
    context = 16 * (arguments.long + 512)
    llama = (str(arguments.llama_server), "--parallel", "16", "--ctx-size", str(context), "--flash-attn", "off",
             "--threads", str(os.cpu_count()), "--cache-ram", "0", "--no-webui", "--host", "127.0.0.1")  # fmt: skip
    return ours + [Server(f"llama.cpp {gguf.stem}", (*llama, "--model", str(gguf))) for gguf in arguments.gguf]


@contextlib.contextmanager
def running(server: Server) -> Iterator[str]:
    """Starts a server on a free port, waits until it is healthy, and yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(server.tree)}
    with tempfile.TemporaryFile() as log:
        command = (*server.command, "--port", str(port))
        process = subprocess.Popen(command, cwd=server.tree, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            _wait_until_healthy(server, process, f"http://127.0.0.1:{port}", log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_healthy(server: Server, process: subprocess.Popen, url: str, log) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            log.seek(0)
            raise RuntimeError(f"{server.name} ended with {process.returncode}: {log.read().decode()[-2000:]}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.5)
    raise TimeoutError(f"{server.name} is not healthy after {START_SECONDS} s")


def measure(url: str, cell: Cell, vocab_size: int, seed: int) -> tuple[float, float]:
    """Returns output tokens per second and the time to the first token in milliseconds, medians over the requests.

    Tokens count over the whole request: a busy server sends several at once, and gaps between them say little.
    """
    options = serve.ServeOptions(
        url=url,
        prompts=RandomPrompts(cell.prompt, cell.answer, 0.0, 0, 1),
        num_prompts=cell.total,
        concurrency=cell.requests,
        prompt_kind="token_ids",
        vocab_size=vocab_size,
        seed=seed,
    )
    report = asyncio.run(serve.run(options, lambda total: None, lambda record: None))
    if report["requests"]["failed"]:
        raise RuntimeError(f"{url}: {report['errors']}")
    return cell.requests * cell.answer * 1e3 / report["e2e_ms"]["p50"], report["ttft_ms"]["p50"]


def host_time(url: str) -> np.ndarray:
    """Returns the seconds of the host's time so far and the steps `[2]`; zeros of a server that counts neither."""
    names = ("dsv3:engine_host_seconds_total", "dsv3:engine_steps_total")
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
    except urllib.error.HTTPError:
        return np.zeros(2)
    values = ([float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name)] for name in names)
    return np.array([sum(each) for each in values])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--make", type=Path)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--model", type=Path, default=bundled_model())
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], help="or fp8")
    parser.add_argument("--tree", type=Path, help="another checkout of this repository")
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--gguf", type=Path, nargs="+", default=[])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=128, help="of a prompt and of an answer")
    parser.add_argument("--long", type=int, default=1024, help="tokens of the prompt whose first token is timed")
    parser.add_argument("--repeats", type=int, default=2, help="requests one after the other, of each one at once")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.make:
        make(arguments.make, arguments.layers)
        return
    if bool(arguments.llama_server) != bool(arguments.gguf):
        parser.error("--llama-server and --gguf go together")
    compare(arguments)


def compare(arguments: argparse.Namespace) -> None:
    """Runs all rounds and prints the tables."""
    cfg = load_config(arguments.model)
    cells = [Cell(n, arguments.tokens, arguments.tokens, arguments.repeats * n) for n in arguments.requests]
    cells.append(Cell(1, arguments.long, 2, 2))
    all_servers = servers(arguments)
    figures = np.zeros((arguments.rounds, len(all_servers), len(cells)))
    host = np.zeros((arguments.rounds, len(all_servers), len(cells)))
    copies = []
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(running(server)) for server in all_servers]
        for url in urls:  # what is slow once: pages of memory that nobody has touched
            measure(url, cells[0], cfg.vocab_size, arguments.rounds)
        for r in range(arguments.rounds):
            copies.append(timed(Copy(), 3)[0])
            for c, cell in enumerate(cells):
                for s, url in enumerate(urls):
                    before = host_time(url)
                    speed, first = measure(url, cell, cfg.vocab_size, r * len(cells) + c)
                    figures[r, s, c] = speed if cell.prompt == arguments.tokens else 1e3 / first
                    seconds, steps = host_time(url) - before
                    host[r, s, c] = seconds / steps if steps else np.nan
    moved = 2 * COPIED_BYTES / statistics.median(copies)
    print(f"the copy moves {moved / 1e9:.1f} GB/s; load {os.getloadavg()[0]:.1f}")
    report(all_servers, arguments, figures)
    for s, server in enumerate(all_servers[: len(all_servers) - len(arguments.gguf)]):
        shown = ", ".join(f"{statistics.median(each) * 1e6:.0f}" for each in host[:, s, :-1].T)
        print(f"{server.name}: host's time per step {shown} us at {arguments.requests} at once")
    chosen = np.arange(cfg.n_routed_experts) < cfg.num_experts_per_tok
    for s, dtype in enumerate(arguments.dtypes):
        needed = weight_bytes(shapes(cfg, dtype), np.tile(chosen, (cfg.num_moe_layers, 1)))
        share = statistics.median(figures[:, s, 0]) / arguments.requests[0] * needed / moved
        print(f"{all_servers[s].name}: {needed / 1e6:.0f} MB per token, {share:.2f} of the memory's speed")


def shapes(cfg: ModelConfig, dtype: str) -> Params:
    """Returns the shapes of the parameters; "fp8" is bfloat16 under `--fp8=quantize`."""
    if dtype not in FORMATS:
        return abstract(cfg, dtype)
    return jax.tree.map(
        lambda spec, w: quantized_shapes(w) if spec.quantizable else w, declare(cfg), abstract(cfg, "bfloat16")
    )


def report(all_servers: list[Server], arguments: argparse.Namespace, figures: np.ndarray) -> None:
    """Prints tokens per second of every server, and the first one's speed over each."""
    titles = [f"{n} at once" for n in arguments.requests] + [f"first of {arguments.long}"]
    print(f"| server | {' | '.join(titles)} |\n|---|{'---|' * len(titles)}")
    for s, server in enumerate(all_servers):
        values = [statistics.median(column) for column in figures[:, s].T]
        shown = [f"{value:.1f} tokens/s" for value in values[:-1]] + [f"{1e3 / values[-1]:.0f} ms"]
        print(f"| {server.name} | {' | '.join(shown)} |")
    for s, server in enumerate(all_servers[1:], 1):
        ratios = (figures[:, 0] / figures[:, s]).T
        shown = [f"{statistics.median(each):.2f} ({each.min():.2f} to {each.max():.2f})" for each in ratios]
        print(f"| {all_servers[0].name} / {server.name} | {' | '.join(shown)} |")


if __name__ == "__main__":
    main()
