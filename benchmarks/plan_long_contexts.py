"""Plans of long contexts on 8 H200: what fits and how fast it is, with pages replicated or divided. Nothing is timed.

    JAX_PLATFORMS=cpu python -m benchmarks.plan_long_contexts

It needs the extra `aot` and some ten minutes of one core: the decode step of DeepSeek-V3 is compiled for as many
requests of each length as fit. A length of 1M is beyond the model's own 163,840 tokens; it shows memory and speed.
DeepSeek-V4's steps are planned from shapes.
"""

from collections.abc import Iterator

from benchmarks.record import Cell, Report, arguments, run
from configs.deepseek_v3 import DEEPSEEK_V3
from configs.deepseek_v4 import DEEPSEEK_V4_FLASH, DEEPSEEK_V4_PRO
from configs.deployments import H200
from dsv3.config.model import ModelConfig
from tools.plan.deployment import Deployment
from tools.plan.memory import Memory, memory_of
from tools.plan.plan import StepPlan, step_plan
from tools.plan.programs import compile_step, lay_out
from tools.plan.uncompiled import WORKING, StepEstimate, step_estimate

MODELS = {
    "DeepSeek-V3": DEEPSEEK_V3,
    "DeepSeek-V4-Flash": DEEPSEEK_V4_FLASH,
    "DeepSeek-V4-Pro": DEEPSEEK_V4_PRO,
}
CONTEXTS = {"128K": 2**17, "1M": 2**20}
LAYOUTS = {"8 ranks": (1, 1), "tensor parallel": (8, 1), "pages divided": (8, 8)}
"""Tensor-parallel size, and how many devices divide a page."""
REPLICATED = "tensor parallel"
CACHES = "bfloat16", "fp8"
COLUMNS = [
    "context", "cache", "layout", "of a token per GPU (B)", "longest context (tokens)", "requests at once", "step (ms)",
    "tokens/s per GPU", "times tensor parallel",
]  # fmt: skip


def main(report: Report) -> None:
    arguments(__doc__)
    for name, model in MODELS.items():
        title = f"{name} on 8 H200, decode: as many requests as fit, each of the same length"
        report.table(title, COLUMNS, rows(model))


def rows(model: ModelConfig) -> Iterator[list[Cell]]:
    """Yields a row for each length, cache and layout; without requests at once where none fits."""
    for context, length in CONTEXTS.items():
        for cache in CACHES if model.compressed is None else CACHES[-1:]:
            rates: dict[str, float] = {}
            for name in LAYOUTS:
                memory, requests = fitting(model, name, cache, length)
                ranks = 8 // LAYOUTS[name][0]
                cells: list[Cell] = [context, cache, name, memory.token, memory.tokens_left, ranks * requests]
                if not requests:
                    yield [*cells, None, None, None]
                    continue
                step = planned_step(model, deployment(name, cache, length, requests))
                rates[name] = step.tokens_per_device
                times = rates[name] / rates[REPLICATED] if REPLICATED in rates else None
                yield [*cells, 1e3 * step.seconds, rates[name], times]


def deployment(name: str, cache: str, length: int, requests: int) -> Deployment:
    """Returns the deployment of `requests` of `length` tokens in each rank."""
    tensor, divided = LAYOUTS[name]
    return Deployment(
        name=name,
        device=H200,
        nodes=1,
        decode_requests=requests,
        context_length=length,
        max_model_len=length,
        tensor_parallel=tensor,
        decode_context_parallel=divided,
        kv_cache_dtype=cache,
    )


def fitting(model: ModelConfig, name: str, cache: str, length: int) -> tuple[Memory, int]:
    """Returns the memory of a device beside an assumed working memory, and the requests of a rank that fit."""
    memory = memory_of(lay_out(model, deployment(name, cache, length, 1)), WORKING)
    return memory, memory.tokens_left // length


def planned_step(model: ModelConfig, of: Deployment) -> StepPlan | StepEstimate:
    """Returns the plan of a decode step. Raises ValueError where it takes more working memory than is assumed."""
    planned = lay_out(model, of)
    if model.compressed is not None:
        return step_estimate(planned, "decode")
    compiled = compile_step(planned, "decode")
    taken = max(program.temporaries + 2 * program.results for program in compiled)
    if taken > WORKING:
        raise ValueError(f"{of.name}: a decode step takes {taken} bytes of working memory, more than {WORKING}")
    return step_plan(planned, compiled)


if __name__ == "__main__":
    run(main)
