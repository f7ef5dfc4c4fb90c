"""What rounding costs on real text: pages of each type, and FP8 products.

    JAX_PLATFORMS=cpu python -m benchmarks.precision [--model DIR] [--tokens 512] [--fp8 quantize]

Eight modules of the standard library are decoded token by token, each token given (teacher forcing), so that attention
reads everything from pages. The yardstick is float32 with float32 pages. A row of the table compares, at every
position, the log-probability of the token that follows and the most likely token. `--fp8 quantize` rounds the products
of all rows to FP8 besides, weights and activations, and leaves the yardstick as it is.
"""

import dataclasses
import functools
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.record import Cell, Report, arguments, run
from dsv3.checkpoint import load_params
from dsv3.checkpoint.load_plan import Fp8Mode
from dsv3.config.engine import pages_for
from dsv3.config.hugging_face import load_config
from dsv3.config.model import FP8, ModelConfig
from dsv3.engine.build import bundled_model
from dsv3.kv_cache.layout import Pool, pool, row_bytes
from dsv3.model import DecodeBatch, Params, decode, logits
from dsv3.text.tokenizer import Tokenizer

MODULES = ("argparse", "bisect", "calendar", "configparser", "fractions", "heapq", "statistics", "textwrap")
SETTINGS = (
    ("float32", "float32"),
    ("float32", "bfloat16"),
    ("float32", "float16"),
    ("float32", FP8),
    ("float16", "float16"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", FP8),
)
"""Types of activations and of pages."""


class Reading(NamedTuple):
    """What a model says of a text: log-probability of each next token [B, S - 1], and the most likely one."""

    logprobs: np.ndarray
    best: np.ndarray


@dataclasses.dataclass(frozen=True)
class Difference:
    """Two readings compared: mean and largest difference of log-probabilities, share of equal best tokens."""

    mean: float
    largest: float
    same_best: float

    @classmethod
    def between(cls, got: Reading, expected: Reading) -> "Difference":
        distance = np.abs(got.logprobs - expected.logprobs)
        return cls(float(distance.mean()), float(distance.max()), float((got.best == expected.best).mean()))


def read(params: Params, cfg: ModelConfig, tokens: np.ndarray, cache_dtype: str) -> Reading:
    """Decodes `tokens` [B, S] int32 one by one from pages of `cache_dtype`, in the type of `params`."""
    logprobs, best = _read(params, jnp.asarray(tokens), cfg=cfg, cache_dtype=cache_dtype)
    return Reading(np.asarray(logprobs), np.asarray(best))


@functools.partial(jax.jit, static_argnames=("cfg", "cache_dtype"))
def _read(params: Params, tokens: jax.Array, *, cfg: ModelConfig, cache_dtype: str) -> tuple[jax.Array, jax.Array]:
    B, S = tokens.shape
    table = jnp.arange(B * pages_for(S, 64), dtype=jnp.int32).reshape(B, -1)
    empty = pool(cfg, cache_dtype, table.size)

    def step(pages: Pool, position: jax.Array) -> tuple[Pool, tuple[jax.Array, jax.Array]]:
        now, following = (lax.dynamic_slice_in_dim(tokens, position + i, 1, axis=1) for i in (0, 1))
        out = decode(params, cfg, DecodeBatch(now, jnp.full(B, position + 1, jnp.int32), table), pages)
        scores = logits(params, cfg, out.hidden[:, 0])
        logprobs = jnp.take_along_axis(jax.nn.log_softmax(scores), following, axis=1)[:, 0]
        return out.pages, (logprobs, scores.argmax(axis=1))

    pages = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), empty)
    _, (logprobs, best) = lax.scan(step, pages, jnp.arange(S - 1, dtype=jnp.int32))
    return logprobs.T, best.T


def texts(tokenizer: Tokenizer, count: int) -> np.ndarray:
    """The first `count` tokens of each of `MODULES`, [8, count] int32."""
    library = Path(sysconfig.get_path("stdlib"))
    rows = [tokenizer.encode((library / f"{name}.py").read_text("utf-8"))[:count] for name in MODULES]
    return np.array(rows, np.int32)


def main(report: Report) -> None:
    args = arguments(__doc__, model=bundled_model(), tokens=512, fp8="dequantize")
    cfg = dataclasses.replace(load_config(args.model), num_nextn_predict_layers=0)
    tokens = texts(Tokenizer.from_directory(args.model), args.tokens)

    @functools.cache
    def params(dtype: str, fp8: Fp8Mode) -> Params:
        return load_params(args.model, cfg, dtype=jnp.dtype(dtype), fp8=fp8, progress=False)

    expected = read(params("float32", "dequantize"), cfg, tokens, "float32")

    def lines() -> Iterator[list[Cell]]:
        for activations, pages in SETTINGS:
            if args.fp8 == "quantize" and activations == "float16":
                continue  # FP8 products are bfloat16 or float32
            seen = Difference.between(read(params(activations, args.fp8), cfg, tokens, pages), expected)
            yield [activations, pages, row_bytes(cfg, pages), seen.mean, seen.largest, 100 * seen.same_best]

    count, length = tokens.shape
    title = f"{count} texts of {length} tokens, whose mean log-probability is {expected.logprobs.mean():.3f}"
    columns = ["activations", "pages", "bytes per token and layer", "mean difference (nats)", "largest",
               "best token the same (%)"]  # fmt: skip
    report.table(title, columns, lines())


if __name__ == "__main__":
    run(main)
