"""Greedy tokens of this engine beside a llama-server's, both in float32: whether both compute the same model.

    python -m benchmarks.cpu_greedy [--model DIR] --llama-server PATH --gguf FILE [--requests 4] [--tokens 32]

FILE is the model as `benchmarks/to_gguf.py` writes it in f32. Prompts are random token ids. A line per prompt: the
tokens up to the first that differs, and what ours is. llama-server cannot draw an end token here, and ours goes on
behind one: answers part where ours has it.
"""

import argparse
import json
import os
from itertools import takewhile
from pathlib import Path

import httpx
import numpy as np

from benchmarks.cpu_peers import Server, running
from dsv3.engine.build import bundled_model
from dsv3.llm import LLM
from dsv3.sampling_params import SamplingParams

PROMPT_TOKENS = 24


def ours(model: Path, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Returns the tokens of all prompts."""
    llm = LLM(model, dtype="float32", max_model_len=512, progress=False)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
    return [each.outputs[0].token_ids for each in outputs]


def theirs(url: str, prompt: list[int], tokens: int) -> list[int]:
    """Returns the tokens of one prompt."""
    options = {"temperature": 0, "top_k": 1, "return_tokens": True, "ignore_eos": True}
    body = options | {"prompt": prompt, "n_predict": tokens}
    return httpx.post(f"{url}/completion", json=body, timeout=300).raise_for_status().json()["tokens"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=bundled_model())
    parser.add_argument("--llama-server", type=Path, required=True)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32)
    arguments = parser.parse_args()

    vocab_size = json.loads((arguments.model / "config.json").read_text())["vocab_size"]
    prompts = np.random.default_rng(0).integers(10, vocab_size, (arguments.requests, PROMPT_TOKENS)).tolist()
    command = (str(arguments.llama_server), "--model", str(arguments.gguf), "--flash-attn", "off", "--no-webui",
               "--threads", str(os.cpu_count()), "--ctx-size", "2048", "--host", "127.0.0.1")  # fmt: skip
    with running(Server("llama.cpp", command)) as url:
        others = [theirs(url, prompt, arguments.tokens) for prompt in prompts]
    for mine, other in zip(ours(arguments.model, prompts, arguments.tokens), others, strict=True):
        same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(mine, other, strict=True))))
        behind = f"; ours goes on with token {mine[same]}" if same < len(mine) else ""
        print(f"{same} of {len(mine)} tokens equal{behind}")


if __name__ == "__main__":
    main()
