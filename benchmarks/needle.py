"""Finds a needle at the beginning of a long prompt, with DeepSeek-V4's rules at the published ratios and angles.

    JAX_PLATFORMS=cpu python -m benchmarks.needle [--ratio 4,128] [--tokens 300000] [--chunk 4096]
    JAX_PLATFORMS=cpu python -m benchmarks.needle --wrong [--tokens 20480]

The model has one layer and handmade weights (`tests/dsv3/model/deepseek_v4_needle.py`): only an entry of the layer's
ratio keeps the needle, which stands among the first 200 tokens. The question ends the prompt. An engine computes the
prompt in chunks, in float32, and answers with one token: the needle, if the rules are right. With 1,280 tokens
`tests/dsv3/model/test_deepseek_v4_needle.py` shows that each wrong rule loses it, and `--wrong` with as many as you
like, for the rules that engines compute by the replaced functions and that are not those of the window alone.
"""

import argparse
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks.record import Cell, Report, run
from dsv3 import SamplingParams
from dsv3.config.engine import EngineConfig, pages_for
from dsv3.config.model import ModelConfig
from dsv3.engine.components import EngineComponents
from dsv3.engine.engine import Engine
from dsv3.engine.functions import in_full_precision, model_functions
from dsv3.kv_cache.layout import window_pages, window_size
from dsv3.model import Params
from dsv3.model.layers import compressed_uncached
from dsv3.scheduler.request import EngineRequest
from tests.dsv3.model import deepseek_v4_needle as needle
from tests.dsv3.model.test_deepseek_v4_needle import LOST


def main(report: Report) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ratio", type=lambda text: [int(ratio) for ratio in text.split(",")], default=[*needle.PLACES]
    )
    parser.add_argument("--tokens", type=int, default=300_000)
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--wrong", action="store_true")
    arguments = parser.parse_args()
    asked = arguments.tokens // needle.WINDOW * needle.WINDOW + needle.ASKED % needle.WINDOW
    if arguments.wrong:
        columns = ["wrong rule", "entries of so many tokens", "prompt (tokens)", "lost"]
        table = report.table(
            "A needle under wrong rules", columns, _wrong_rows(arguments.ratio, asked, arguments.chunk)
        )
        return 0 if all(lost == "yes" for *_, lost in table.rows) else 1
    columns = ["entries of so many tokens", "prompt (tokens)", "needle at", "found", "prompt (s)", "tokens/s"]
    rows = [_row(ratio, asked, arguments.chunk) for ratio in arguments.ratio]
    report.table("A needle in a long prompt", columns, rows)
    return 0 if all(found == "yes" for _, _, _, found, *_ in rows) else 1


def _row(ratio: int, asked: int, chunk: int) -> list[Cell]:
    prompt = needle.prompt(ratio, "far", asked)[: asked + 1].tolist()
    engine = _engine(needle.params(ratio, asked), needle.config(ratio), asked, chunk)
    started = time.perf_counter()
    answer = _answer(engine, prompt)
    seconds = time.perf_counter() - started
    found = "yes" if answer == [needle.NEEDLE] else f"no: {answer}"
    return [ratio, len(prompt), needle.PLACES[ratio], found, seconds, len(prompt) / seconds]


def _wrong_rows(ratios: list[int], asked: int, chunk: int) -> Iterator[list[Cell]]:
    for rule, wrong, ratio, question in LOST:
        if ratio not in ratios:
            continue
        replaced: list[Any] = []
        with pytest.MonkeyPatch.context() as patch:

            def replace(module: Any, name: str, other: Any, patch: Any = patch, replaced: Any = replaced) -> None:
                replaced.append(module)
                patch.setattr(module, name, other)

            params, cfg = wrong(needle.params(ratio, asked), needle.config(ratio), replace)
            if compressed_uncached in replaced:  # which an engine does not call
                continue
            jax.clear_caches()  # what was traced with the right rule
            prompt = needle.prompt(ratio, question, asked)[: asked + 1].tolist()
            answer = _answer(_engine(params, cfg, asked, chunk), prompt)
        yield [rule, ratio, len(prompt), "no" if answer == [needle.NEEDLE] else "yes"]
    jax.clear_caches()


def _answer(engine: Engine, prompt: list[int]) -> list[int]:
    params, answer = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True), list[int]()
    engine.add(EngineRequest(request_id=0, prompt_token_ids=prompt, sampling=params))
    while engine.has_work:
        for output in engine.step():
            answer += output.token_ids
    return answer


def _engine(params: Params, cfg: ModelConfig, asked: int, chunk: int) -> Engine:
    """Returns a warm engine."""
    pages = pages_for(asked + 2, cfg.page_size)
    limits = EngineConfig(
        max_model_len=asked + 2,
        num_pages=pages,
        max_num_seqs=1,
        max_num_batched_tokens=chunk,
        prefill_batch_sizes=str(chunk),
        page_size=cfg.page_size,
        window_size=window_size(cfg),
        num_window_pages=window_pages(cfg, "float32", pages, 1),
        cache_dtype="float32",
    )
    functions = in_full_precision(model_functions(dtype=jnp.float32))
    engine = Engine(EngineComponents.on_devices(functions, params, cfg, limits))
    engine.warm_up()
    return engine


if __name__ == "__main__":
    run(main)
