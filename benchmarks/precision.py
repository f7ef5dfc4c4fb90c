"""What rounding costs: pages of each type and FP8 products on real text, and the forms that INT4 experts are served in.

    JAX_PLATFORMS=cpu python -m benchmarks.precision [--model DIR] [--tokens 512] [--fp8 quantize]
    JAX_PLATFORMS=cpu python -m benchmarks.precision --int4

Eight modules of the standard library are decoded token by token, each token given (teacher forcing), so that attention
reads everything from pages. The yardstick is float32 with float32 pages. A row of the table compares, at every
position, the log-probability of the token that follows and the most likely token. `--fp8 quantize` rounds the products
of all rows to FP8 besides, weights and activations, and leaves the yardstick as it is.

`--int4` takes one expert of Kimi-K2's sizes, of random normal weights, once of one size everywhere and once with scale
groups whose sizes are log-normal (sigma 1). It is quantized to INT4 with a scale per 32 columns; those values are the
yardstick, in float32. Each form of them computes SwiGLU of random rows as `dsv3.model.layers.experts.moe` does when
serving. An error is the root mean square of the differences over that of the yardstick.
"""

import dataclasses
import functools
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.record import Cell, Report, arguments, run
from dsv3.checkpoint import load_params
from dsv3.checkpoint.load_plan import Fp8Mode
from dsv3.checkpoint.quantize import Int4Mode, convert_int4
from dsv3.config.engine import pages_for
from dsv3.config.hugging_face import load_config
from dsv3.config.model import FP8, ModelConfig
from dsv3.engine.build import bundled_model
from dsv3.kv_cache.layout import Pool, pool, row_bytes
from dsv3.model import DecodeBatch, decode, logits
from dsv3.model.layers.experts import ExpertLayer, moe
from dsv3.model.layers.linear import Numerics
from dsv3.model.layers.router import Routing
from dsv3.model.params import Int4Weight, MoeParams, Params
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
HIDDEN, INNER = 7168, 2048
FORMS: dict[str, tuple[Int4Mode, jnp.dtype]] = {
    "float32, the yardstick": ("dequantize", jnp.dtype(jnp.float32)),
    "bfloat16": ("dequantize", jnp.dtype(jnp.bfloat16)),
    "INT4, activations bfloat16": ("keep", jnp.dtype(jnp.bfloat16)),
    "FP8, activations too": ("fp8", jnp.dtype(jnp.bfloat16)),
}


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


def int4_weight(rng: np.random.Generator, n: int, k: int, sigma: float) -> tuple[Int4Weight, float]:
    """Returns random weights [1, 1, n, k] as INT4, and the error of that."""
    sizes = np.exp(sigma * rng.standard_normal((n, k // 32, 1), np.float32)) * k**-0.5
    groups = rng.standard_normal((n, k // 32, 32), np.float32) * sizes
    scale = jnp.asarray(np.abs(groups).max(-1) / 7.5, jnp.bfloat16)
    values = np.clip(np.round(groups / np.asarray(scale, np.float32)[..., None]), -8, 7)
    error = relative(values * np.asarray(scale, np.float32)[..., None], groups)
    bits = (values.astype(np.int32) + 8).view(np.uint32).reshape(n, -1, 8, 32)  # [n, runs, scale groups, words]
    words = sum(bits[:, :, group] << np.uint32(4 * group) for group in range(8))
    return Int4Weight(jnp.asarray(words.view(np.int32).reshape(1, 1, n, k // 8)), scale.T[None, None]), error


def relative(got: np.ndarray, wanted: np.ndarray) -> float:
    """Returns the root mean square of the differences over that of `wanted`."""
    return float(np.sqrt(np.mean((got - wanted) ** 2) / np.mean(wanted**2)))


def compare_int4(report: Report, sigma: float, rows: int) -> None:
    """Reports the table for one kind of weights."""
    rng = np.random.default_rng(0)
    weights = [int4_weight(rng, *shape, sigma) for shape in ((2 * INNER, HIDDEN), (HIDDEN, INNER))]
    in_a_file = [Int4Weight(weight.data, jnp.swapaxes(weight.scale, -1, -2)) for weight, _ in weights]
    routing = Routing(jnp.zeros((rows, 1), jnp.int32), jnp.ones((rows, 1)))
    outputs: list[np.ndarray] = []

    def lines() -> Iterator[list[Cell]]:
        for name, (mode, dtype) in FORMS.items():
            x = jax.random.normal(jax.random.key(0), (rows, HIDDEN)).astype(jnp.bfloat16).astype(dtype)
            params = MoeParams(None, None, *(convert_int4(each, mode, dtype) for each in in_a_file), None)
            step: Any = jax.jit(lambda params, x: moe(x, routing, ExpertLayer(params, 0, Numerics()))[0])
            outputs.append(np.asarray(step(params, x), np.float32))
            nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) / (3 * HIDDEN * INNER)
            yield [name, nbytes, 100 * relative(outputs[-1], outputs[0])]

    title = f"Scale groups of sigma {sigma}; INT4 differs from the weights before it by {weights[0][1]:.2%}"
    report.table(title, ["form", "bytes per weight", "error of outputs (%)"], lines())


def main(report: Report) -> None:
    args = arguments(__doc__, model=bundled_model(), tokens=512, fp8="dequantize", int4=False)
    if args.int4:
        for sigma in (0.0, 1.0):
            compare_int4(report, sigma, rows=16)
        return
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
