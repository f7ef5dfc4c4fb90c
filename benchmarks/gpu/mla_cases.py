"""The shapes `mla.py` measures, arrays for them, what is correct, and what XLA makes of them without a kernel."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dsv3.model.layers.context import heads_at_once
from pallas_kernels import mla, multiprocessors
from pallas_kernels.backend import Backend
from pallas_kernels.experimental.write_latents import cache_rows, write_new_latents
from pallas_kernels.grouped import grouped_gemm_contiguous
from pallas_kernels.mla import mosaic_ops
from pallas_kernels.mla.schedule import REQUEST_OVERHEAD

SCALE = 0.1352338
BATCH, LATENT, WIDTH, PAGE = 128, 512, 576, 64


@dataclasses.dataclass(frozen=True)
class Split:
    """How a decode step is cut into parts: the tunables of the schedule."""

    waves: int = 1
    """Thread blocks for each multiprocessor, one after the other."""
    request_overhead: int = REQUEST_OVERHEAD


SPLITS = tuple(Split(waves, overhead) for waves in (1, 2) for overhead in (1, 3, REQUEST_OVERHEAD, 8, 12))
PREFILL_TILES = ((128, 2), (64, 4), (64, 2))
"""(keys of a step, blocks in shared memory), the default first."""


@dataclasses.dataclass(frozen=True)
class Decode:
    """A row of the decode table."""

    heads: int
    queries: int
    length: int
    variable: bool = False
    fp8: bool = False
    batch: int = BATCH
    latent: int = LATENT

    @property
    def width(self) -> int:
        """Values of a cached row."""
        return self.latent + WIDTH - LATENT

    def lengths(self) -> np.ndarray:
        """Fixed, or normal with a standard deviation of half the mean, as FlashMLA's script draws them."""
        if not self.variable:
            return np.full(self.batch, self.length, np.int32)
        drawn = np.random.default_rng(0).normal(self.length, self.length / 2, self.batch)
        return np.clip(drawn, self.queries, 2 * self.length).astype(np.int32)

    def shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        pages = -(-self.lengths() // PAGE)
        pool = (int(pages.sum()), PAGE, mla.fp8_row_bytes(self.latent, WIDTH - LATENT) if self.fp8 else self.width)
        return (
            jax.ShapeDtypeStruct((self.batch, self.queries, self.heads, self.width), jnp.bfloat16),
            jax.ShapeDtypeStruct(pool, jnp.uint8 if self.fp8 else jnp.bfloat16),
            jax.ShapeDtypeStruct((self.batch, int(pages.max())), jnp.int32),
            jax.ShapeDtypeStruct((self.batch,), jnp.int32),
        )

    def arrays(self) -> tuple[jax.Array, ...]:
        """Random values; pages in random order, page tails random too, unused table entries out of range."""
        q_shape, pool_shape, table_shape, _ = (s.shape for s in self.shapes())
        lengths = self.lengths()
        used = np.arange(table_shape[1]) < -(-lengths // PAGE)[:, None]
        table = np.full(table_shape, 2147480000, np.int32)
        table[used] = np.random.default_rng(1).permutation(pool_shape[0])
        q, pages = (random(jax.random.key(i), x) for i, x in enumerate((q_shape, (*pool_shape[:2], self.width))))
        if self.fp8:
            pages = jax.jit(lambda x: mla.fp8_pages_of_rows(mla.pack_fp8(x, self.latent), self.latent))(pages)
        return q, pages, jnp.asarray(table), jnp.asarray(lengths)

    def call(self, backend: Backend) -> Callable[..., tuple[jax.Array, jax.Array]]:
        """(q, pages, table, lengths, schedule) -> out, lse. The schedule of a step serves all its layers."""
        how = {"pages_per_layer": self.shapes()[1].shape[0], "value_width": self.latent, "backend": backend}
        return lambda q, pages, table, lengths, schedule: mla.mla_decode(
            q, pages, table, lengths, scale=SCALE, schedule=schedule, **how
        )

    def schedule(self, lengths: jax.Array, split: "Split | None" = None):
        split = split or Split()
        return mla.decode_schedule(
            lengths,
            queries=self.queries,
            heads=self.heads,
            multiprocessors=multiprocessors.traced().taken * split.waves,
            request_overhead=split.request_overhead,
        )

    def flops(self) -> float:
        return 2.0 * self.heads * self.queries * int(self.lengths().sum()) * (self.width + self.latent)

    def bytes(self) -> float:
        q, pages = self.shapes()[:2]
        rows = int(self.lengths().sum()) * pages.shape[2] * pages.dtype.itemsize
        return rows + 2.0 * math.prod(q.shape) + 2.0 * math.prod(q.shape[:3]) * self.latent

    def label(self) -> str:
        latent = "" if self.latent == LATENT else f", latents of {self.latent}"
        kind = f"{'variable' if self.variable else 'fixed'}{', FP8 cache' if self.fp8 else ''}{latent}"
        return f"{self.heads} | {self.queries} | {self.length} | {kind}"


@functools.partial(jax.jit, static_argnums=1)
def random(key, shape):
    return jnp.clip(jax.random.normal(key, shape, jnp.bfloat16) / 10, -1, 1)


def edge_cases(longest: int = 20000) -> list[Decode]:
    """Head counts and query tokens with which `Run.edge_cases` tries odd lengths."""
    kinds = ((16, 1, False), (128, 2, False), (3, 4, False), (127, 1, False), (16, 1, True), (16, 2, True))
    plain = [Decode(heads, queries, longest, fp8=fp8, batch=6) for heads, queries, fp8 in kinds]
    return [*plain, *(Decode(heads, queries, longest, batch=6, latent=256) for heads, queries in ((32, 1), (20, 2)))]


def first_decode_cases() -> list[Decode]:
    """The rows that matter most."""
    lengths = (4096, 8192, 16384, 32768)
    return [*(Decode(h, 1, n) for n in lengths for h in (128, 16)), *(Decode(h, 1, 8192, fp8=True) for h in (128, 16))]


def other_decode_cases() -> list[Decode]:
    """The rest of FlashMLA's table."""
    order = itertools.product((2, 1), (False, True), (4096, 8192, 16384, 32768), (128, 16))
    return [case for s, v, n, h in order if (case := Decode(h, s, n, v)) not in first_decode_cases()]


def tuned_decode_cases() -> list[Decode]:
    """The shapes whose split is tuned."""
    return [
        Decode(h, 1, n, variable) for n, variable in ((4096, False), (8192, True), (32768, False)) for h in (128, 16)
    ]


@dataclasses.dataclass(frozen=True)
class Prefill:
    """A row of the prefill table: equally long prompts in a flat batch, each after `context` cached tokens."""

    tokens: int
    segments: int
    context: int = 0
    heads: int = 128

    def shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """q, k, v and cu_lengths of the expanded form."""
        rows = [jax.ShapeDtypeStruct((self.tokens, self.heads, width), jnp.bfloat16) for width in (192, 192, 128)]
        return (*rows, jax.ShapeDtypeStruct((self.segments + 1,), jnp.int32))

    def arrays(self) -> tuple[jax.Array, ...]:
        *rows, _ = self.shapes()
        return (*(random(jax.random.key(i), x.shape) for i, x in enumerate(rows)), self.cu_lengths())

    def context_shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """q, pages, page_table, context_lengths and cu_lengths of the absorbed form."""
        pages = -(-self.context // PAGE)
        return (
            jax.ShapeDtypeStruct((self.tokens, self.heads, WIDTH), jnp.bfloat16),
            jax.ShapeDtypeStruct((self.segments * pages, PAGE, WIDTH), jnp.bfloat16),
            *(jax.ShapeDtypeStruct(x, jnp.int32) for x in ((self.segments, pages), (self.segments,))),
            jax.ShapeDtypeStruct((self.segments + 1,), jnp.int32),
        )

    def context_arrays(self) -> tuple[jax.Array, ...]:
        q, pages, table, _, _ = self.context_shapes()
        ids = np.random.default_rng(0).permutation(pages.shape[0]).astype(np.int32).reshape(table.shape)
        lengths = jnp.full(self.segments, self.context, jnp.int32)
        values = (random(jax.random.key(i), x.shape) for i, x in enumerate((q, pages)))
        return (*values, jnp.asarray(ids), lengths, self.cu_lengths())

    def cu_lengths(self) -> jax.Array:
        return jnp.arange(self.segments + 1, dtype=jnp.int32) * (self.tokens // self.segments)

    def call(self, backend: Backend, tile: tuple[int, int] | None = None) -> Callable[..., tuple[jax.Array, jax.Array]]:
        """(q, k, v, cu_lengths) -> out, lse. `tile` is one of PREFILL_TILES, for the kernel alone."""
        if tile is None:
            return functools.partial(mla.mla_prefill, scale=SCALE, backend=backend)
        return functools.partial(mosaic_ops.prefill_mosaic, scale=SCALE, key_block=tile[0], stages=tile[1])

    def call_context(self, backend: Backend) -> Callable[..., tuple[jax.Array, jax.Array]]:
        """(q, pages, page_table, context_lengths, cu_lengths) -> out, lse."""
        pool = self.context_shapes()[1].shape[0]
        return functools.partial(mla.mla_prefill_context, scale=SCALE, pages_per_layer=pool, backend=backend)

    @property
    def stride(self) -> int:
        """Expanded tokens from one request to the next: cached and new ones, in whole blocks of keys."""
        return -(-(self.context + self.tokens // self.segments) // (2 * PAGE)) * 2 * PAGE

    @property
    def heads_at_once(self) -> int:
        """Heads whose keys and values are there at once, as in the model."""
        return heads_at_once(self.heads, self.segments * self.stride * 2 * (128 + 128))

    def expanded_shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """q, latents, k_up, v_up, starts and ends of the expanded form, for as many heads as there are at once."""
        T, K, heads = self.tokens, self.segments * self.stride, self.heads_at_once
        shapes = (T, heads, 192), (K, WIDTH), (1, heads * 128, LATENT), (1, heads * 128, LATENT)
        ints = (jax.ShapeDtypeStruct((T,), jnp.int32) for _ in range(2))
        return (*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes), *ints)

    def expanded_arrays(self) -> tuple[jax.Array, ...]:
        values = (random(jax.random.key(i), x.shape) for i, x in enumerate(self.expanded_shapes()[:4]))
        request, position = jnp.divmod(jnp.arange(self.tokens, dtype=jnp.int32), self.tokens // self.segments)
        starts = request * self.stride
        return *values, starts, starts + self.context + position + 1

    def call_expanded(self, backend: Backend) -> Callable[..., tuple[jax.Array, jax.Array]]:
        """(q, latents, k_up, v_up, starts, ends) -> out, lse."""

        def attend(q, latents, k_up, v_up, starts, ends):
            tiles = jnp.zeros(len(latents) // 128, jnp.int32)
            up = functools.partial(grouped_gemm_contiguous, latents[:, :LATENT], tile_m=128, backend=backend)
            k, v = (up(w, tile_group=tiles).reshape(len(latents), -1, 128) for w in (k_up, v_up))
            how = {"scale": SCALE, "shared_key": latents[:, LATENT:], "backend": backend}
            return mla.mla_prefill_spans(q, k, v, starts, ends, **how)

        return attend

    def flops(self) -> float:
        """The causal half of 2 * n * n * (192 + 128) for each head and segment."""
        return self.heads * self.segments * (self.tokens // self.segments) ** 2 * (192 + 128)

    def context_flops(self) -> float:
        return 2.0 * self.heads * self.tokens * self.context * (WIDTH + LATENT)

    def label(self) -> str:
        return f"{self.tokens} tokens in {self.segments}" + (f", {self.context} cached each" if self.context else "")


PREFILLS = tuple(Prefill(*shape) for shape in ((4096, 1), (8192, 1), (8192, 8), (16384, 1)))
CONTEXTS = tuple(Prefill(*shape) for shape in ((4096, 1, 16384), (4096, 32, 4096), (128, 1, 32768)))


@dataclasses.dataclass(frozen=True)
class Write:
    """A row of the write table: the cache rows of `tokens` new tokens, from the down-projection on."""

    tokens: int
    pages: int = 4096

    def shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """pages, raw, weight, cos, sin, page_ids, offsets."""
        f32, i32 = jnp.float32, jnp.int32
        shapes = (((self.pages, PAGE, WIDTH), jnp.bfloat16), ((self.tokens, WIDTH), jnp.bfloat16))
        rest = (((LATENT,), jnp.bfloat16), *(((self.tokens, 32), f32),) * 2, *(((self.tokens,), i32),) * 2)
        return tuple(jax.ShapeDtypeStruct(*shape) for shape in (*shapes, *rest))

    def arrays(self) -> tuple[jax.Array, ...]:
        pages, raw, weight, *_ = self.shapes()
        places = np.random.default_rng(0).permutation(self.pages * PAGE)[: self.tokens].astype(np.int32)
        angles = jnp.arange(self.tokens)[:, None] * 10000.0 ** (-jnp.arange(0, 64, 2) / 64)
        values = (random(jax.random.key(i), x.shape) for i, x in enumerate((raw, weight)))
        rotation = (jnp.cos(angles), jnp.sin(angles))
        return (jnp.zeros(pages.shape, pages.dtype), *values, *rotation, *map(jnp.asarray, divmod(places, PAGE)))

    def calls(self, backend: Backend) -> dict[str, Callable[..., jax.Array]]:
        """What can be used, by name; the last is XLA's alone."""

        def two_steps(backend, pages, raw, weight, cos, sin, page_ids, offsets):
            rows = cache_rows(raw, weight, cos, sin, epsilon=1e-6, value_width=LATENT)
            return mla.write_pages(pages, rows, page_ids, offsets, pages_per_layer=self.pages, backend=backend)

        kernel = {"one kernel": functools.partial(write_new_latents, epsilon=1e-6)}
        return {
            **(kernel if backend is Backend.MOSAIC else {}),
            "XLA's norm, then a kernel": functools.partial(two_steps, backend),
            "XLA": functools.partial(two_steps, Backend.REFERENCE),
        }


WRITES = tuple(Write(tokens) for tokens in (128, 512, 4096))


def oracle(fp8: bool, q, pages, table, lengths):
    """Attention in float32, request by request, over the table's whole width."""
    S = q.shape[1]

    def request(args):
        q, ids, length = args
        rows = pages.at[jnp.minimum(ids, pages.shape[0] - 1)].get()
        rows = mla.unpack_fp8(mla.layout.fp8_rows_of_pages(rows, LATENT), LATENT, jnp.bfloat16) if fp8 else rows
        position = jnp.arange(ids.shape[0] * PAGE)
        rows = jnp.where((position < length)[:, None], rows.reshape(-1, q.shape[-1]), 0).astype(jnp.float32)
        scores = jnp.einsum("shd,kd->shk", q.astype(jnp.float32), rows, precision="highest") * SCALE
        seen = position < length - (S - 1 - jnp.arange(S))[:, None, None]
        lse = jax.nn.logsumexp(jnp.where(seen, scores, -jnp.inf), axis=-1)
        empty = jnp.isneginf(lse)
        weights = jnp.where(seen, jnp.exp(scores - jnp.where(empty, 0, lse)[..., None]), 0)
        out = jnp.einsum("shk,kv->shv", weights, rows[:, : q.shape[-1] - (WIDTH - LATENT)], precision="highest")
        return out, jnp.where(empty, jnp.inf, lse)

    return lax.map(request, (q, table, lengths))


@jax.jit
def _compare(got, expected):
    (out, lse), (want_out, want_lse) = ([x.astype(jnp.float32) for x in side] for side in (got, expected))
    norm = jnp.maximum((out * out + want_out * want_out).sum(), 1e-30)
    both = jnp.isfinite(lse) & jnp.isfinite(want_lse)
    error = jnp.where(both, jnp.abs(jnp.where(both, lse, 0) - jnp.where(both, want_lse, 0)), 0)
    return {
        "cosine": jnp.abs(1 - 2 * (out * want_out).sum() / norm),
        "out": (jnp.abs(out - want_out) / (8e-4 + 2.01 / 128 * jnp.abs(want_out))).max(),
        "lse": (error / (1e-6 + 8.01 / 65536 * jnp.abs(jnp.where(both, want_lse, 0)))).max(),
        "infinities": (jnp.isfinite(lse) != jnp.isfinite(want_lse)).sum(),
    }


def largest_difference(got, expected) -> dict[str, float]:
    """1 is FlashMLA's limit for `out` (8e-4 or 2.01 / 128 of the value) and `lse` (1e-6 or 8.01 / 65536)."""
    return {name: float(value) for name, value in _compare(got, expected).items()}


def poison_tails(pages, table, lengths, poison):
    """Sets every row past a request's length to `poison`, and every page no request uses."""
    rows = np.zeros(pages.shape[:2], bool)
    for ids, length in zip(np.asarray(table), np.asarray(lengths), strict=True):
        for index in range(-(-length // PAGE)):
            rows[ids[index], : length - index * PAGE] = True
    if pages.dtype != jnp.uint8:
        return jnp.where(jnp.asarray(rows)[..., None], pages, poison)
    order = mla.layout.fp8_page_bytes(LATENT, pages.shape[2])
    keep = np.zeros((pages.shape[0], order.size), bool)
    for place in range(PAGE):
        keep[:, order[place]] = rows[:, place, None]
    return jnp.where(jnp.asarray(keep.reshape(pages.shape)), pages, jnp.uint8(poison))


def plain_formulations(case: Decode) -> list[Callable]:
    """What XLA makes of the operation without a kernel: an online softmax over pages, and one large gather."""
    paged = case.call(Backend.REFERENCE)

    def gathered(q, pages, table, lengths):
        B, S = q.shape[:2]
        rows = pages.at[jnp.minimum(table, pages.shape[0] - 1)].get()
        if case.fp8:
            rows = mla.unpack_fp8(mla.layout.fp8_rows_of_pages(rows, LATENT), LATENT, q.dtype)
        rows = rows.reshape(B, -1, WIDTH)
        scores = jnp.einsum("bshd,bkd->bshk", q, rows, preferred_element_type=jnp.float32) * SCALE
        limit = lengths[:, None] - (S - 1 - jnp.arange(S))
        scores = jnp.where(jnp.arange(rows.shape[1]) < limit[:, :, None, None], scores, -jnp.inf)
        return jnp.einsum("bshk,bkv->bshv", jax.nn.softmax(scores).astype(q.dtype), rows[..., :LATENT])

    return [lambda *arrays: paged(*arrays, None), gathered]


def plain_prefills(case: Prefill) -> list[Callable]:
    """The blocked softmax, and where they fit, all scores at once."""

    def whole(q, k, v, cu_lengths):
        scores = jnp.einsum("qhd,khd->hqk", q, k, preferred_element_type=jnp.float32) * SCALE
        seen = jnp.tril(jnp.ones(scores.shape[1:], jnp.bool))
        return jnp.einsum("hqk,khv->qhv", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)).astype(v.dtype), v)

    return [case.call(Backend.REFERENCE), *([whole] if case.segments == 1 and case.tokens <= 4096 else [])]
