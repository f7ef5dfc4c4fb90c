"""The public operations by name: which backends have kernels of their own for each, and its cases."""

import dataclasses
from collections.abc import Callable, Iterable

from pallas_kernels.backend import Backend
from pallas_kernels.checks import attention, products
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

OPERATIONS = {
    "fp8_gemm": Operation(_EVERYWHERE, products.fp8_gemm_cases),
    "layer_gemm": Operation(_EVERYWHERE, products.layer_gemm_cases),
    "mla_decode": Operation(_EVERYWHERE, attention.mla_decode_cases),
}


def names(backend: Backend | None = None) -> list[str]:
    """Returns the names of all operations, or of those that `backend` has kernels for; the reference checks all."""
    is_asked = backend in (None, Backend.REFERENCE)
    return [name for name, operation in OPERATIONS.items() if is_asked or backend in operation.kernels]
