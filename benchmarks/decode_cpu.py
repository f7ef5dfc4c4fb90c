"""Greedy decode throughput on a CPU beside transformers' batch generate, on the same checkpoint and cores.

    python -m benchmarks.decode_cpu [--model DIR] [--transformers-python PATH] [--requests 16] [--tokens 128]

Both run in float32 and take turns, so a busy machine slows both. transformers runs with one thread and with all cores,
and the faster one counts, because torch's threads wait for each other where other work keeps a core busy. A round's
decode time is the time for `tokens` tokens less the time for one token. A round's ratio is our rate over theirs; the
median of the ratios counts. `--transformers-python` is an interpreter that has transformers and torch. Without it only
our own figure is printed.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import time
from pathlib import Path
from typing import Self

import numpy as np

import dsv3
from dsv3.llm import LLM
from dsv3.sampling_params import SamplingParams

PROMPT_TOKENS = 32

_WORKER = """
import json, sys, time
import torch
from transformers import AutoModelForCausalLM
torch.set_num_threads(int(sys.argv[2]))
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
prompts = torch.tensor(json.loads(sys.stdin.readline()))
print("ready", flush=True)
for line in sys.stdin:
    count = int(line)
    started = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=count,
                             min_new_tokens=count, do_sample=False, pad_token_id=0)
    seconds = time.perf_counter() - started
    print(json.dumps({"seconds": seconds, "tokens": out[:, prompts.shape[1]:].tolist()}), flush=True)
"""


class Transformers:
    """A process that runs transformers and generates on command."""

    def __init__(self, python: str, model: Path, prompts: list[list[int]], threads: int) -> None:
        self._process = subprocess.Popen(
            [python, "-c", _WORKER, str(model), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._send(json.dumps(prompts))
        assert self._receive() == "ready"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def generate(self, tokens: int) -> tuple[float, list[list[int]]]:
        self._send(str(tokens))
        answer = json.loads(self._receive())
        return answer["seconds"], answer["tokens"]

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _receive(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"the transformers process ended with {self._process.wait()}")
        return line


def ours(llm: LLM, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
    """Seconds and answers of one run. End tokens are ignored, as `min_new_tokens` does for transformers."""
    params = SamplingParams(temperature=0, max_tokens=tokens, min_tokens=0, ignore_eos=True)
    started = time.perf_counter()
    outputs = llm.generate(prompts, params)
    return time.perf_counter() - started, [o.outputs[0].token_ids for o in outputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(dsv3.__file__).parent / "bundled")
    parser.add_argument("--transformers-python")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()

    llm = LLM(args.model, dtype=args.dtype, max_model_len=512, max_num_seqs=args.requests, progress=False,
              enable_prefix_caching=False)  # fmt: skip
    vocab_size = llm.engine.model_cfg.vocab_size
    prompts = np.random.default_rng(0).integers(2, vocab_size, (args.requests, PROMPT_TOKENS)).tolist()
    ours(llm, prompts, args.tokens)
    result = {"requests": args.requests, "tokens": args.tokens, "dtype": args.dtype}
    if args.transformers_python is None:
        rates = [_rate(lambda n: ours(llm, prompts, n), args) for _ in range(args.rounds)]
        print(json.dumps(result | {"tokens_per_s": round(statistics.median(rates))}))
        return
    with contextlib.ExitStack() as stack:
        others = [
            stack.enter_context(Transformers(args.transformers_python, args.model, prompts, threads))
            for threads in sorted({1, os.cpu_count() or 1})
        ]
        theirs = others[0].generate(args.tokens)[1]
        same = sum(a == b for a, b in zip(ours(llm, prompts, args.tokens)[1], theirs, strict=True))
        pairs = [
            (_rate(lambda n: ours(llm, prompts, n), args), max(_rate(other.generate, args) for other in others))
            for _ in range(args.rounds)
        ]
    ratios = [mine / their for mine, their in pairs]
    result |= {
        "tokens_per_s": round(statistics.median(mine for mine, _ in pairs)),
        "transformers_tokens_per_s": round(statistics.median(their for _, their in pairs)),
        "ratio": round(statistics.median(ratios), 2),
        "ratios": [round(r, 2) for r in ratios],
        "equal_texts": f"{same} of {args.requests}",
    }
    print(json.dumps(result))


def _rate(generate, args: argparse.Namespace) -> float:
    """Decoded tokens per second in one round."""
    whole, first = generate(args.tokens)[0], generate(1)[0]
    return args.requests * (args.tokens - 1) / (whole - first)


if __name__ == "__main__":
    main()
