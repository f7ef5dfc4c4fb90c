"""What benchmarks do with an engine: make one of the bundled model, let it answer prompts, and time that."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from dsv3.config.options import EngineOptions
from dsv3.engine.build import build_engine, bundled_model
from dsv3.engine.engine import Engine
from dsv3.sampling_params import SamplingParams
from dsv3.scheduler.request import EngineRequest


class Answers(NamedTuple):
    """Tokens of each answer; wall seconds, and processor seconds of all threads, from the first step to the last."""

    tokens: list[list[int]]
    seconds: float
    processor_seconds: float


def bundled_engine(**options: Any) -> Engine:
    """Returns a warm engine of the bundled model."""
    engine = build_engine(bundled_model(), EngineOptions(**options), progress=False)
    engine.warm_up()
    return engine


def answer(engine: Engine, prompts: Sequence[list[int]], *params: SamplingParams) -> Answers:
    """Answers all prompts at once, each with its own `params` or all with one; raises as `check_programs` does."""
    each = params * len(prompts) if len(params) == 1 else params
    for i, (prompt, sampling) in enumerate(zip(prompts, each, strict=True)):
        engine.add(EngineRequest(request_id=i, prompt_token_ids=prompt, sampling=sampling))
    tokens: list[list[int]] = [[] for _ in prompts]
    started, processor = time.perf_counter(), time.process_time()
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
    found = Answers(tokens, time.perf_counter() - started, time.process_time() - processor)
    check_programs(engine)
    return found


def check_programs(engine: Engine) -> None:
    """Raises RuntimeError where a warm engine has compiled a program: its steps would measure that."""
    if count := engine.stats().recompilations:
        raise RuntimeError(f"a warm engine has compiled {count} programs; no step may need one that warm_up lacks")
