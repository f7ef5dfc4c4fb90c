"""How much of prefill is padding with other tables of buckets. Arithmetic only: nothing is compiled.

    python -m benchmarks.buckets

All ranks have a number of tokens to compute, which is drawn evenly from a range, and steps take the buckets that the
engine takes (`chunks.batch_size`) until nothing is left. The time is the plan's: each token of a bucket takes as long
as another, and a step as long as 512 tokens more. Each bucket above a table's first costs two programs on a GPU.
"""

import statistics
from collections.abc import Iterator

from dsv3.config.engine import EngineConfig
from dsv3.scheduler.chunks import batch_size

FIXED = 512
"""Tokens that take as long as the fixed part of a step."""
RANGES = ((64, 1024), (1024, 4096), (4096, 16_384))
TABLES = {
    "a factor of 4": (64, 256, 1024, 4096, 16_384),
    "4, from 1,024 on 2: served": EngineConfig(1, 1, max_num_batched_tokens=16_384).prefill_buckets,
    "2": (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384),
    "4, from 1,024 on 1.33 and 1.5": (64, 256, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12_288, 16_384),
}


def main() -> None:
    print("| buckets | number | " + " | ".join(f"{low:,} to {high:,} tokens" for low, high in RANGES) + " |")
    print("|---" * (2 + len(RANGES)) + "|")
    for name, sizes in TABLES.items():
        print(f"| {name} | {len(sizes)} | " + " | ".join(described(sizes, *each) for each in RANGES) + " |")


def described(sizes: tuple[int, ...], low: int, high: int) -> str:
    """Returns the padding over the tokens, the steps, and the time over that of one step without padding."""
    amounts = range(low + 1, high + 1, 97)
    steps = [list(taken(tokens, sizes)) for tokens in amounts]
    padding = [sum(each) / tokens - 1 for tokens, each in zip(amounts, steps, strict=True)]
    times = [(sum(each) + FIXED * len(each)) / (tokens + FIXED) for tokens, each in zip(amounts, steps, strict=True)]
    mean = statistics.mean
    return f"{100 * mean(padding):.1f} %, {mean(map(len, steps)):.1f} steps, {mean(times):.2f}"


def taken(tokens: int, sizes: tuple[int, ...]) -> Iterator[int]:
    """Yields the buckets of the steps that compute `tokens` on each rank."""
    while tokens > 0:
        size = batch_size([tokens], sizes)
        yield size
        tokens -= size


if __name__ == "__main__":
    main()
