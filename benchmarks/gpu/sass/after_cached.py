"""What attention of new tokens to cached ones takes in both forms, by the modelled cycles of their loops.

The absorbed form runs the loop of decode, the expanded one that of prefill, after the products that make keys and
values. DeepSeek-V3: 128 heads. Epilogues, launches and last waves are left out, like tokens' attention to each other.
"""

from collections.abc import Iterator

from pallas_kernels.checks.attention import LATENT

HEADS, NEW, CACHED = 128, (128, 512, 2048, 4096), (8192, 32_768, 131_072)
DECODE, SPANS = "decode, 128 heads", "prefill to spans of keys, 192 and 128"
HEAD = ("new tokens", "cached", "absorbed", "expanded", "of it keys and values", "absorbed / expanded", "FA3 for ours")
_PER_CYCLE = 4096 * 993 / 1979  # operations in bfloat16 of a multiprocessor, at the share that DeepGEMM reaches in FP8
_KEYS, _ROWS, _TOKENS = 128, 64, 128  # of a pass: keys of both loops, rows of decode's, query tokens of prefill's


def rows(decode: float, spans: float, others: float) -> Iterator[tuple]:
    """Yields the rows of a table under `HEAD`, in millions of cycles of one multiprocessor; arguments are per pass."""
    for cached in CACHED:
        for new in NEW:
            passes = HEADS * cached // _KEYS
            made = 2 * HEADS * cached * LATENT * (128 + 128) / _PER_CYCLE
            absorbed = new * passes // _ROWS * decode
            expanded, theirs = (-(-new // _TOKENS) * passes * each + made for each in (spans, others))
            figures = (f"{each / 1e6:,.0f}" for each in (absorbed, expanded, made))
            yield (f"{new:,}", f"{cached:,}", *figures, f"{absorbed / expanded:.2f}", f"{theirs / 1e6:,.0f}")
