"""Sparse attention: scores of index keys, top-k selection, attention to the selected tokens."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dsa
from pallas_kernels.backend import Backend
from pallas_kernels.checks import arrays
from pallas_kernels.checks.attention import (
    LATENT,
    PAGE,
    SCALE,
    WIDTH,
    page_table,
    poisoned_tails,
    random_pages,
    rows_written,
)
from pallas_kernels.checks.case import BFLOAT16, EXACT, FLOAT32, NUMBER, Case, Tolerance

_LAYERS = 3
_FP8_SCORES = Tolerance(1e-4, 2**-7, 2**-5, "tensor cores keep some 14 bits of a sum of 128 FP8 products")


def indexes(quick: bool) -> list["Index"]:
    """Returns queries with no visible tokens, with less and more than a page, and with keys of both types."""
    if quick:
        return [Index((0, 1, 63, 64, 65, 200), heads, 128, fp8=fp8) for heads, fp8 in ((8, False), (64, True))]
    lengths = (0, 1, 63, 64, 65, 2047, 2048, 2049), (32768,) * 64, (163840,) * 4
    return [Index(each, 64, 128, fp8=fp8) for each in lengths for fp8 in (False, True)]


@dataclasses.dataclass(frozen=True)
class Index:
    """Index queries, one per request, which see all of its tokens."""

    lengths: tuple[int, ...]
    heads: int
    width: int
    fp8: bool

    @property
    def pages(self) -> int:
        """Pages of a layer."""
        return sum(-(-length // PAGE) for length in self.lengths)

    def _operands(self, key: jax.Array, *, whole: bool) -> dict[str, jax.Array]:
        """Returns random arrays; with `whole` small integers, whose scores are exact in any order."""
        q_key, k_key, w_key = jax.random.split(key, 3)
        T, count = len(self.lengths), _LAYERS * self.pages
        shapes = (q_key, (T, self.heads, self.width)), (k_key, (count * PAGE, self.width)), (w_key, (T, self.heads))
        q, keys, weights = (_whole(k, s) if whole else arrays.normal(k, *s) for k, s in shapes)
        row, dtype = dsa.key_row(self.width, None if self.fp8 else jnp.bfloat16)
        places = jnp.arange(count * PAGE, dtype=jnp.int32)
        pool = jnp.zeros((count, PAGE, row), dtype)
        pool = dsa.write_keys(pool, keys, places // PAGE, places % PAGE, layer=0, pages_per_layer=count)
        lengths = np.asarray(self.lengths, np.int32)
        where = {"page_table": page_table(lengths, self.pages), "visible": lengths}
        return {"q": q, "weights": weights.astype(jnp.float32), "pool": pool} | jax.tree.map(jnp.asarray, where)

    def _poisoned(self, operands: dict[str, jax.Array], i: Any) -> dict[str, jax.Array]:
        """Returns the operands with NaN in invisible tokens, and in other layers."""
        written, lengths = np.zeros(_LAYERS * self.pages, np.int32), np.asarray(self.lengths, np.int32)
        first = NUMBER % _LAYERS * self.pages
        written[first : first + self.pages] = rows_written(page_table(lengths, self.pages), lengths)
        pool = operands["pool"]
        if self.fp8:
            # NaN keys for unwritten rows, at the positions of the page's layout.
            places = jnp.arange(written.size * PAGE, dtype=jnp.int32)
            ids = jnp.where(places % PAGE >= jnp.asarray(written)[places // PAGE], places // PAGE, -1)
            bad = jnp.full((written.size * PAGE, self.width), jnp.nan, jnp.bfloat16)
            how = {"layer": 0, "pages_per_layer": written.size}
            return operands | {"pool": dsa.write_keys(pool, bad, ids, places % PAGE, **how)}
        return operands | {"pool": poisoned_tails(pool, written, self.width)}

    def _call(self, operands: dict[str, jax.Array], i: Any, backend: Backend, topk: int | None = None) -> jax.Array:
        where: dict[str, Any] = {"first_page": i % _LAYERS * self.pages, "backend": backend}
        arrays_ = (operands[name] for name in ("q", "weights", "pool", "page_table", "visible"))
        return dsa.index_scores(*arrays_, **where) if topk is None else dsa.topk_indices(*arrays_, topk=topk, **where)

    def scores_case(self) -> Case:
        """Returns the check of the scores; those of invisible tokens are minus infinity."""
        width = PAGE * int(np.max(-(-np.asarray(self.lengths) // PAGE)))
        row = self.width + 4 if self.fp8 else 2 * self.width
        return Case(
            self._name(),
            lambda key: self._operands(key, whole=False),
            self._call,
            {"out": _FP8_SCORES if self.fp8 else dataclasses.replace(FLOAT32, absolute=2**-9)},
            counted=lambda operands, scores: {"out": scores[:, :width]},
            poisoned=self._poisoned,
            exact=lambda operands: operands,  # 16-bit queries are multiplied as they are, with float32 sums
            flops=2.0 * sum(self.lengths) * self.heads * (self.width + 1),
            bytes=sum(self.lengths) * (row + 4),
            key=("float8_e4m3fn" if self.fp8 else "bfloat16",),
        )

    def topk_case(self, topk: int) -> Case:
        """Returns the check of the selection: the same tokens, or with FP8 keys tokens with equally high scores."""

        def counted(operands: dict[str, jax.Array], indices: jax.Array) -> dict[str, jax.Array]:
            visible = operands["visible"][:, None]
            valid = jnp.where(indices < visible, indices, visible)
            if not self.fp8:
                return {"tokens": valid}
            with jax.default_matmul_precision("highest"):
                scores = self._call(operands, jnp.int32(NUMBER), Backend.REFERENCE)
            at = jnp.pad(scores, ((0, 0), (0, 1)), constant_values=-jnp.inf)
            selected = jnp.where(valid < visible, jnp.take_along_axis(at, valid, axis=1), -jnp.inf)
            rising = (jnp.diff(valid, axis=1) > 0) | (valid[:, 1:] == visible)
            return {"scores": jnp.sort(selected, axis=1), "rising": rising.all(axis=1)}

        return Case(
            f"top {topk}, {self._name()}",
            lambda key: self._operands(key, whole=not self.fp8),
            lambda operands, i, backend: self._call(operands, i, backend, topk),
            {"scores": _FP8_SCORES, "rising": EXACT} if self.fp8 else {"tokens": EXACT},
            counted=counted,
            poisoned=self._poisoned,
            exact=lambda operands: operands,
            bytes=4 * sum(self.lengths),
        )

    def _name(self) -> str:
        seen = ", ".join(map(str, dict.fromkeys(self.lengths)))
        return f"{len(self.lengths)} queries that see {seen}, {self.heads} heads{', FP8 keys' if self.fp8 else ''}"


def _whole(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.randint(key, shape, -2, 3).astype(jnp.bfloat16)


def attend_case(lengths: tuple[int, ...], topk: int, heads: int, fp8: bool) -> Case:
    """Returns absorbed attention of one query per request to `topk` tokens, or to all where it has fewer."""
    seen, pages = np.asarray(lengths, np.int32), sum(-(-length // PAGE) for length in lengths)
    counts, table = np.minimum(seen, topk), page_table(seen, pages)
    rng = np.random.default_rng(0)
    positions = np.full((len(lengths), dsa.topk_width(topk)), seen.max(), np.int32)
    for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        positions[row, :count] = np.sort(rng.choice(length, count, replace=False)) if count else ()

    def operands(key: jax.Array) -> tuple[jax.Array, ...]:
        pool = random_pages(key, 2 * pages, LATENT, fp8=fp8)
        q = arrays.small(key, (len(lengths), heads, WIDTH))
        return q, pool, *map(jnp.asarray, (table, positions, counts))

    def poisoned(operands: tuple, i: Any) -> tuple:
        q, pool, *rest = operands
        written = np.concatenate([np.zeros(pages, np.int32), rows_written(table, seen)])
        return q, poisoned_tails(pool, written, LATENT), *rest

    def call(operands: tuple, i: Any, backend: Backend) -> jax.Array:
        how: dict[str, Any] = {"scale": SCALE, "value_width": LATENT, "backend": backend}
        return dsa.attend_topk(*operands, first_page=pages + 0 * i, **how)[0]

    seen_name = ", ".join(map(str, dict.fromkeys(lengths)))
    return Case(
        f"{topk} of {seen_name} tokens, {len(lengths)} queries, {heads} heads{', FP8 pages' if fp8 else ''}",
        operands,
        call,
        {"out": BFLOAT16},
        poisoned=poisoned,
        flops=2.0 * heads * int(counts.sum()) * (WIDTH + LATENT),
        bytes=int(counts.sum()) * (656 if fp8 else 2 * WIDTH) + 2.0 * len(lengths) * heads * (WIDTH + LATENT),
        key=("bfloat16",),
    )
