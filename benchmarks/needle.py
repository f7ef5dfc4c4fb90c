"""Finds a needle at the beginning of a long prompt, with DeepSeek-V4's rules at the published ratios and angles.

    JAX_PLATFORMS=cpu python -m benchmarks.needle [--ratio 4 128] [--tokens 300000] [--chunk 4096]

The model has one layer and handmade weights (`tests/dsv3/model/deepseek_v4_needle.py`): only an entry of the layer's
ratio keeps the needle, which stands among the first 200 tokens. The question ends the prompt. An engine computes the
prompt in chunks, in float32, and answers with one token: the needle, if the rules are right. With 1,280 tokens
`tests/dsv3/model/test_deepseek_v4_needle.py` shows that each wrong rule loses it.
"""

import time

import jax.numpy as jnp

from benchmarks.engines import answer
from benchmarks.record import Cell, Report, arguments, run
from dsv3 import SamplingParams
from dsv3.config.engine import EngineConfig, pages_for
from dsv3.config.model import ModelConfig
from dsv3.engine.components import EngineComponents
from dsv3.engine.engine import Engine
from dsv3.engine.functions import in_full_precision, model_functions
from dsv3.kv_cache.layout import window_pages, window_size
from dsv3.model import Params
from tests.dsv3.model import deepseek_v4_needle as needle


def main(report: Report) -> int:
    given = arguments(__doc__, ratio=tuple(needle.PLACES), tokens=300_000, chunk=4096)
    asked = given.tokens // needle.WINDOW * needle.WINDOW + needle.ASKED % needle.WINDOW
    columns = ["entries of so many tokens", "prompt (tokens)", "needle at", "found", "prompt (s)", "tokens/s"]
    rows = [_row(ratio, asked, given.chunk) for ratio in given.ratio]
    report.table("A needle in a long prompt", columns, rows)
    return 0 if all(found == "yes" for _, _, _, found, *_ in rows) else 1


def _row(ratio: int, asked: int, chunk: int) -> list[Cell]:
    prompt = needle.prompt(ratio, "far", asked)[: asked + 1].tolist()
    engine = _engine(needle.params(ratio, asked), needle.config(ratio), asked, chunk)
    sampling, started = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True), time.perf_counter()
    [tokens] = answer(engine, [prompt], sampling).tokens
    seconds = time.perf_counter() - started
    found = "yes" if tokens == [needle.NEEDLE] else f"no: {tokens}"
    return [ratio, len(prompt), needle.PLACES[ratio], found, seconds, len(prompt) / seconds]


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
