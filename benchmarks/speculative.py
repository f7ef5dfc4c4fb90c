"""What drafts gain on the bundled model, on text that it was not trained on.

    JAX_PLATFORMS=cpu python -m benchmarks.speculative [--method mtp] [--rounds 3] [--tokens 128]

Prompts are beginnings of held-out files of Python's standard library. Engines with 0 to 3 drafts answer the same
requests in turns, greedily and at temperature 0.7 with seeds, 1, 4 and 16 at a time. Prints a line per case:
acceptance by place, tokens per row and step, the decode speed over that without drafts (median of the rounds), the
host's time per step over that without drafts, and whether all texts are those without drafts.
"""

import argparse
import statistics
import time
from typing import NamedTuple

import numpy as np

from dsv3 import LLM, SamplingParams
from dsv3.training.corpus import documents, split_documents, standard_library

SIZES = (1, 4, 16)
SAMPLING = {"greedy": {"temperature": 0.0}, "0.7": {"temperature": 0.7, "top_p": 0.95, "seed": 7}}


class Run(NamedTuple):
    """One round of one engine: seconds, the host's seconds, steps, and what became of the drafts."""

    seconds: float
    host_seconds: float
    steps: int
    rows: int
    accepted: np.ndarray
    texts: list[list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", default="mtp", choices=("mtp", "ngram"))
    for name, value in (("rounds", 3), ("tokens", 128), ("drafts", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    engines = [_engine(arguments.method, drafts) for drafts in range(arguments.drafts + 1)]
    prompts = _prompts(engines[0], max(SIZES))
    print("| text | requests | drafts | accepted by place | tokens per row | speed | host per step | same texts |")
    print("|---|---|---|---|---|---|---|---|")
    for name, sampling in SAMPLING.items():
        for size in SIZES:
            params = SamplingParams(max_tokens=arguments.tokens, ignore_eos=True, **sampling)
            runs = [[_run(llm, prompts[:size], params) for llm in engines] for _ in range(arguments.rounds + 1)][1:]
            for drafts in range(1, len(engines)):
                print(_line(name, size, drafts, [(each[0], each[drafts]) for each in runs]), flush=True)
    assert all(llm.engine.stats().recompilations == 0 for llm in engines)


def _engine(method: str, drafts: int) -> LLM:
    config = {"method": method, "num_speculative_tokens": drafts} if drafts else None
    limits = {"max_num_seqs": max(SIZES), "max_model_len": 512, "max_num_batched_tokens": 1024}
    return LLM(progress=False, dtype="float32", speculative_config=config, enable_prefix_caching=False, **limits)


def _prompts(llm: LLM, count: int) -> list[list[int]]:
    """Returns the first 96 tokens of held-out files."""
    _, held_out = split_documents(documents(standard_library()))
    texts = [document.text for document in held_out if len(document.text) > 4000]
    return [llm.tokenizer.encode(text[:2000])[:96] for text in texts[:count]]


def _run(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> Run:
    before, started = llm.engine.stats(), time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds, after = time.perf_counter() - started, llm.engine.stats()
    rows, accepted = 0, np.zeros(0)
    if (drafts := after.jobs.get("draft")) is not None:
        earlier = before.jobs["draft"]
        rows = drafts.num_drafts - earlier.num_drafts
        accepted = np.subtract(drafts.num_accepted_tokens_per_pos, earlier.num_accepted_tokens_per_pos)
    texts = [output.outputs[0].token_ids for output in outputs]
    host = after.host_time_sum - before.host_time_sum
    return Run(seconds, host, after.steps - before.steps, rows, accepted, texts)


def _line(name: str, size: int, drafts: int, pairs: list[tuple[Run, Run]]) -> str:
    _, last = pairs[-1]
    places = ", ".join(f"{share:.0%}" for share in last.accepted / last.rows)
    speed = statistics.median(plain.seconds / drafting.seconds for plain, drafting in pairs)
    host = statistics.median(
        (drafting.host_seconds / drafting.steps) / (plain.host_seconds / plain.steps) for plain, drafting in pairs
    )
    same = sum(a == b for plain, drafting in pairs for a, b in zip(plain.texts, drafting.texts, strict=True))
    tokens = 1 + last.accepted.sum() / last.rows
    cells = (
        name,
        size,
        drafts,
        places,
        f"{tokens:.2f}",
        f"{speed:.2f}",
        f"{host:.2f}",
        f"{same} of {size * len(pairs)}",
    )
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
