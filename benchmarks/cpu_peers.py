"""This server beside others on the same CPU: decode speed at 1, 4 and 16 requests, and the time to the first token.

    python -m benchmarks.cpu_peers --make DIR [--layers 12]
    python -m benchmarks.cpu_peers --model DIR [--dtypes bfloat16 float32] [--tree OTHER_CHECKOUT]
        [--llama-server PATH --gguf FILE...] [--transformers-python PATH] [--rounds 3]

The first form writes a random model of 745 million parameters at 12 layers (`benchmarks/cpu_step.py` has its shape) as
a Hugging Face checkpoint. The second starts a server per dtype, one per dtype from another checkout of this repository,
and two llama-servers per GGUF file: one with llama.cpp's own defaults, and one with flash attention and as many
threads as cores (`--llama-settings` names other ones). The load generator of `tools.bench` measures one
after the other, in turns over the rounds; idle servers wait. An interpreter that has transformers and torch generates
the same numbers of tokens in batches, once per dtype except fp8. Without `--model` all of them run the bundled model.

Per peer and number of requests: output tokens per second (their tokens over the median time of a request, its prompt
included), and the time to the first token of a prompt of `--long` tokens. Ratios are the first peer's over each other
one's, the median of the rounds and their range; above 1 the first is faster. Last comes the share of the memory's speed
at one request: bytes of the weights that a token needs, over what a copy by all cores moves (both ways) meanwhile.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import os
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import httpx
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.cpu_step import COPIED_BYTES, RANDOM, Copy, timed, weight_bytes
from benchmarks.transformers_peer import Generate, generating
from dsv3.checkpoint import save_hf
from dsv3.checkpoint.quantize import quantize_stack_shapes
from dsv3.config.hugging_face import load_config
from dsv3.config.model import ModelConfig
from dsv3.engine.build import bundled_model
from dsv3.model.params import Params, abstract, declare, initialize
from tools.bench import load

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
    """What is measured at once: requests in flight, tokens of a prompt and of an answer, and how many times.

    `first` asks for the time to the first token, not for the tokens per second.
    """

    requests: int
    prompt: int
    answer: int
    repeats: int
    first: bool = False


@dataclasses.dataclass(frozen=True)
class Peer:
    """A peer that runs: its name in the tables, what measures a cell with a seed, and what reads its host's time."""

    name: str
    measure: Callable[[Cell, int], float]
    host_time: Callable[[], np.ndarray] = lambda: np.zeros(2)


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
    llama = (str(arguments.llama_server), "--parallel", "16", "--ctx-size", str(context), "--cache-ram", "0",
             "--no-webui", "--host", "127.0.0.1")  # fmt: skip
    return ours + [
        Server(f"llama.cpp {gguf.stem} {setting}".strip(), (*llama, *shlex.split(setting), "--model", str(gguf)))
        for gguf in arguments.gguf
        for setting in arguments.llama_settings
    ]


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
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.5)
    raise TimeoutError(f"{server.name} is not healthy after {START_SECONDS} s")


def served(url: str, vocab_size: int, cell: Cell, seed: int) -> float:
    """Returns output tokens per second, or one over the time to the first token in seconds; medians over the requests.

    Tokens count over the whole request: a busy server sends several at once, and gaps between them say little.
    """
    loading = load.run(
        url,
        input_len=cell.prompt,
        output_len=cell.answer,
        num_prompts=cell.repeats * cell.requests,
        concurrency=cell.requests,
        vocab_size=vocab_size,
        seed=seed,
    )
    report = asyncio.run(loading)
    if report["requests"]["failed"]:
        raise RuntimeError(f"{url}: {report['errors']}")
    if cell.first:
        return 1e3 / report["ttft_ms"]["p50"]
    return cell.requests * cell.answer * 1e3 / report["e2e_ms"]["p50"]


def generated(generate: Generate, vocab_size: int, cell: Cell, seed: int) -> float:
    """Returns the same of transformers, whose prompts are other random tokens."""
    rng = np.random.default_rng(seed)
    answer = 1 if cell.first else cell.answer
    seconds = statistics.median(
        generate(rng.integers(2, vocab_size, (cell.requests, cell.prompt)), answer) for _ in range(cell.repeats)
    )
    return cell.requests * answer / seconds


def host_time(url: str) -> np.ndarray:
    """Returns the seconds of the host's time so far and the steps `[2]`; zeros of a peer that counts neither."""
    names = ("dsv3:engine_host_seconds_total", "dsv3:engine_steps_total")
    answer = httpx.get(f"{url}/metrics", timeout=30)
    if answer.is_error:
        return np.zeros(2)
    lines = answer.text.splitlines()
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
    parser.add_argument(
        "--llama-settings",
        nargs="+",
        default=["", f"--flash-attn on --threads {os.cpu_count()}"],
        help="one server each",
    )
    parser.add_argument("--transformers-python", type=Path, help="an interpreter that has transformers and torch")
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


def peers(arguments: argparse.Namespace, vocab_size: int, stack: contextlib.ExitStack) -> Iterator[Peer]:
    """Starts the peers, ours first; `stack` ends them."""
    for server in servers(arguments):
        url = stack.enter_context(running(server))
        yield Peer(server.name, partial(served, url, vocab_size), partial(host_time, url))
    if arguments.transformers_python:
        for dtype in (each for each in arguments.dtypes if each not in FORMATS):
            generate = stack.enter_context(generating(arguments.transformers_python, arguments.model, dtype))
            yield Peer(f"transformers {dtype}", partial(generated, generate, vocab_size))


def compare(arguments: argparse.Namespace) -> None:
    """Runs all rounds and prints the tables."""
    cfg = load_config(arguments.model)
    cells = [Cell(n, arguments.tokens, arguments.tokens, arguments.repeats) for n in arguments.requests]
    cells.append(Cell(1, arguments.long, 2, 2, first=True))
    with contextlib.ExitStack() as stack:
        all_peers = list(peers(arguments, cfg.vocab_size, stack))
        for peer in all_peers:  # what is slow once: pages of memory that nobody has touched
            peer.measure(cells[0], arguments.rounds)
        rounds = [one_round(all_peers, cells, r) for r in range(arguments.rounds)]
    figures, host, copies = (np.array(each) for each in zip(*rounds, strict=True))
    moved = 2 * COPIED_BYTES / statistics.median(copies)
    print(f"the copy moves {moved / 1e9:.1f} GB/s; load {os.getloadavg()[0]:.1f}")
    report([peer.name for peer in all_peers], arguments, figures)
    report_host(all_peers, arguments, host)
    report_memory(cfg, arguments, figures, moved)


def one_round(all_peers: list[Peer], cells: list[Cell], number: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Returns the figures and the host's seconds per step `[peers, cells]`, and the seconds of the copy."""
    figures, host = np.zeros((2, len(all_peers), len(cells)))
    copy = timed(Copy(), 3)[0]
    for c, cell in enumerate(cells):
        for p, peer in enumerate(all_peers):
            before = peer.host_time()
            figures[p, c] = peer.measure(cell, number * len(cells) + c)
            seconds, steps = peer.host_time() - before
            host[p, c] = seconds / steps if steps else np.nan
    return figures, host, copy


def report_host(all_peers: list[Peer], arguments: argparse.Namespace, host: np.ndarray) -> None:
    """Prints the host's time per step of the peers that count it; `host` is `[rounds, peers, cells]`."""
    for p, peer in enumerate(all_peers):
        if not np.isnan(host[:, p, :-1]).any():
            shown = ", ".join(f"{statistics.median(each) * 1e6:.0f}" for each in host[:, p, :-1].T)
            print(f"{peer.name}: host's time per step {shown} us at {arguments.requests} at once")


def report_memory(cfg: ModelConfig, arguments: argparse.Namespace, figures: np.ndarray, moved: float) -> None:
    """Prints the share of the copy's speed that ours reaches in the first cell; `moved` is in bytes per second."""
    chosen = np.arange(cfg.n_routed_experts) < cfg.num_experts_per_tok
    for s, dtype in enumerate(arguments.dtypes):
        needed = weight_bytes(shapes(cfg, dtype), np.tile(chosen, (cfg.num_moe_layers, 1)))
        share = statistics.median(figures[:, s, 0]) / arguments.requests[0] * needed / moved
        print(f"ours {dtype}: {needed / 1e6:.0f} MB per token, {share:.2f} of the memory's speed")


def shapes(cfg: ModelConfig, dtype: str) -> Params:
    """Returns the shapes of the parameters; "fp8" is bfloat16 under `--fp8=quantize`."""
    if dtype not in FORMATS:
        return abstract(cfg, dtype)
    return jax.tree.map(
        lambda spec, w: quantize_stack_shapes(w) if spec.quantizable else w, declare(cfg), abstract(cfg, "bfloat16")
    )


def report(names: list[str], arguments: argparse.Namespace, figures: np.ndarray) -> None:
    """Prints the figures of every peer, and the first one's over each; `figures` is `[rounds, peers, cells]`."""
    titles = [f"{n} at once" for n in arguments.requests] + [f"first of {arguments.long}"]
    print(f"| peer | {' | '.join(titles)} |\n|---|{'---|' * len(titles)}")
    for p, name in enumerate(names):
        values = [statistics.median(column) for column in figures[:, p].T]
        shown = [f"{value:.1f} tokens/s" for value in values[:-1]] + [f"{1e3 / values[-1]:.0f} ms"]
        print(f"| {name} | {' | '.join(shown)} |")
    for p, name in enumerate(names[1:], 1):
        ratios = (figures[:, 0] / figures[:, p]).T
        shown = [f"{statistics.median(each):.2f} ({each.min():.2f} to {each.max():.2f})" for each in ratios]
        print(f"| {names[0]} / {name} | {' | '.join(shown)} |")


if __name__ == "__main__":
    main()
