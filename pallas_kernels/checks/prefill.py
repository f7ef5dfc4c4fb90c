"""Attention of new tokens, and the cache's writes: ragged batches, NaN in padding, page tails and unused keys."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import mla
from pallas_kernels.backend import Backend
from pallas_kernels.checks import arrays
from pallas_kernels.checks.attention import (
    ATTENDED,
    LATENT,
    PAGE,
    SCALE,
    WIDTH,
    named,
    page_table,
    poisoned_tails,
    random_pages,
    rows_written,
)
from pallas_kernels.checks.case import BFLOAT16, EXACT, Case

_OWN, _SHARED, _VALUES, _TILE = 128, 64, 128, 128
PREFILLS = ((4096, 1), (8192, 1), (8192, 8), (16384, 1))
"""(tokens, equally long prompts)."""
CONTEXTS = ((4096, 1, 16384), (4096, 32, 4096), (128, 1, 32768))
"""(tokens, prompts, cached tokens of each)."""


def mla_prefill_cases(backend: Backend, quick: bool) -> Iterator[Case]:
    """Yields FlashMLA's prompts, uneven ones with padding, and keys in two parts."""
    del backend
    if quick:
        yield Prefill((70, 0, 1, 129), 220, heads=2).case()
        yield Prefill((130,), 130, heads=1).case(parts=True)
        return
    for tokens, prompts in PREFILLS:
        yield Prefill.even(tokens, prompts).case()
    yield Prefill((1, 1000, 0, 129, 64, 3000), 4200, heads=16).case()
    yield Prefill((1, 1000, 0, 129, 64, 3000), 4200, heads=16).case(parts=True)


def mla_prefill_context_cases(backend: Backend, quick: bool) -> Iterator[Case]:
    """Yields prompts after cached tokens, some of which have none."""
    del backend
    if quick:
        yield Prefill((3, 0, 1, 5), 12, (65, 1, 0, 128), heads=16).context_case()
        yield Prefill((3, 1), 4, (200, 64), heads=16).context_case(fp8=True)
        return
    for tokens, prompts, context in CONTEXTS:
        yield Prefill.even(tokens, prompts, context).context_case()
    yield Prefill((1, 200, 0, 129), 400, (8191, 0, 77, 4096), heads=16).context_case()
    yield Prefill((1, 200, 0, 129), 400, (8191, 0, 77, 4096), heads=128).context_case(fp8=True)


def mla_prefill_spans_cases(backend: Backend, quick: bool) -> Iterator[Case]:
    """Yields queries to cached and new keys of their own requests."""
    del backend
    if quick:
        yield Prefill((70, 1, 5), 80, (100, 0, 128), heads=2).spans_case()
        yield Prefill((130,), 130, (0,), heads=1).spans_case()
        return
    yield Prefill.even(4096, 1, 16384, heads=16).spans_case()
    yield Prefill.even(2048, 16, 4096, heads=16).spans_case()
    yield Prefill((1, 1000, 129, 64), 1300, (32768, 0, 77, 4096), heads=16).spans_case()


def mla_prefill_topk_cases(backend: Backend, quick: bool) -> Iterator[Case]:
    """Yields queries to top-k keys of their own requests."""
    del backend
    if quick:
        yield Prefill((70, 1, 5), 80, (100, 0, 128), heads=2).topk_case(topk=20)
        yield Prefill((130,), 130, (0,), heads=1).topk_case(topk=64)
        return
    yield Prefill.even(4096, 1, 8192, heads=16).topk_case(topk=2048)
    yield Prefill((1, 1000, 129, 64), 1300, (8192, 0, 77, 4096), heads=128).topk_case(topk=2048)


def write_pages_cases(backend: Backend, quick: bool) -> Iterator[Case]:
    """Yields rows all over the pool, some of them dropped."""
    del backend
    for tokens in (5, 70) if quick else (1, 128, 4096):
        yield write_case(tokens, 2 if quick else 4096)
    yield write_case(5 if quick else 128, 2 if quick else 4096, fp8=True)


@dataclasses.dataclass(frozen=True)
class Prefill:
    """Prompts in a flat batch of `tokens` rows, the last of which are padding, each after its cached tokens."""

    lengths: tuple[int, ...]
    tokens: int
    contexts: tuple[int, ...] = ()
    heads: int = 128

    @classmethod
    def even(cls, tokens: int, prompts: int, context: int = 0, heads: int = 128) -> "Prefill":
        """Returns equally long prompts that fill the batch."""
        return cls((tokens // prompts,) * prompts, tokens, (context,) * prompts, heads)

    @property
    def cu_lengths(self) -> np.ndarray:
        """The running total of the lengths."""
        return np.cumsum([0, *self.lengths], dtype=np.int32)

    @property
    def live(self) -> int:
        """Rows without padding."""
        return sum(self.lengths)

    def shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns those of q, k, v and cu_lengths of `mla_prefill`."""
        widths = _OWN + _SHARED, _OWN + _SHARED, _VALUES
        rows = [jax.ShapeDtypeStruct((self.tokens, self.heads, width), jnp.bfloat16) for width in widths]
        return (*rows, jax.ShapeDtypeStruct((len(self.lengths) + 1,), jnp.int32))

    def arrays(self, key: jax.Array) -> tuple[jax.Array, ...]:
        """Returns random q, k and v, and cu_lengths."""
        *rows, _ = self.shapes()
        return (*self._random(key, *(x.shape for x in rows)), jnp.asarray(self.cu_lengths))

    def call(self, backend: Backend) -> Callable[..., tuple[jax.Array, jax.Array]]:
        """Returns (q, k, v, cu_lengths) -> out, lse."""
        return functools.partial(mla.mla_prefill, scale=SCALE, backend=backend)

    def case(self, *, parts: bool = False) -> Case:
        """Returns the check of attention among new tokens, with keys in two `parts` or whole; padding is NaN."""

        def call(operands: tuple, i: Any, backend: Backend) -> dict[str, jax.Array]:
            q, k, v, cu_lengths = operands
            if not parts:
                return named(self.call(backend)(*operands))
            shared = {"shared_key": k[:, 0, _OWN:]}
            return named(mla.mla_prefill(q, k[..., :_OWN], v, cu_lengths, scale=SCALE, backend=backend, **shared))

        def poisoned(operands: tuple, i: Any) -> tuple:
            *rows, cu_lengths = operands
            return (*(x.at[self.live :].set(jnp.nan) for x in rows), cu_lengths)

        pairs = sum(length**2 for length in self.lengths) / 2
        size = 2 * self.tokens * self.heads * (2 * (_OWN + _SHARED) + 2 * _VALUES)
        return self._case(
            call, self.arrays, poisoned, pairs * 2 * (_OWN + _SHARED + _VALUES), size, parts * "two parts"
        )

    def context_arrays(self, key: jax.Array, *, fp8: bool = False) -> tuple[jax.Array, ...]:
        """Returns random q, pages, page_table, context_lengths and cu_lengths of `mla_prefill_context`."""
        (q,) = self._random(key, (self.tokens, self.heads, WIDTH))
        contexts = np.asarray(self.contexts, np.int32)
        places = page_table(contexts, self.pages), contexts, self.cu_lengths
        return q, random_pages(key, self.pages, LATENT, fp8=fp8), *map(jnp.asarray, places)

    @property
    def pages(self) -> int:
        """Pages of cached tokens."""
        return sum(-(-context // PAGE) for context in self.contexts)

    def call_context(self, backend: Backend) -> Callable[..., tuple[jax.Array, jax.Array]]:
        """Returns (q, pages, page_table, context_lengths, cu_lengths) -> out, lse."""
        return functools.partial(mla.mla_prefill_context, scale=SCALE, pages_per_layer=self.pages, backend=backend)

    def context_case(self, *, fp8: bool = False) -> Case:
        """Returns the check of attention of new tokens to cached ones in absorbed form; NaN after each context."""
        contexts = np.asarray(self.contexts, np.int32)

        def call(operands: tuple, i: Any, backend: Backend) -> dict[str, jax.Array]:
            return named(self.call_context(backend)(*operands))

        def poisoned(operands: tuple, i: Any) -> tuple:
            q, pages, *rest = operands
            written = rows_written(page_table(contexts, self.pages), contexts)
            return q.at[self.live :].set(jnp.nan), poisoned_tails(pages, written, LATENT), *rest

        pairs = sum(length * context for length, context in zip(self.lengths, self.contexts, strict=True))
        made = functools.partial(self.context_arrays, fp8=fp8)
        size = 2 * self.tokens * self.heads * (WIDTH + LATENT) + 2 * sum(self.contexts) * WIDTH
        return self._case(call, made, poisoned, 2.0 * pairs * (WIDTH + LATENT), size, "FP8 pages" if fp8 else "")

    @property
    def strides(self) -> list[int]:
        """Keys of each request, cached and new ones, in whole tiles."""
        totals = (length + context for length, context in zip(self.lengths, self.contexts, strict=True))
        return [-(-total // _TILE) * _TILE for total in totals]

    def spans(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the first key of each query, and the one after its last."""
        starts, ends = np.zeros((2, self.tokens), np.int32)
        first, row = 0, 0
        for length, context, stride in zip(self.lengths, self.contexts, self.strides, strict=True):
            starts[row : row + length] = first
            ends[row : row + length] = first + context + 1 + np.arange(length)
            first, row = first + stride, row + length
        return starts, ends

    def _keyed(self, key: jax.Array) -> tuple[jax.Array, ...]:
        """Returns q, k, v and shared_key, with a tile of keys after all spans."""
        K = sum(self.strides) + _TILE
        widths = (self.heads, _OWN), (self.heads, _VALUES), (_SHARED,)
        return self._random(key, (self.tokens, self.heads, _OWN + _SHARED), *((K, *width) for width in widths))

    def spans_case(self) -> Case:
        """Returns the check of attention to spans of keys; keys of tiles outside of all spans are NaN."""

        def operands(key: jax.Array) -> tuple[jax.Array, ...]:
            return (*self._keyed(key), *map(jnp.asarray, self.spans()))

        def call(operands: tuple, i: Any, backend: Backend) -> dict[str, jax.Array]:
            q, k, v, shared, starts, ends = operands
            how = {"scale": SCALE, "shared_key": shared, "backend": backend}
            return named(mla.mla_prefill_spans(q, k, v, starts, ends, **how))

        def poisoned(operands: tuple, i: Any) -> tuple:
            q, *keys, starts, ends = operands
            return (q, *(x.at[-_TILE:].set(jnp.nan) for x in keys), starts, ends)

        return self._case(call, operands, poisoned, *self._work())

    def topk_case(self, topk: int) -> Case:
        """Returns the check of attention to `topk` random keys of each query's span."""
        starts, ends = self.spans()

        def operands(key: jax.Array) -> tuple[jax.Array, ...]:
            seen = jnp.asarray(ends - starts)[:, None]
            places = jnp.arange(topk)
            # Every n-th key from a random one on: distinct, inside the span.
            step = jnp.maximum(seen // topk, 1)
            keys = places * step + jax.random.randint(key, (self.tokens, 1), 0, 1 << 20) % step
            bits = mla.topk_bitmask(jnp.asarray(starts)[:, None] + keys, keys < seen, sum(self.strides) + _TILE)
            return (*self._keyed(key), bits, jnp.asarray(starts), jnp.asarray(ends))

        def call(operands: tuple, i: Any, backend: Backend) -> dict[str, jax.Array]:
            q, k, v, shared, *mask = operands
            how = {"scale": SCALE, "shared_key": shared, "backend": backend}
            return {"out": mla.mla_prefill_topk(q, k, v, *mask, **how)}

        made = self._case(call, operands, lambda operands, i: operands, *self._work(), f"top {topk}")
        return dataclasses.replace(made, tolerance={"out": BFLOAT16})

    def _work(self) -> tuple[float, float]:
        """Returns floating point operations per head, and bytes, of attention to spans of keys."""
        starts, ends = self.spans()
        pairs, keys = float((ends - starts).sum(dtype=np.int64)), sum(self.strides)
        per_row = self.tokens * (_OWN + _SHARED + _VALUES) + keys * (_OWN + _VALUES)
        return pairs * 2 * (_OWN + _SHARED + _VALUES), 2 * self.heads * per_row + 2 * keys * _SHARED

    def _case(
        self, call: Callable, operands: Callable, poisoned: Callable, flops: float, size: float, kind: str = ""
    ) -> Case:
        return Case(
            self.name() + (f", {kind}" if kind else ""), operands, call, ATTENDED, poisoned=poisoned,
            counted=lambda operands, result: result, flops=self.heads * flops, bytes=size, key=("bfloat16",),
        )  # fmt: skip

    def _random(self, key: jax.Array, *shapes: tuple[int, ...]) -> tuple[jax.Array, ...]:
        return tuple(
            arrays.small(k, shape) for k, shape in zip(jax.random.split(key, len(shapes)), shapes, strict=True)
        )

    def name(self) -> str:
        """Returns the name of its row."""
        prompts = len(self.lengths)
        even = len(set(self.lengths)) == 1
        shape = f"in {prompts}" if even else "in " + ", ".join(map(str, self.lengths))
        cached = ""
        if any(self.contexts):
            equal = len(set(self.contexts)) == 1
            cached = f" after {self.contexts[0] if equal else ', '.join(map(str, self.contexts))} cached"
        return f"{self.tokens} tokens {shape}{cached}, {self.heads} heads"


def write_case(tokens: int, pages: int, *, fp8: bool = False) -> Case:
    """Returns the write of rows at random places of a layer; a few are dropped, and are NaN."""
    rng = np.random.default_rng(0)
    ids, offsets = divmod(rng.permutation(pages * PAGE)[:tokens].astype(np.int32), PAGE)
    ids[3::7], offsets[4::11] = -1, PAGE
    lost = ((ids < 0) | (offsets >= PAGE))[:, None]

    def operands(key: jax.Array) -> tuple[jax.Array, ...]:
        pool = random_pages(key, 3 * pages, LATENT, fp8=fp8)
        return pool, arrays.small(key, (tokens, WIDTH)), jnp.asarray(ids), jnp.asarray(offsets)

    def call(operands: tuple, i: Any, backend: Backend) -> jax.Array:
        return mla.write_pages(*operands, layer=i % 3, pages_per_layer=pages, backend=backend)

    return Case(
        f"{tokens} rows{', FP8 pages' if fp8 else ''}", operands, call, {"out": EXACT}, exact=lambda operands: operands,
        poisoned=lambda o, i: (o[0], jnp.where(lost, jnp.nan, o[1]), *o[2:]), bytes=4 * tokens * WIDTH,
    )  # fmt: skip
