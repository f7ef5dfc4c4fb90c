"""MLA attention on a GPU, in one run: FlashMLA's table, prefill, new tokens after cached ones, and the tunables.

    python -m benchmarks.gpu.mla                                 on a Hopper GPU; under nine minutes
    JAX_PLATFORMS=cpu python -m benchmarks.gpu.mla --compile     without one: registers and spills

What is compared, and how far it may be off, is a case of `pallas_kernels.checks`; what is wrong is not timed. A time is
the best of three loops of calls, whose operands the L2 cache cannot hold, beside what the same run measured for a copy
and for a bfloat16 product. Accounting is FlashMLA's: flop = b * h * s_q * 2 * length * (576 + 512), bytes = queries +
cached rows + output. New tokens attend to cached ones in absorbed form, and in the materialized one with the products
that make keys and values of a part of the heads: for all heads that takes as many times as long as there are parts.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu import children
from benchmarks.gpu.children import Key
from benchmarks.record import Report, run
from dsv3.model.layers.materialized import heads_at_once
from pallas_kernels import mla
from pallas_kernels.backend import Backend
from pallas_kernels.checks import Case
from pallas_kernels.checks.arrays import small
from pallas_kernels.checks.attention import LATENT, SCALE, WIDTH, Decode, edge_decodes, first_decodes, named
from pallas_kernels.checks.prefill import CONTEXTS, PREFILLS, Prefill
from pallas_kernels.grouped import grouped_gemm_contiguous
from pallas_kernels.mla import mosaic_ops
from pallas_kernels.mla.schedule import REQUEST_OVERHEAD
from tools.doctor.fast import scheduled

SPLITS = tuple((waves, overhead) for waves in (1, 2) for overhead in (1, 3, REQUEST_OVERHEAD, 8, 12))
"""How a decode step is cut into parts: (blocks per multiprocessor, one after the other; overhead of a request)."""
PREFILL_TILES = ((128, 2), (64, 4), (64, 2))
"""(keys of a step, blocks in shared memory), the default first."""
TUNED = [Decode(heads, 1, 8192, variable=True) for heads in (128, 16)]
"""The shapes whose split is tuned: requests of unequal lengths."""
_HALF = 128  # values of a head's own keys, and of its values


def main(report: Report) -> int:
    return children.main(report, "benchmarks.gpu.mla", __doc__, entries(), compiled())


def entries() -> dict[Key, Case]:
    """Returns the case of each row, what matters most first."""
    prefills = [Prefill.even(*shape) for shape in PREFILLS]
    contexts = [Prefill.even(*shape) for shape in CONTEXTS]
    # The rest of FlashMLA's table.
    order = itertools.product((2, 1), (False, True), (4096, 8192, 16384, 32768), (128, 16))
    others = [case for s, v, n, h in order if (case := Decode(h, s, n, v)) not in first_decodes()]
    tables = {
        "decode": [scheduled(case, Backend.MOSAIC) for case in first_decodes()],
        "prefill": [case.spans_case() for case in prefills],
        "splits of decode": [split_case(case, *split) for case in TUNED for split in SPLITS],
        "tiles of prefill": [tiled_case(case, *tile) for case in prefills[1:3] for tile in PREFILL_TILES],
        "new tokens to cached ones, absorbed": [case.context_case() for case in contexts],
        "new tokens to cached ones, materialized": [materialized_case(case) for case in contexts],
        "more of decode": [scheduled(case, Backend.MOSAIC) for case in others],
    }
    return {(table, case.name): case for table, cases in tables.items() for case in cases}


def compiled() -> dict[Key, Case]:
    """Returns a case for each kernel and tile that a run or another model needs."""
    decodes = [Decode(heads, queries, 8192) for heads in (128, 16) for queries in (1, 2)]
    decodes += [Decode(heads, 1, 8192, fp8=True) for heads in (128, 16)]
    decodes += [case for case in edge_decodes() if case.latent != LATENT]
    prompts, cached = Prefill.even(*PREFILLS[1]), Prefill.even(*CONTEXTS[0])
    tables = {
        "decode": [scheduled(case, Backend.MOSAIC) for case in decodes],
        "prefill": [tiled_case(prompts, *tile) for tile in PREFILL_TILES],
        "context": [cached.context_case()],
        "materialized": [materialized_case(cached)],
    }
    return {(table, case.name): case for table, cases in tables.items() for case in cases}


def split_case(shape: Decode, waves: int, overhead: int) -> Case:
    """Returns decode attention under another cut of a step into parts."""
    case = scheduled(shape, Backend.MOSAIC, waves=waves, request_overhead=overhead)
    return dataclasses.replace(case, name=f"{case.name}, {waves} waves, overhead {overhead}")


def tiled_case(shape: Prefill, keys: int, stages: int) -> Case:
    """Returns attention of new tokens under a tile of keys."""
    case = shape.spans_case()

    def call(operands: tuple, i: Any, backend: Backend) -> dict[str, jax.Array]:
        if backend is not Backend.MOSAIC:
            return case.call(operands, i, backend)
        q, k, v, shared, starts, ends = operands
        how = {"scale": SCALE, "key_block": keys, "stages": stages}
        return named(mosaic_ops.prefill_spans_mosaic(q, k, shared, v, starts, ends, **how))

    return dataclasses.replace(case, name=f"{case.name}, {keys} keys, {stages} stages", call=call)


def materialized_case(prefill: Prefill) -> Case:
    """Returns attention of new tokens to cached ones whose keys and values are made first, of as many heads as fit."""
    K = sum(prefill.strides)
    heads = heads_at_once(prefill.heads, K * 2 * 2 * _HALF)
    attended = dataclasses.replace(prefill, heads=heads).spans_case()

    def operands(key: jax.Array) -> tuple[jax.Array, ...]:
        shapes = (prefill.tokens, heads, 192), (K, WIDTH), (1, heads * _HALF, LATENT), (1, heads * _HALF, LATENT)
        keys = jax.random.split(key, len(shapes))
        return (*map(small, keys, shapes), *map(jnp.asarray, prefill.spans()))

    def call(operands: tuple, i: Any, backend: Backend) -> dict[str, jax.Array]:
        q, latents, k_up, v_up, starts, ends = operands
        tiles = jnp.zeros(K // 128, jnp.int32)
        up = functools.partial(grouped_gemm_contiguous, latents[:, :LATENT], tile_m=128, backend=backend)
        k, v = (up(w, tile_group=tiles).reshape(K, heads, _HALF) for w in (k_up, v_up))
        how = {"scale": SCALE, "shared_key": latents[:, LATENT:], "backend": backend}
        return named(mla.mla_prefill_spans(q, k, v, starts, ends, **how))

    products = 2.0 * K * heads * LATENT * 2 * _HALF
    name, flops = f"{prefill.name()}, {heads} at once", attended.flops + products
    return dataclasses.replace(attended, name=name, operands=operands, call=call, flops=flops, poisoned=lambda o, i: o)


if __name__ == "__main__":
    run(main)
