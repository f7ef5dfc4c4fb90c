"""Where sparse attention pays, by the plan's model: a layer's attention dense and sparse, by the tokens of a request.

    python -m benchmarks.sparse_plan

DeepSeek-V3.2 on an H200, output projection included, in microseconds: 48 requests that decode, and a chunk of 2,048
tokens, the mean over the chunks of a prompt. Prefill takes the masked form up to its room, and the sparse one beyond
(`dsv3/model/forms.py`). Arithmetic of `tools.plan.roofline`; nothing is compiled or measured.
"""

from configs.deepseek_v31 import DEEPSEEK_V31
from configs.deepseek_v32 import DEEPSEEK_V32
from configs.deployments import H200
from dsv3.config.device_rates import PEAKS
from dsv3.model.forms import masked_room
from tools.plan.deployment import PlannedBatch, kernel_rates
from tools.plan.roofline import decode_stages, prefill_stages

TOKENS = (2_048, 4_096, 8_192, 16_384, 32_768, 131_072)
BUCKETS = (64, 256, 1_024, 2_048, 4_096, 8_192, 16_384)
CHUNK = 2_048
_FREE_IN_PREFILL = 108 / 132  # multiprocessors that transfers leave to kernels


def decoding(tokens: int, cache_dtype: str) -> tuple[float, float]:
    """Returns the seconds of decode, dense and sparse."""
    batch, rates = PlannedBatch(48, tokens, 32, cache_dtype=cache_dtype), kernel_rates(H200, DEEPSEEK_V32, 1.0)
    return tuple(decode_stages(model, rates, batch)["attention"] for model in (DEEPSEEK_V31, DEEPSEEK_V32))


def prompts(tokens: int, cache_dtype: str) -> tuple[float, float, float]:
    """Returns the mean seconds of a chunk of a prompt: dense, sparse in every chunk, and as it is taken."""
    rates, room = (
        kernel_rates(H200, DEEPSEEK_V32, _FREE_IN_PREFILL),
        masked_room(DEEPSEEK_V32, PEAKS["H200"], cache_dtype, CHUNK),
    )
    starts = range(0, tokens, CHUNK)

    def mean(model, room: int) -> float:
        return sum(_chunk(model, rates, cache_dtype, start, room) for start in starts) / len(starts)

    return mean(DEEPSEEK_V31, 0), mean(DEEPSEEK_V32, 0), mean(DEEPSEEK_V32, room)


def _chunk(model, rates, cache_dtype: str, start: int, room: int) -> float:
    fits = room if start + CHUNK <= room else 0
    batch = PlannedBatch(CHUNK, start + CHUNK / 2, 32, cache_dtype=cache_dtype, min_keys=start, kv_capacity=fits)
    return prefill_stages(model, rates, batch)["attention"]


def main() -> None:
    print("| tokens | pages | decode: dense | sparse | prefill: dense | sparse | as taken |")
    print("|---|---|---|---|---|---|---|")
    for tokens in TOKENS:
        for cache_dtype in ("bfloat16", "fp8"):
            seconds = *decoding(tokens, cache_dtype), *prompts(tokens, cache_dtype)
            print(f"| {tokens:,} | {cache_dtype} | {' | '.join(f'{each * 1e6:,.0f}' for each in seconds)} |")
    print("\n| tokens of a step | room of the masked form, bfloat16 | fp8 |\n|---|---|---|")
    for size in BUCKETS:
        rooms = [masked_room(DEEPSEEK_V32, PEAKS["H200"], cache_dtype, size) for cache_dtype in ("bfloat16", "fp8")]
        print(f"| {size:,} | {' | '.join(f'{room:,}' for room in rooms)} |")


if __name__ == "__main__":
    main()
