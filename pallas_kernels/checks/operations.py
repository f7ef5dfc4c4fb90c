"""The public operations by name: the backends with kernels for each, and its cases.

Parts of Hopper's kernels have checks of their own: multicast within clusters, and combining split requests.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.backend import Backend
from pallas_kernels.checks import attention, compressed, experts, prefill, products, rows, sparse
from pallas_kernels.checks.attention import ATTENDED, LATENT, Decode, named
from pallas_kernels.checks.case import Case
from pallas_kernels.float8 import E4M3
from pallas_kernels.mla.mosaic_combine import combine_splits
from pallas_kernels.mla.schedule import DecodeSchedule, schedule_pages

_MOSAIC, _TRITON, _NATIVE = Backend.MOSAIC, Backend.TRITON, Backend.NATIVE


@dataclasses.dataclass(frozen=True)
class CheckedOperation:
    """A public operation.

    Attributes:
      kernels: the backends with kernels. The others use the reference.
      cases: (backend, quick) -> its cases; two small shapes if quick, else models' and ragged ones.
    """

    kernels: frozenset[Backend]
    cases: Callable[[Backend, bool], Iterable[Case]]


_EVERYWHERE = frozenset({_MOSAIC, _TRITON, _NATIVE})
_GPUS = frozenset({_MOSAIC, _TRITON})
_CPU, _HOPPER = frozenset({_NATIVE}), frozenset({_MOSAIC})


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


OPERATIONS = {
    "mla_decode": CheckedOperation(_EVERYWHERE, attention.mla_decode_cases),
    "mla_prefill": CheckedOperation(_EVERYWHERE, prefill.mla_prefill_cases),
    "mla_prefill_context": CheckedOperation(_EVERYWHERE, prefill.mla_prefill_context_cases),
    "mla_prefill_spans": CheckedOperation(_GPUS, prefill.mla_prefill_spans_cases),
    "mla_prefill_topk": CheckedOperation(_GPUS, prefill.mla_prefill_topk_cases),
    "write_pages": CheckedOperation(_GPUS, prefill.write_pages_cases),
    "index_scores": CheckedOperation(_GPUS, sparse.index_scores_cases),
    "topk_indices": CheckedOperation(_GPUS, sparse.topk_indices_cases),
    "attend_topk": CheckedOperation(_EVERYWHERE, sparse.attend_topk_cases),
    "attend_compressed": CheckedOperation(_GPUS, compressed.attend_compressed_cases),
    "complete_entries": CheckedOperation(_GPUS, compressed.complete_entries_cases),
    "encode_rows": CheckedOperation(_GPUS, compressed.encode_rows_cases),
    "fp8_gemm": CheckedOperation(_EVERYWHERE, products.fp8_gemm_cases),
    "quantize_1x128": CheckedOperation(_EVERYWHERE, rows.quantize_cases),
    "swiglu_quantize": CheckedOperation(_EVERYWHERE, rows.swiglu_quantize_cases),
    "layer_gemm": CheckedOperation(_EVERYWHERE, products.layer_gemm_cases),
    "plain_gemm": CheckedOperation(_CPU, products.plain_gemm_cases),
    "head_gemm": CheckedOperation(_EVERYWHERE, products.head_gemm_cases),
    "grouped_gemm_contiguous": CheckedOperation(_EVERYWHERE, experts.grouped_cases),
    "fp8_grouped_gemm_contiguous": CheckedOperation(_EVERYWHERE, experts.fp8_grouped_cases),
    "int4_grouped_gemm_contiguous": CheckedOperation(_GPUS, experts.int4_grouped_cases),
    "fp4_grouped_gemm_contiguous": CheckedOperation(_GPUS, experts.fp4_grouped_cases),
    "trained_gemm": CheckedOperation(_EVERYWHERE, products.trained_gemm_cases),
    "trained_gemm_contiguous": CheckedOperation(_EVERYWHERE, products.trained_gemm_contiguous_cases),
    "align_groups": CheckedOperation(_EVERYWHERE, experts.align_groups_cases),
    "queue_rows": CheckedOperation(_GPUS, experts.queue_rows_cases),
    "choose_experts": CheckedOperation(_CPU, experts.choose_experts_cases),
    "weighted_experts": CheckedOperation(_GPUS, experts.weighted_experts_cases),
    "rms_norm": CheckedOperation(_CPU, rows.rms_norm_cases),
    "swiglu": CheckedOperation(_CPU, rows.swiglu_cases),
    "rotate_heads": CheckedOperation(_CPU, rows.rotate_heads_cases),
    "latent_rows": CheckedOperation(_CPU, rows.latent_rows_cases),
    "read_streams": CheckedOperation(_GPUS, rows.read_streams_cases),
    "write_streams": CheckedOperation(_GPUS, rows.write_streams_cases),
    "unit_rotated_heads": CheckedOperation(_GPUS, rows.unit_rotated_heads_cases),
    "normed_latents": CheckedOperation(_GPUS, rows.normed_latents_cases),
    "multicast": CheckedOperation(_HOPPER, multicast_cases),
    "combine_splits": CheckedOperation(_HOPPER, combine_splits_cases),
}
"""The last two are parts of Hopper's products and attention."""

_PARTS = ("multicast", "combine_splits")


def names(backend: Backend | None = None) -> list[str]:
    """Returns the names of all operations, or of the public ones that `backend` has kernels for.

    The quick checks of these cover their parts.
    """
    if backend is None:
        return list(OPERATIONS)
    public = {name: operation for name, operation in OPERATIONS.items() if name not in _PARTS}
    return [name for name, operation in public.items() if backend in operation.kernels or backend is Backend.REFERENCE]
