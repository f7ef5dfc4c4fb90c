"""Latent attention over pages: decode. Lengths around a page, empty requests, NaN in unwritten rows."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import mla, multiprocessors
from pallas_kernels.backend import Backend
from pallas_kernels.checks import arrays
from pallas_kernels.checks.case import BFLOAT16, NUMBER, Case, Tolerance
from pallas_kernels.mla.layout import fp8_page_bytes, is_fp8
from pallas_kernels.mla.schedule import REQUEST_OVERHEAD, DecodeSchedule

SCALE = 0.1352338
BATCH, LATENT, WIDTH, PAGE = 128, 512, 576, mla.PAGE_SIZE
OUT_OF_RANGE = 2147480000
"""Entries of page tables that must not be read."""
LSE = Tolerance(1e-6, 2**-9, 2**-9, "the logarithm of a float32 sum of approximate exponentials")
ATTENDED = {"out": BFLOAT16, "lse": LSE}
_EDGES = (0, 1, 63, 64, 65)


def mla_decode_cases(backend: Backend, quick: bool) -> Iterator[Case]:
    """Yields odd lengths of requests, with many and few heads and with FP8 pages; FlashMLA's table."""
    del backend
    if quick:
        yield Decode(16, 1, 300, batch=6, edges=True, layers=2).case()
        yield Decode(16, 2, 300, fp8=True, batch=6, edges=True, layers=2).case()
        return
    yield from (decode.case() for decode in (*edge_decodes(), *first_decodes()))
    yield from (Decode(heads, 1, 8192, variable=True).case() for heads in (128, 16))


@dataclasses.dataclass(frozen=True)
class Decode:
    """Decode attention of a batch of requests."""

    heads: int
    queries: int
    length: int
    variable: bool = False
    fp8: bool = False
    batch: int = BATCH
    latent: int = LATENT
    edges: bool = False
    """Whether the first requests have no token, one, and about a page."""
    layers: int = 1
    """Of the pool."""

    @property
    def width(self) -> int:
        """Values of a cached row."""
        return self.latent + WIDTH - LATENT

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """Fixed, or normal with a standard deviation of half the mean, as in FlashMLA's script."""
        if not self.variable:
            first = _EDGES if self.edges else ()
            return np.asarray((*first, *(self.length,) * (self.batch - len(first))), np.int32)
        drawn = np.random.default_rng(0).normal(self.length, self.length / 2, self.batch)
        return np.clip(drawn, self.queries, 2 * self.length).astype(np.int32)

    @functools.cached_property
    def pages(self) -> int:
        """Pages of a layer."""
        return int((-(-self.lengths // PAGE)).sum())

    def shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns those of q, pages, table and lengths."""
        row = mla.fp8_row_bytes(self.latent, WIDTH - LATENT) if self.fp8 else self.width
        pool = (self.layers * self.pages, PAGE, row)
        return (
            jax.ShapeDtypeStruct((self.batch, self.queries, self.heads, self.width), jnp.bfloat16),
            jax.ShapeDtypeStruct(pool, jnp.uint8 if self.fp8 else jnp.bfloat16),
            jax.ShapeDtypeStruct((self.batch, int((-(-self.lengths // PAGE)).max())), jnp.int32),
            jax.ShapeDtypeStruct((self.batch,), jnp.int32),
        )

    def arrays(self, key: jax.Array) -> tuple[jax.Array, ...]:
        """Returns random values; pages in random order, and table entries out of range where none is used."""
        q, pool, *_ = self.shapes()
        table = page_table(self.lengths, self.pages)
        pages = random_pages(key, pool.shape[0], self.latent, fp8=self.fp8)
        return arrays.small(key, q.shape), pages, jnp.asarray(table), jnp.asarray(self.lengths)

    def call(self, backend: Backend) -> Callable[..., tuple[jax.Array, jax.Array]]:
        """Returns (q, pages, table, lengths, schedule, layer) -> out, lse. A step's schedule serves all its layers."""
        how: dict[str, Any] = {
            "pages_per_layer": self.pages,
            "value_width": self.latent,
            "scale": SCALE,
            "backend": backend,
        }
        return lambda *four, schedule=None, layer=0: mla.mla_decode(*four, schedule=schedule, layer=layer, **how)

    def schedule(self, lengths: jax.Array, waves: int = 1, request_overhead: int = REQUEST_OVERHEAD) -> DecodeSchedule:
        """Returns the schedule of the kernel for Hopper, with `waves` consecutive blocks per multiprocessor."""
        blocks = multiprocessors.traced().taken * waves
        how = {"queries": self.queries, "heads": self.heads, "request_overhead": request_overhead}
        return mla.decode_schedule(lengths, multiprocessors=blocks, **how)

    def case(self) -> Case:
        """Returns its check."""

        def call(operands: tuple, i: Any, backend: Backend) -> dict[str, jax.Array]:
            layer = i % self.layers if self.layers > 1 else 0
            return named(self.call(backend)(*operands, layer=layer))

        def poisoned(operands: tuple, i: Any) -> tuple:
            q, pages, *rest = operands
            written = np.zeros(self.layers * self.pages, np.int32)
            layer = NUMBER % self.layers
            written[layer * self.pages :][: self.pages] = rows_written(
                page_table(self.lengths, self.pages), self.lengths
            )
            return q, poisoned_tails(pages, written, self.latent), *rest

        return Case(
            self.name(), self.arrays, call, ATTENDED, counted=lambda operands, result: result, poisoned=poisoned,
            flops=self.flops(), bytes=self.bytes(),
        )  # fmt: skip

    def flops(self) -> float:
        """Returns FlashMLA's count."""
        return 2.0 * self.heads * self.queries * int(self.lengths.sum()) * (self.width + self.latent)

    def bytes(self) -> float:
        """Returns FlashMLA's count: queries, cached rows and output."""
        q, pages, *_ = self.shapes()
        rows = int(self.lengths.sum()) * pages.shape[2] * pages.dtype.itemsize
        return rows + 2.0 * math.prod(q.shape) + 2.0 * math.prod(q.shape[:3]) * self.latent

    def name(self) -> str:
        """Returns the name of its row."""
        kind = "edges and" if self.edges else "about" if self.variable else ""
        latent = "" if self.latent == LATENT else f", latents of {self.latent}"
        tokens = " ".join(filter(None, (kind, str(self.length))))
        return f"{self.heads} heads, {self.queries} queries, {tokens} tokens{', FP8 pages' if self.fp8 else ''}{latent}"


def edge_decodes(longest: int = 20000) -> list[Decode]:
    """Returns head counts and query tokens that do not fill a block, with lengths around a page."""
    kinds = ((16, 1, False), (128, 2, False), (3, 4, False), (127, 1, False), (16, 1, True), (16, 2, True))
    one = functools.partial(Decode, length=longest, batch=6, edges=True)
    plain = [one(heads, queries, fp8=fp8) for heads, queries, fp8 in kinds]
    return [*plain, *(one(heads, queries, latent=256) for heads, queries in ((32, 1), (20, 2)))]


def first_decodes() -> list[Decode]:
    """Returns the most relevant rows of FlashMLA's table."""
    lengths = (4096, 8192, 16384, 32768)
    return [*(Decode(h, 1, n) for n in lengths for h in (128, 16)), *(Decode(h, 1, 8192, fp8=True) for h in (128, 16))]


def named(result: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
    """Returns an attention's output and log-sum-exp by the names of `ATTENDED`."""
    return dict(zip(("out", "lse"), result, strict=True))


def page_table(lengths: np.ndarray, pages: int, seed: int = 1) -> np.ndarray:
    """Returns pages in random order for requests of these lengths; other entries are out of range."""
    counts = -(-lengths // PAGE)
    used = np.arange(max(1, counts.max())) < counts[:, None]
    table = np.full(used.shape, OUT_OF_RANGE, np.int32)
    table[used] = np.random.default_rng(seed).permutation(pages)[: used.sum()]
    return table


def random_pages(key: jax.Array, count: int, latent: int, *, fp8: bool) -> jax.Array:
    """Returns full pages of random rows."""
    rows = arrays.small(key, (count, PAGE, latent + WIDTH - LATENT))
    return mla.fp8_pages_of_rows(mla.pack_fp8(rows, latent), latent) if fp8 else rows


def rows_written(table: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns the number of written rows of each page of a layer."""
    pages = int((table != OUT_OF_RANGE).sum())
    written = np.zeros(pages, np.int32)
    for ids, length in zip(table, lengths, strict=True):
        for index in range(-(-length // PAGE)):
            written[ids[index]] = min(PAGE, length - index * PAGE)
    return written


def poisoned_tails(pages: jax.Array, written: np.ndarray, latent: int) -> jax.Array:
    """Returns the pages with NaN after the first `written` rows of each; bytes of 255 are NaN in all types here."""
    if not is_fp8(pages):
        return jnp.where((jnp.arange(PAGE) < written[:, None])[..., None], pages, jnp.asarray(jnp.nan, pages.dtype))
    order = fp8_page_bytes(latent, pages.shape[2])  # [64, bytes of a row]
    row = np.empty(order.size, np.int32)
    row[order] = np.arange(PAGE)[:, None]
    return jnp.where((row < written[:, None]).reshape(pages.shape), pages, jnp.uint8(255))
