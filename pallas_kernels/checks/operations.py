"""The public operations by name: which backends have kernels of their own for each, and its cases."""

import dataclasses
from collections.abc import Callable, Iterable

from pallas_kernels.backend import Backend
from pallas_kernels.checks import attention, experts, hopper, prefill, products, rows, sparse, trained
from pallas_kernels.checks.case import Case

_MOSAIC, _TRITON, _NATIVE = Backend.MOSAIC, Backend.TRITON, Backend.NATIVE


@dataclasses.dataclass(frozen=True)
class Operation:
    """A public operation.

    Attributes:
      kernels: the backends that have code of their own for it. The others take the reference's.
      cases: (backend, quick) -> its cases; quick ones are two small shapes, the others those of models and ragged ones.
    """

    kernels: frozenset[Backend]
    cases: Callable[[Backend, bool], Iterable[Case]]


_EVERYWHERE = frozenset({_MOSAIC, _TRITON, _NATIVE})
_GPUS = frozenset({_MOSAIC, _TRITON})
_CPU, _HOPPER = frozenset({_NATIVE}), frozenset({_MOSAIC})

OPERATIONS = {
    "mla_decode": Operation(_EVERYWHERE, attention.mla_decode_cases),
    "mla_prefill": Operation(_EVERYWHERE, prefill.mla_prefill_cases),
    "mla_prefill_context": Operation(_EVERYWHERE, prefill.mla_prefill_context_cases),
    "mla_prefill_spans": Operation(_GPUS, prefill.mla_prefill_spans_cases),
    "mla_prefill_chosen": Operation(_GPUS, prefill.mla_prefill_chosen_cases),
    "write_pages": Operation(_GPUS, prefill.write_pages_cases),
    "index_scores": Operation(_GPUS, sparse.index_scores_cases),
    "choose": Operation(_GPUS, sparse.choose_cases),
    "attend_chosen": Operation(_EVERYWHERE, sparse.attend_chosen_cases),
    "fp8_gemm": Operation(_EVERYWHERE, products.fp8_gemm_cases),
    "quantize_1x128": Operation(_EVERYWHERE, rows.quantize_cases),
    "swiglu_quantize": Operation(_EVERYWHERE, rows.swiglu_quantize_cases),
    "layer_gemm": Operation(_EVERYWHERE, products.layer_gemm_cases),
    "plain_gemm": Operation(_CPU, products.plain_gemm_cases),
    "head_gemm": Operation(_EVERYWHERE, products.head_gemm_cases),
    "grouped_gemm_contiguous": Operation(_EVERYWHERE, experts.grouped_cases),
    "fp8_grouped_gemm_contiguous": Operation(_EVERYWHERE, experts.fp8_grouped_cases),
    "int4_grouped_gemm_contiguous": Operation(_HOPPER, experts.int4_grouped_cases),
    "trained_gemm": Operation(_EVERYWHERE, trained.trained_gemm_cases),
    "trained_gemm_contiguous": Operation(_EVERYWHERE, trained.trained_gemm_contiguous_cases),
    "align_groups": Operation(_CPU, experts.align_groups_cases),
    "choose_experts": Operation(_CPU, experts.choose_experts_cases),
    "rms_norm": Operation(_CPU, rows.rms_norm_cases),
    "swiglu": Operation(_CPU, rows.swiglu_cases),
    "rotate_heads": Operation(_CPU, rows.rotate_heads_cases),
    "latent_rows": Operation(_CPU, rows.latent_rows_cases),
    "multicast": Operation(_HOPPER, hopper.multicast_cases),
    "combine_splits": Operation(_HOPPER, hopper.combine_splits_cases),
}
"""The last two are parts of Hopper's products and attention, which a report names apart."""

_PARTS = ("multicast", "combine_splits")


def names(backend: Backend | None = None) -> list[str]:
    """Returns the names of all operations, or of those public ones that `backend` has kernels for.

    The quick checks of these reach their parts, too.
    """
    if backend is None:
        return list(OPERATIONS)
    public = {name: operation for name, operation in OPERATIONS.items() if name not in _PARTS}
    return [name for name, operation in public.items() if backend in operation.kernels or backend is Backend.REFERENCE]
