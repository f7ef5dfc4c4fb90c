"""What drafts gain on the bundled model, on text that it was not trained on.

    JAX_PLATFORMS=cpu python -m benchmarks.speculative [--method mtp] [--rounds 3] [--tokens 128]
    python -m benchmarks.speculative --synthetic 0.85,0.7,0.6 [--model DIR]

Prompts are beginnings of held-out files of Python's standard library. Engines with 0 to 3 drafts answer the same
requests in turns, greedily and at temperature 0.7 with seeds, 1, 4 and 16 at a time. Prints a line per case:
acceptance by place, tokens per row and step, the decode speed over that without drafts (median of the rounds), the
host's time per step over that without drafts, and whether all texts are those without drafts.

With `--synthetic` the weights are random, of the shape that DIR's config.json says, and a coin accepts drafts at the
given rates: one for each draft once those before it are accepted, or the shares of rows by place. So the speed at a
known acceptance can be measured without a checkpoint. Texts then mean nothing, and are not compared.
"""

import argparse
import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from dsv3 import SamplingParams
from dsv3.config.hugging_face import load_config
from dsv3.config.options import EngineOptions
from dsv3.config.speculative import acceptance_by_place
from dsv3.engine.build import build_engine, bundled_model
from dsv3.engine.components import EngineComponents
from dsv3.engine.dtypes import resolve_dtypes
from dsv3.engine.engine import Engine
from dsv3.engine.functions import model_functions
from dsv3.engine.limits import Hardware, engine_config
from dsv3.engine.stored import use_compilation_cache
from dsv3.model import initialize
from dsv3.scheduler.request import EngineRequest
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="mtp", choices=("mtp", "ngram"))
    for name, value in (("rounds", 3), ("tokens", 128), ("drafts", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--synthetic", type=lambda text: [float(rate) for rate in text.split(",")])
    parser.add_argument("--model", type=Path, default=bundled_model())
    arguments = parser.parse_args()
    if arguments.synthetic is None:
        engines = [_engine(_config(arguments.method, n)) for n in range(arguments.drafts + 1)]
    else:
        print("synthetic acceptance, random weights: the texts mean nothing")
        engines = [_random_engine(arguments.model, n, arguments.synthetic) for n in range(arguments.drafts + 1)]
    for engine in engines:
        engine.warm_up()
    prompts = _prompts() if arguments.synthetic is None else _random_prompts(engines[0].model_cfg.vocab_size)
    print("| text | requests | drafts | accepted by place | tokens per row | speed | host per step | same texts |")
    print("|---|---|---|---|---|---|---|---|")
    for name, sampling in SAMPLING.items():
        for size in SIZES:
            if arguments.synthetic:
                sampling = sampling | {"seed": None}  # requests of one seed would have the same coins
            params = SamplingParams(max_tokens=arguments.tokens, ignore_eos=True, **sampling)
            runs = [[_run(engine, prompts[:size], params) for engine in engines] for _ in range(arguments.rounds + 1)]
            for drafts in range(1, len(engines)):
                pairs = [(each[0], each[drafts]) for each in runs[1:]]
                same = "-" if arguments.synthetic else _same(pairs)
                print(_line((name, size, drafts), pairs, same), flush=True)
    assert all(engine.stats().recompilations == 0 for engine in engines)


def _config(method: str, drafts: int) -> dict[str, Any] | None:
    return {"method": method, "num_speculative_tokens": drafts} if drafts else None


def _engine(config: dict[str, Any] | None) -> Engine:
    options = EngineOptions(dtype="float32", speculative_config=config, enable_prefix_caching=False, **LIMITS)
    return build_engine(bundled_model(), options, progress=False)


def _random_engine(directory: Path, drafts: int, given: list[float]) -> Engine:
    """Returns an engine with random weights that accepts by coins."""
    model = load_config(directory)
    if not model.num_nextn_predict_layers:
        raise SystemExit(f"{directory}: a model without a multi-token prediction module makes no drafts")
    model = dataclasses.replace(model, num_nextn_predict_layers=int(drafts > 0), fp8=None)
    options = EngineOptions(speculative_config=_config("mtp", drafts), enable_prefix_caching=False, **LIMITS)
    use_compilation_cache(options.compilation_cache_dir)
    dtypes = resolve_dtypes(model, options, jax.devices()[0])
    params = initialize(model, jax.random.key(0), dtypes.compute)
    cfg = engine_config(model, options, Hardware(), dtypes)
    if drafts:
        rates = acceptance_by_place("--synthetic", given[0] if len(given) == 1 else given[:drafts], drafts)
        synthetic = {"synthetic_acceptance_rates": list(rates)}
        cfg = dataclasses.replace(cfg, speculative_config=_config("mtp", drafts) | synthetic)
    functions = model_functions(dtype=dtypes.compute, drafts=bool(drafts))
    return Engine(EngineComponents.on_devices(functions, params, model, cfg))


def _prompts() -> list[list[int]]:
    """Returns the first tokens of held-out files."""
    tokenizer = Tokenizer.from_directory(bundled_model())
    _, held_out = split_documents(documents(standard_library()))
    texts = [document.text for document in held_out if len(document.text) > 4000]
    return [tokenizer.encode(text[:2000])[:PROMPT] for text in texts[: max(SIZES)]]


def _random_prompts(vocab_size: int) -> list[list[int]]:
    return np.random.default_rng(0).integers(0, vocab_size, (max(SIZES), PROMPT)).tolist()


def _run(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> Run:
    before, started = engine.stats(), time.perf_counter()
    for number, prompt in enumerate(prompts):
        engine.add(EngineRequest(request_id=number, prompt_token_ids=prompt, sampling=params))
    texts: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for output in engine.step():
            texts[output.request_id] += output.token_ids
    seconds, after = time.perf_counter() - started, engine.stats()
    rows, accepted = 0, np.zeros(0)
    if (drafts := after.jobs.get("draft")) is not None:
        earlier = before.jobs["draft"]
        rows = drafts.num_drafts - earlier.num_drafts
        accepted = np.subtract(drafts.num_accepted_tokens_per_pos, earlier.num_accepted_tokens_per_pos)
    host = after.host_time_sum - before.host_time_sum
    return Run(seconds, host, after.steps - before.steps, rows, accepted, texts)


def _line(case: tuple[str, int, int], pairs: list[tuple[Run, Run]], same: str) -> str:
    _, last = pairs[-1]
    places = ", ".join(f"{share:.0%}" for share in last.accepted / last.rows)
    speed = statistics.median(plain.seconds / drafting.seconds for plain, drafting in pairs)
    host = statistics.median(
        (drafting.host_seconds / drafting.steps) / (plain.host_seconds / plain.steps) for plain, drafting in pairs
    )
    tokens = 1 + last.accepted.sum() / last.rows
    return f"| {' | '.join(map(str, (*case, places, f'{tokens:.2f}', f'{speed:.2f}', f'{host:.2f}', same)))} |"


def _same(pairs: list[tuple[Run, Run]]) -> str:
    """Counts the texts that are those without drafts."""
    same = [a == b for plain, drafting in pairs for a, b in zip(plain.texts, drafting.texts, strict=True)]
    return f"{sum(same)} of {len(same)}"


if __name__ == "__main__":
    main()
