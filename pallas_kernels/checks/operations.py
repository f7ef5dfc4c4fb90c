"""The public operations by name: the backends with kernels for each, and its cases.

Parts of Hopper's kernels have checks of their own: multicast within clusters, and combining split requests.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.backend import PARTS, Backend
from pallas_kernels.checks import attention, compressed, experts, prefill, products, rows, sparse
from pallas_kernels.checks.attention import ATTENDED, LATENT, Decode, named
from pallas_kernels.checks.case import Case
from pallas_kernels.float8 import E4M3
from pallas_kernels.mla.mosaic_combine import combine_splits
from pallas_kernels.mla.schedule import DecodeSchedule, schedule_pages
from pallas_kernels.routing import SCORES

_MOSAIC, _TRITON, _NATIVE = Backend.MOSAIC, Backend.TRITON, Backend.NATIVE


type Cases = Callable[[Backend, bool], Iterable[Case]]


@dataclasses.dataclass(frozen=True)
class CheckedOperation:
    """A public operation.

    Attributes:
      kernels: the backends with kernels. The others use the reference.
      cases: (backend, quick) -> its cases; two small shapes if quick, else models' and ragged ones.
    """

    kernels: frozenset[Backend]
    cases: Cases


_EVERYWHERE, _GPUS = frozenset({_MOSAIC, _TRITON, _NATIVE}), frozenset({_MOSAIC, _TRITON})
_CPU, _HOPPER = frozenset({_NATIVE}), frozenset({_MOSAIC})


def _each(make: Callable[..., Case], quick: tuple[tuple, ...], full: tuple[tuple, ...]) -> Cases:
    """Returns the cases that `make` makes of each tuple of arguments."""
    return lambda _, is_quick: itertools.starmap(make, quick if is_quick else full)


def _with_fp8(*arguments: tuple) -> tuple[tuple, ...]:
    """Returns the arguments without FP8, and then with it."""
    return tuple((*each, fp8) for fp8 in (False, True) for each in arguments)


def multicast_cases(backend: Backend, quick: bool) -> Iterator[Case]:
    """Yields products and attention in clusters of two blocks that share loads."""
    if backend is not Backend.MOSAIC:
        return
    m, n, k = (300, 512, 512) if quick else (4096, 4096, 7168)
    yield from products.multicast_cases(m, n, k, quick=quick)
    groups, rows = (3, 256) if quick else (8, 4096)
    for dtype in (E4M3, jnp.bfloat16):
        yield experts.multicast_case(groups, rows, n, k, dtype, quick=quick)
    yield Decode(128, 1, 300 if quick else 8192, batch=6, edges=True).case()


def combine_splits_cases(backend: Backend, quick: bool) -> Iterator[Case]:
    """Yields requests that are split into many parts, into two, and not at all."""
    if backend is not Backend.MOSAIC:
        return
    yield combine_case((0, 300, 1, 64, 700), 7, 16)
    yield combine_case((640, 256), 5, 8)
    if not quick:
        yield combine_case((0, 163840, 1, 64, 8192), 132, 128)
        yield combine_case((8192,) * 128, 132, 128)


def combine_case(lengths: tuple[int, ...], parts: int, rows: int) -> Case:
    """Returns the combination of random pieces; numpy computes the expected result."""
    visible = np.asarray(lengths, np.int32)

    def operands(key: jax.Array) -> dict[str, Any]:
        keys = jax.random.split(key, 4)
        shapes = (len(lengths), rows, LATENT), (len(lengths), rows), (2 * parts, rows, LATENT), (2 * parts, rows)
        out, lse, some, sums = (jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True))
        pieces = {"out": out.astype(jnp.bfloat16), "lse": lse, "partial_out": some, "partial_lse": sums}
        return pieces | {"schedule": schedule_pages(jnp.asarray(visible), parts)}

    def call(operands: dict[str, Any], i: Any, backend: Backend) -> dict[str, jax.Array]:
        del i, backend
        return named(combine_splits(**operands))

    def reference(operands: dict[str, Any], i: Any) -> dict[str, jax.Array]:
        del i
        return joined(**operands)

    name = (
        f"{len(lengths)} requests of {', '.join(map(str, dict.fromkeys(lengths)))} tokens in {parts} parts, {rows} rows"
    )
    return Case(name, operands, call, ATTENDED, counted=lambda operands, result: result, reference=reference)


def joined(
    out: jax.Array, lse: jax.Array, partial_out: jax.Array, partial_lse: jax.Array, schedule: DecodeSchedule
) -> dict[str, jax.Array]:
    """Computes `combine_splits` for whole arrays: a request is split if its pages lie in two or more parts.

    `lse` of a piece is a logarithm to base 2. The first piece of a part has an even index, all others odd ones.
    """
    cuts, parts = schedule.cuts, len(schedule.cuts) - 1
    (group, page), (next_group, next_page) = cuts[:-1].T, cuts[1:].T
    wrote = (group != next_group) | (page != next_page)
    for request in range(len(out)):
        begins = ((group < request) | ((group == request) & (page == 0))) & (next_group == request) & (next_page > 0)
        first, last = jnp.argmax(begins), schedule.last_part[request]
        number = jnp.arange(parts)
        mine = begins.any() & (number >= first) & (number <= last) & wrote
        piece = 2 * number + jnp.where(group == request, 0, 1)
        sums = jnp.where(mine[:, None], partial_lse[piece], -jnp.inf)  # [parts, rows]
        top = jnp.max(sums, axis=0)
        weights = jnp.where(mine[:, None], jnp.exp2(sums - jnp.where(jnp.isinf(top), 0, top)), 0)
        total = weights.sum(axis=0)
        mixed = jnp.einsum("pr,prv->rv", weights, partial_out[piece], precision="highest") / total[:, None]
        out = out.at[request].set(jnp.where(begins.any(), mixed.astype(out.dtype), out[request]))
        joint = (top + jnp.log2(total)) * jnp.log(2.0)
        lse = lse.at[request].set(jnp.where(begins.any(), joint, lse[request]))
    return {"out": out, "lse": lse}


_ALIGNED = ((40, 7, 16, None), (300, 5, 8, 64))
"""Rows, groups, rows of a tile, and a capacity, which the second exceeds."""
_HEADS = ((3, 2, 12, 4), (17, 3, 24, 8))
_STREAMS = ((1, 4096), (64, 4096), (4096, 4096), (64, 7168))


def _weighted_experts_cases(backend: Backend, quick: bool) -> Iterator[Case]:
    del backend
    for size in ((3, 40, 3), (17, 64, 6)) if quick else ((64, 256, 6), (4096, 384, 6)):
        for score in SCORES:
            yield experts.weighted_case(*size, score)


OPERATIONS = {
    "mla_decode": CheckedOperation(_EVERYWHERE, attention.mla_decode_cases),
    "mla_prefill": CheckedOperation(_EVERYWHERE, prefill.mla_prefill_cases),
    "mla_prefill_context": CheckedOperation(_EVERYWHERE, prefill.mla_prefill_context_cases),
    "mla_prefill_spans": CheckedOperation(_GPUS, prefill.mla_prefill_spans_cases),
    "mla_prefill_topk": CheckedOperation(_GPUS, prefill.mla_prefill_topk_cases),
    "write_pages": CheckedOperation(_GPUS, prefill.write_pages_cases),
    "index_scores": CheckedOperation(_GPUS, lambda _, quick: (index.scores_case() for index in sparse.indexes(quick))),
    "topk_indices": CheckedOperation(
        _GPUS, lambda _, quick: (index.topk_case(64 if quick else 2048) for index in sparse.indexes(quick))
    ),
    "attend_topk": CheckedOperation(
        _EVERYWHERE,
        _each(
            sparse.attend_case,
            _with_fp8(((0, 1, 64, 65, 200), 64, 16)),
            _with_fp8(((0, 1, 2047, 2049, 8192, *(32768,) * 59), 2048, 128), ((100, 2048, 163840), 2048, 16)),
        ),
    ),
    "attend_compressed": CheckedOperation(
        _GPUS,
        _each(
            compressed.attend_case,
            _with_fp8(((0, 1, 64, 200), 16), ((0, 1, 64, 200), 64)),
            _with_fp8(*compressed.ENTRIES),
        ),
    ),
    "complete_entries": CheckedOperation(
        _GPUS, _each(compressed.complete_case, ((5, 4, 128), (5, 8, 64)), ((64, 4, 512), (64, 4, 128), (64, 128, 512)))
    ),
    "encode_rows": CheckedOperation(
        _GPUS, _each(compressed.encode_case, ((3, 128), (17, 256)), ((64, 512), (4096, 512)))
    ),
    "fp8_gemm": CheckedOperation(_EVERYWHERE, products.fp8_gemm_cases),
    "quantize_1x128": CheckedOperation(_EVERYWHERE, rows.quantize_cases),
    "swiglu_quantize": CheckedOperation(_EVERYWHERE, rows.swiglu_quantize_cases),
    "layer_gemm": CheckedOperation(_EVERYWHERE, products.layer_gemm_cases),
    "plain_gemm": CheckedOperation(
        _CPU, _each(products.unstacked_case, ((3, 16, 128), (33, 72, 264)), ((64, 129280, 7168), (1000, 2112, 7168)))
    ),
    "head_gemm": CheckedOperation(_EVERYWHERE, products.head_gemm_cases),
    "grouped_gemm_contiguous": CheckedOperation(_EVERYWHERE, experts.grouped_cases),
    "fp8_grouped_gemm_contiguous": CheckedOperation(_EVERYWHERE, experts.fp8_grouped_cases),
    "int4_grouped_gemm_contiguous": CheckedOperation(_EVERYWHERE, experts.int4_grouped_cases),
    "fp4_grouped_gemm_contiguous": CheckedOperation(_EVERYWHERE, experts.fp4_grouped_cases),
    "trained_gemm": CheckedOperation(
        _EVERYWHERE,
        _each(products.trained_case, ((48, 256, 384), (130, 128, 128)), ((4096, 2112, 7168), (1000, 7168, 2048))),
    ),
    "trained_gemm_contiguous": CheckedOperation(
        _EVERYWHERE,
        _each(
            products.trained_contiguous_case,
            (((1, 0, 2), 128, 256),),
            (((8, 0, 24, 1), 4096, 7168), ((8, 0, 24, 1), 7168, 2048)),
        ),
    ),
    "align_groups": CheckedOperation(
        _EVERYWHERE, _each(experts.align_case, _ALIGNED, (*_ALIGNED, (1024, 32, 16, None), (131072, 288, 128, 131072)))
    ),
    "queue_rows": CheckedOperation(
        _GPUS, _each(experts.queue_case, ((20, 3, 2, 4),), ((64, 4, 64, 64), (128, 144, 2, 12)))
    ),
    "choose_experts": CheckedOperation(_CPU, experts.choose_experts_cases),
    "weighted_experts": CheckedOperation(_GPUS, _weighted_experts_cases),
    "rms_norm": CheckedOperation(
        _CPU, _each(rows.rms_norm_case, ((3, 96, 0), (17, 64, 32)), ((64, 7168, 0), (4096, 7168, 0), (1000, 512, 64)))
    ),
    "swiglu": CheckedOperation(_CPU, _each(rows.swiglu_case, ((3, 24), (17, 64)), ((64, 2048), (4096, 2048)))),
    "rotate_heads": CheckedOperation(
        _CPU, _each(rows.rotate_heads_case, _HEADS, ((64, 128, 192, 64), (4096, 16, 192, 64)))
    ),
    "latent_rows": CheckedOperation(
        _CPU, _each(rows.latent_rows_case, ((3, 32, 8, 0), (17, 64, 16, 24)), ((64, 512, 64, 1536), (4096, 512, 64, 0)))
    ),
    "read_streams": CheckedOperation(_GPUS, _each(rows.read_streams_case, ((3, 96), (33, 256)), _STREAMS)),
    "write_streams": CheckedOperation(_GPUS, _each(rows.write_streams_case, ((3, 96), (33, 256)), _STREAMS)),
    "unit_rotated_heads": CheckedOperation(
        _GPUS, _each(rows.unit_rotated_heads_case, _HEADS, ((64, 64, 512, 64), (4096, 16, 512, 64)))
    ),
    "normed_latents": CheckedOperation(
        _GPUS, _each(rows.normed_latents_case, ((3, 40, 24, 8), (17, 64, 32, 16)), ((64, 1024, 512, 64),))
    ),
    "multicast": CheckedOperation(_HOPPER, multicast_cases),
    "combine_splits": CheckedOperation(_HOPPER, combine_splits_cases),
}
"""The last two are parts of Hopper's products and attention."""


def names(backend: Backend | None = None) -> list[str]:
    """Returns the names of all operations, or of the public ones that `backend` has kernels for.

    The quick checks of these cover their parts.
    """
    if backend is None:
        return list(OPERATIONS)
    public = {name: operation for name, operation in OPERATIONS.items() if name not in PARTS}
    return [name for name, operation in public.items() if backend in operation.kernels or backend is Backend.REFERENCE]
