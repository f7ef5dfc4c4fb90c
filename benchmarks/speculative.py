"""What drafts gain on the bundled model, on text that it was not trained on.

    JAX_PLATFORMS=cpu python -m benchmarks.speculative [--method mtp] [--rounds 3] [--tokens 128]
    python -m benchmarks.speculative --synthetic 0.85,0.7,0.6 [--model DIR] [--method dspark]

Prompts are beginnings of held-out files of Python's standard library. Engines with 0 to 3 drafts, or 0 to 5 of DSpark,
answer the same requests in turns, greedily and at temperature 0.7 with seeds, 1, 4 and 16 at a time. A line per case
has: acceptance by place, tokens per row and step, the decode speed over that without drafts (median of the rounds), the
host's time per step over that without drafts, and whether all texts are those without drafts.

With `--synthetic` the weights are random, of the shape that DIR's config.json says, and a coin accepts drafts at the
given rates: one for each draft once those before it are accepted, or the shares of rows by place. So the speed at a
known acceptance can be measured without a checkpoint. Texts then mean nothing, and are not compared. The bundled model
has no stages of DSpark, so `--method dspark` needs DIR.
"""

import argparse
import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.engines import answer, bundled_engine
from benchmarks.record import Cell, Report, arguments, run, spread
from dsv3 import SamplingParams
from dsv3.config.hugging_face import load_config
from dsv3.config.options import EngineOptions
from dsv3.config.speculative import acceptance_by_place
from dsv3.engine.build import bundled_model, served
from dsv3.engine.components import EngineComponents
from dsv3.engine.dtypes import resolve_dtypes
from dsv3.engine.engine import Engine
from dsv3.engine.functions import model_functions
from dsv3.engine.limits import Hardware, engine_config
from dsv3.engine.stored import use_compilation_cache
from dsv3.model import initialize
from dsv3.text.tokenizer import Tokenizer
from training.corpus import documents, split_documents, standard_library

SIZES = (1, 4, 16)
PROMPT = 96
SAMPLING = {"greedy": {"temperature": 0.0}, "0.7": {"temperature": 0.7, "top_p": 0.95, "seed": 7}}
LIMITS = {"max_num_seqs": max(SIZES), "max_model_len": 512, "max_num_batched_tokens": 1024}


class Run(NamedTuple):
    """One round of one engine: seconds, the host's seconds, steps, and what became of the drafts."""

    seconds: float
    host_seconds: float
    steps: int
    rows: int
    accepted: np.ndarray
    texts: list[list[int]]


def main(report: Report) -> None:
    given = arguments(__doc__, method="mtp", rounds=3, tokens=128, drafts=int, synthetic=str, model=Path)
    method, synthetic = given.method, given.synthetic and [float(rate) for rate in given.synthetic.split(",")]
    if method == "dspark" and (synthetic is None or given.model is None):
        raise SystemExit("--method dspark: the bundled model has no stages of DSpark; give --synthetic and --model")
    count = range((given.drafts or (5 if method == "dspark" else 3)) + 1)
    if synthetic is None:
        options = {"dtype": "float32", "enable_prefix_caching": False, **LIMITS}
        engines = [bundled_engine(speculative_config=_config(method, n), **options) for n in count]
    else:
        engines = [_random_engine(given.model, method, n, synthetic) for n in count]
    prompts = _prompts() if synthetic is None else _random_prompts(engines[0].model_cfg.vocab_size)
    columns = ["text", "requests", "drafts", "accepted by place", "tokens per row", "speed", "host per step",
               "same texts"]  # fmt: skip
    title = "Over no drafts" + ("; synthetic acceptance and random weights: texts mean nothing" if synthetic else "")
    report.table(title, columns, _lines(engines, prompts, given))


def _lines(engines: list[Engine], prompts: list[list[int]], given: argparse.Namespace) -> Iterator[list[Cell]]:
    for (name, sampling), size in itertools.product(SAMPLING.items(), SIZES):
        if given.synthetic:
            sampling = sampling | {"seed": None}  # requests of one seed would have the same coins
        params = SamplingParams(max_tokens=given.tokens, ignore_eos=True, **sampling)
        runs = [[_run(engine, prompts[:size], params) for engine in engines] for _ in range(given.rounds + 1)]
        for drafts in range(1, len(engines)):
            pairs = [(each[0], each[drafts]) for each in runs[1:]]
            same = [a == b for plain, drafting in pairs for a, b in zip(plain.texts, drafting.texts, strict=True)]
            equal = None if given.synthetic else f"{sum(same)} of {len(same)}"
            yield [name, size, drafts, *_figures(pairs), equal]


def _config(method: str, drafts: int) -> dict[str, Any] | None:
    return {"method": method, "num_speculative_tokens": drafts} if drafts else None


def _random_engine(directory: Path | None, method: str, drafts: int, given: list[float]) -> Engine:
    """Returns a warm engine with random weights that accepts by coins."""
    directory = directory or bundled_model()
    options = EngineOptions(speculative_config=_config(method, drafts), enable_prefix_caching=False, **LIMITS)
    try:
        model = served(load_config(directory), options)
    except ValueError as error:
        raise SystemExit(f"{directory}: {error}") from None
    model = dataclasses.replace(model, fp8=None, fp4_experts=False)
    use_compilation_cache(options.compilation_cache_dir)
    dtypes = resolve_dtypes(model, options, jax.devices()[0])
    params = initialize(model, jax.random.key(0), dtypes.compute)
    cfg = engine_config(model, options, Hardware(), dtypes)
    if drafts:
        rates = acceptance_by_place("--synthetic", given[0] if len(given) == 1 else given[:drafts], drafts)
        synthetic = {"synthetic_acceptance_rates": list(rates)}
        cfg = dataclasses.replace(cfg, speculative_config=_config(method, drafts) | synthetic)
    modules, blocks = bool(model.num_nextn_predict_layers), model.dspark is not None
    functions = model_functions(dtype=dtypes.compute, drafts=modules, blocks=blocks)
    engine = Engine(EngineComponents.on_devices(functions, params, model, cfg))
    engine.warm_up()
    return engine


def _prompts() -> list[list[int]]:
    """Returns the first tokens of held-out files."""
    tokenizer = Tokenizer.from_directory(bundled_model())
    _, held_out = split_documents(documents(standard_library()))
    texts = [document.text for document in held_out if len(document.text) > 4000]
    return [tokenizer.encode(text[:2000])[:PROMPT] for text in texts[: max(SIZES)]]


def _random_prompts(vocab_size: int) -> list[list[int]]:
    return np.random.default_rng(0).integers(0, vocab_size, (max(SIZES), PROMPT)).tolist()


def _run(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> Run:
    before = engine.stats()
    texts, seconds, _ = answer(engine, prompts, params)
    after = engine.stats()
    rows, accepted = 0, np.zeros(0)
    if (drafts := after.jobs.get("draft")) is not None:
        earlier = before.jobs["draft"]
        rows = drafts.num_drafts - earlier.num_drafts
        accepted = np.subtract(drafts.num_accepted_tokens_per_pos, earlier.num_accepted_tokens_per_pos)
    host = after.host_time_sum - before.host_time_sum
    return Run(seconds, host, after.steps - before.steps, rows, accepted, texts)


def _figures(pairs: list[tuple[Run, Run]]) -> list[Cell]:
    """Returns acceptance by place, tokens per row, and the ratios of speed and of the host's time per step."""
    _, last = pairs[-1]
    places = ", ".join(f"{share:.0%}" for share in last.accepted / last.rows)
    speed = spread(plain.seconds / drafting.seconds for plain, drafting in pairs)
    per_step = ([each.host_seconds / each.steps for each in pair] for pair in pairs)
    return [places, 1 + last.accepted.sum() / last.rows, speed, spread(some / none for none, some in per_step)]


if __name__ == "__main__":
    run(main)
