"""What `mla.py` measures beside the cases of `pallas_kernels.checks`: tunables, and what XLA makes without a kernel."""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from dsv3.model.layers.materialized import heads_at_once
from pallas_kernels import mla
from pallas_kernels.backend import Backend
from pallas_kernels.checks.arrays import small
from pallas_kernels.checks.attention import LATENT, PAGE, SCALE, WIDTH, Decode, first_decodes
from pallas_kernels.checks.prefill import Prefill
from pallas_kernels.grouped import grouped_gemm_contiguous
from pallas_kernels.mla.schedule import REQUEST_OVERHEAD
from pallas_kernels.rows import latent_rows

SPLITS = tuple((waves, overhead) for waves in (1, 2) for overhead in (1, 3, REQUEST_OVERHEAD, 8, 12))
"""How a decode step is cut into parts: (blocks per multiprocessor, one after the other; overhead of a request)."""
PREFILL_TILES = ((128, 2), (64, 4), (64, 2))
"""(keys of a step, blocks in shared memory), the default first."""


def other_decodes() -> list[Decode]:
    """The rest of FlashMLA's table."""
    order = itertools.product((2, 1), (False, True), (4096, 8192, 16384, 32768), (128, 16))
    return [case for s, v, n, h in order if (case := Decode(h, s, n, v)) not in first_decodes()]


def tuned_decodes() -> list[Decode]:
    """The shapes whose split is tuned."""
    return [
        Decode(h, 1, n, variable) for n, variable in ((4096, False), (8192, True), (32768, False)) for h in (128, 16)
    ]


@dataclasses.dataclass(frozen=True)
class Expanded:
    """The expanded form of equal prompts after cached tokens: keys and values are made, and then attended to."""

    prefill: Prefill

    @property
    def stride(self) -> int:
        """Expanded tokens from one request to the next: cached and new ones, in whole blocks of keys."""
        return self.prefill.strides[0]

    @property
    def heads_at_once(self) -> int:
        """Heads whose keys and values are there at once, as in the model."""
        return heads_at_once(self.prefill.heads, len(self.prefill.lengths) * self.stride * 2 * (128 + 128))

    def shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """q, latents, k_up, v_up, starts and ends, for as many heads as there are at once."""
        T, K, heads = self.prefill.tokens, len(self.prefill.lengths) * self.stride, self.heads_at_once
        shapes = (T, heads, 192), (K, WIDTH), (1, heads * 128, LATENT), (1, heads * 128, LATENT)
        ints = (jax.ShapeDtypeStruct((T,), jnp.int32) for _ in range(2))
        return (*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes), *ints)

    def arrays(self) -> tuple[jax.Array, ...]:
        values = (small(jax.random.key(i), x.shape) for i, x in enumerate(self.shapes()[:4]))
        return (*values, *map(jnp.asarray, self.prefill.spans()))

    def call(self, backend: Backend) -> Callable[..., dict[str, jax.Array]]:
        """(q, latents, k_up, v_up, starts, ends) -> out, lse."""

        def attend(q, latents, k_up, v_up, starts, ends):
            tiles = jnp.zeros(len(latents) // 128, jnp.int32)
            up = functools.partial(grouped_gemm_contiguous, latents[:, :LATENT], tile_m=128, backend=backend)
            k, v = (up(w, tile_group=tiles).reshape(len(latents), -1, 128) for w in (k_up, v_up))
            how = {"scale": SCALE, "shared_key": latents[:, LATENT:], "backend": backend}
            out, lse = mla.mla_prefill_spans(q, k, v, starts, ends, **how)
            return {"out": out, "lse": lse}

        return attend


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
        values = (small(jax.random.key(i), x.shape) for i, x in enumerate((raw, weight)))
        rotation = (jnp.cos(angles), jnp.sin(angles))
        return (jnp.zeros(pages.shape, pages.dtype), *values, *rotation, *map(jnp.asarray, divmod(places, PAGE)))

    def calls(self, backend: Backend) -> dict[str, Callable[..., jax.Array]]:
        """What can be used, by name; the last is XLA's alone."""

        def two_steps(backend, pages, raw, weight, cos, sin, page_ids, offsets):
            rows = latent_rows(raw, weight[None], 0, cos, sin, 1e-6, backend=backend)
            return mla.write_pages(pages, rows, page_ids, offsets, pages_per_layer=self.pages, backend=backend)

        return {
            "XLA's norm, then a kernel": functools.partial(two_steps, backend),
            "XLA": functools.partial(two_steps, Backend.REFERENCE),
        }


WRITES = tuple(Write(tokens) for tokens in (128, 512, 4096))


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

    return [paged, gathered]


def plain_prefills(case: Prefill) -> list[Callable]:
    """The blocked softmax, and where they fit, all scores at once."""

    def whole(q, k, v, cu_lengths):
        scores = jnp.einsum("qhd,khd->hqk", q, k, preferred_element_type=jnp.float32) * SCALE
        seen = jnp.tril(jnp.ones(scores.shape[1:], jnp.bool))
        return jnp.einsum("hqk,khv->qhv", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)).astype(v.dtype), v)

    return [case.call(Backend.REFERENCE), *([whole] if len(case.lengths) == 1 and case.tokens <= 4096 else [])]
