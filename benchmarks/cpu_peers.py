"""This server beside others on the same CPU: decode speed at 1, 4 and 16 requests, and the time to the first token.

    python -m benchmarks.cpu_peers --make DIR [--layers 12]
    python -m benchmarks.cpu_peers --model DIR [--dtypes bfloat16 float32] [--llama-server PATH --gguf FILE...]
        [--transformers-python PATH] [--rounds 3]

The first form writes a random model of 745 million parameters at 12 layers (`benchmarks/cpu_step.py` has its shape) as
a Hugging Face checkpoint. The second starts a server per dtype, and two llama-servers per GGUF file: one with
llama.cpp's own defaults, and one with flash attention and as many threads as cores. The load generator `tools.load`
measures one after the other, in turns over the rounds; idle servers wait. An interpreter that has transformers and
torch generates the same numbers of tokens in batches, once per dtype except fp8: its sequences start and end together,
the best case of a batch. Without `--model` all of them run the bundled model.

Per peer and number of `--requests`: output tokens per second (their tokens over the median time of a request, its
prompt included, of `--tokens` each), and the time to the first token of a prompt of `--long` tokens. Ratios are the
first peer's over each other one's, the median of the rounds and their range; above 1 the first is faster.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import shlex
import shutil
import statistics
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.cpu_step import RANDOM
from benchmarks.instances import SERVE, serving
from benchmarks.record import Report, arguments, run, spread
from dsv3.checkpoint import save_hf
from dsv3.config.hugging_face import load_config
from dsv3.engine.build import bundled_model
from dsv3.model.params import initialize
from tools import load

LIMITS = ("--max_num_seqs=16",)
LLAMA_SETTINGS = ("", f"--flash-attn on --threads {os.cpu_count()}")
FORMATS = {"fp8": ("--dtype=bfloat16", "--fp8=quantize")}
"""Options of what is no type of its own."""
_WORKER = """
import json, sys, time
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging
logging.set_verbosity_error()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=getattr(torch, sys.argv[2])).eval()
for line in sys.stdin:
    job = json.loads(line)
    prompts = torch.tensor(job["prompts"])
    started = time.perf_counter()
    with torch.inference_mode():
        model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=job["tokens"],
                       min_new_tokens=job["tokens"], do_sample=False, pad_token_id=0)
    print(json.dumps(time.perf_counter() - started), flush=True)
"""

Generate = Callable[[np.ndarray, int], float]
"""Takes prompts `[requests, tokens]` and the number of tokens to generate for each; returns the seconds it took."""


@dataclasses.dataclass(frozen=True)
class Load:
    """What is measured at once: requests in flight, tokens of a prompt and of an answer, and how many times.

    `first` asks for the time to the first token, not for the tokens per second.
    """

    requests: int
    prompt: int
    answer: int
    repeats: int
    first: bool = False


type Measure = Callable[[Load, int], float]
"""Takes a load and a seed."""


def make(directory: Path, layers: int) -> None:
    """Writes the random model in bfloat16, with the tokenizer of the bundled one: prompts are token ids."""
    cfg = dataclasses.replace(RANDOM, num_hidden_layers=layers)
    params = jax.jit(lambda: initialize(cfg, jax.random.key(0), jnp.bfloat16))()
    save_hf(directory, cfg, params)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled_model() / name, directory / name)


def servers(given: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    """Returns the commands of the servers to compare without the port, by their names in the tables, ours first."""
    python = (*SERVE, f"--model={given.model}", *LIMITS, f"--max_model_len={given.long + 512}")
    ours = {f"ours {dtype}": (*python, *FORMATS.get(dtype, (f"--dtype={dtype}",))) for dtype in given.dtypes}
    context = 16 * (given.long + 512)
    llama = (str(given.llama_server), "--parallel", "16", "--ctx-size", str(context), "--cache-ram", "0",
             "--no-webui", "--host", "127.0.0.1")  # fmt: skip
    return ours | {
        f"llama.cpp {Path(gguf).stem} {setting}".strip(): (*llama, *shlex.split(setting), "--model", gguf)
        for gguf in given.gguf
        for setting in LLAMA_SETTINGS
    }


@contextlib.contextmanager
def generating(python: Path, model: Path, dtype: str) -> Iterator[Generate]:
    """Starts `python` with the worker and yields what generates in it; the first call waits until `model` is loaded."""
    command = [str(python), "-c", _WORKER, str(model), dtype]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        jobs, answers = process.stdin, process.stdout

        def generate(prompts: np.ndarray, tokens: int) -> float:
            jobs.write(json.dumps({"prompts": prompts.tolist(), "tokens": tokens}) + "\n")
            jobs.flush()
            line = answers.readline()
            if not line:
                raise RuntimeError(f"transformers ended with {process.wait()}")
            return json.loads(line)

        yield generate


def served(url: str, vocab_size: int, cell: Load, seed: int) -> float:
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


def generated(generate: Generate, vocab_size: int, cell: Load, seed: int) -> float:
    """Returns the same of transformers, whose prompts are other random tokens."""
    rng = np.random.default_rng(seed)
    answer = 1 if cell.first else cell.answer
    seconds = statistics.median(
        generate(rng.integers(2, vocab_size, (cell.requests, cell.prompt)), answer) for _ in range(cell.repeats)
    )
    return cell.requests * answer / seconds


def main(report: Report) -> None:
    given = arguments(
        __doc__, make=Path, layers=12, model=bundled_model(), dtypes=("bfloat16", "float32"), llama_server=Path,
        gguf=[], transformers_python=Path, requests=(1, 4, 16), tokens=128, long=1024, repeats=2, rounds=3,
    )  # fmt: skip
    if given.make:
        make(given.make, given.layers)
    elif bool(given.llama_server) != bool(given.gguf):
        raise SystemExit("--llama-server and --gguf go together")
    else:
        compare(report, given)


def peers(given: argparse.Namespace, vocab_size: int, stack: contextlib.ExitStack) -> dict[str, Measure]:
    """Starts the peers, ours first; `stack` ends them."""
    found: dict[str, Measure] = {
        name: partial(served, stack.enter_context(serving(command=command)).url, vocab_size)
        for name, command in servers(given).items()
    }
    for dtype in given.dtypes if given.transformers_python else ():
        if dtype not in FORMATS:
            generate = stack.enter_context(generating(given.transformers_python, given.model, dtype))
            found[f"transformers {dtype}"] = partial(generated, generate, vocab_size)
    return found


def compare(report: Report, given: argparse.Namespace) -> None:
    """Runs all rounds and reports speeds and ratios."""
    cfg = load_config(given.model)
    cells = [Load(n, given.tokens, given.tokens, given.repeats) for n in given.requests]
    cells.append(Load(1, given.long, 2, 2, first=True))
    with contextlib.ExitStack() as stack:
        measures = peers(given, cfg.vocab_size, stack)
        for measure in measures.values():  # what is slow once: pages of memory that are new
            measure(cells[0], given.rounds)
        figures = np.zeros((given.rounds, len(measures), len(cells)))
        for r in range(given.rounds):
            for c, cell in enumerate(cells):
                figures[r, :, c] = [measure(cell, r * len(cells) + c) for measure in measures.values()]
    middle, names = np.median(figures, axis=0), list(measures)
    titles = [f"{n} at once" for n in given.requests]
    speeds = [f"{title} (tokens/s)" for title in titles] + [f"first of {given.long} (ms)"]
    lines = ([name, *each[:-1], 1e3 / each[-1]] for name, each in zip(names, middle, strict=True))
    report.table("Speed", ["peer", *speeds], lines)
    ratios = figures[:, :1] / figures
    lines = ([f"{names[0]} / {name}", *map(spread, ratios[:, p].T)] for p, name in enumerate(names) if p)
    if len(names) > 1:
        report.table("Ratios", ["speed over", *titles, f"first of {given.long}"], lines)


if __name__ == "__main__":
    run(main)
