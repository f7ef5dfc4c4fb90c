"""Where sparse attention pays, by the plan's model: a layer's attention dense and sparse, by the tokens of a request.

    python -m benchmarks.sparse_plan

DeepSeek-V3.2 on an H200, output projection included, in microseconds: 48 requests that decode, and 2,048 tokens
spread evenly over prompts of that length. Arithmetic of `dsv3.plan.roofline`; nothing is compiled or measured.
"""

from configs.deepseek_v31 import DEEPSEEK_V31
from configs.deepseek_v32 import DEEPSEEK_V32
from configs.deployments import H200
from dsv3.plan.roofline import MicroBatch, decode_stages, prefill_stages, rates_of

TOKENS = (2_048, 4_989, 32_768, 131_072)
_FREE_IN_PREFILL = 108 / 132  # multiprocessors that transfers leave to kernels


def attention(tokens: int, cache_dtype: str) -> tuple[float, float, float, float]:
    """Returns the seconds of decode dense and sparse, and of prefill dense and sparse."""
    decode = MicroBatch(48, tokens, 32, cache_dtype=cache_dtype)
    prompt = MicroBatch(2_048, tokens / 2, 32, cache_dtype=cache_dtype, fewest=0)
    rates, taken = rates_of(H200, DEEPSEEK_V32, 1.0), rates_of(H200, DEEPSEEK_V32, _FREE_IN_PREFILL)
    return (
        decode_stages(DEEPSEEK_V31, rates, decode)["attention"],
        decode_stages(DEEPSEEK_V32, rates, decode)["attention"],
        prefill_stages(DEEPSEEK_V31, taken, prompt)["attention"],
        prefill_stages(DEEPSEEK_V32, taken, prompt)["attention"],
    )


def main() -> None:
    print("| tokens | pages | decode: dense | sparse | prefill: dense | sparse |\n|---|---|---|---|---|---|")
    for tokens in TOKENS:
        for cache_dtype in ("bfloat16", "fp8"):
            cells = [f"{seconds * 1e6:,.0f}" for seconds in attention(tokens, cache_dtype)]
            print(f"| {tokens:,} | {cache_dtype} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
