"""Selection of an operation's implementation, by device and by failed kernel checks.

`python -m pallas_kernels.backend` prints the backend of the default device.
"""

import enum
import functools
import importlib.util
import logging
from collections.abc import Mapping

import jax

from pallas_kernels import gpus, native
from pallas_kernels.mosaic import load_mosaic
from pallas_kernels.toolchain import check_ptxas, prefer_own_ptxas

_log = logging.getLogger(__name__)

OPERATIONS = frozenset(
    (
        *("mla_decode", "mla_prefill", "mla_prefill_context", "mla_prefill_spans", "mla_prefill_topk", "write_pages"),
        *("index_scores", "topk_indices", "attend_topk", "attend_compressed"),
        *("complete_entries", "encode_rows"),
        *("fp8_gemm", "quantize_1x128", "swiglu_quantize", "trained_gemm"),
        *("layer_gemm", "plain_gemm", "head_gemm"),
        *("grouped_gemm_contiguous", "fp8_grouped_gemm_contiguous"),
        *("int4_grouped_gemm_contiguous", "fp4_grouped_gemm_contiguous"),
        *("trained_gemm_contiguous", "align_groups", "queue_rows"),
        *("choose_experts", "weighted_experts"),
        *("rms_norm", "swiglu", "rotate_heads", "latent_rows"),
        *("read_streams", "write_streams", "unit_rotated_heads"),
        "normed_latents",
    )
)
"""The operations that have kernels, by name. Data between operations has one layout on every
backend (scales, FP8 rows, words of INT4 and FP4, the order of rows), so each operation can fall back by itself."""

_PAGED = ("mla_decode", "mla_prefill_context")
PARTS: dict[str, tuple[str, ...]] = {
    "combine_splits": _PAGED,
    "multicast": (*_PAGED, "fp8_gemm", "layer_gemm", "grouped_gemm_contiguous", "fp8_grouped_gemm_contiguous"),
}
"""Parts of Hopper's kernels with checks of their own, each with the operations whose kernels contain it."""


class Backend(enum.Enum):
    """An implementation of an operation of `pallas_kernels`."""

    REFERENCE = "reference"
    """Plain jax.numpy: any platform, and the oracle of the tests."""
    NATIVE = "native"
    """C++ on a CPU: products of few rows, attention, norms, the router; reference for the rest."""
    MOSAIC = "mosaic"
    """Pallas Mosaic GPU kernels: Hopper (sm_90) only; elsewhere only in the interpreter."""
    TRITON = "triton"
    """Triton kernels through jax-triton: every GPU of `gpus.KINDS`; the default of all but Hopper."""


class BackendUnavailableError(RuntimeError):
    """The requested backend cannot run on the device."""


def resolve_backend(device: jax.Device | None = None, requested: Backend | None = None) -> Backend:
    """Returns the backend for `device`: that of `gpus.KINDS`, NATIVE on a CPU with kernels, REFERENCE elsewhere.

    Args:
      device: the device that will run the operation; None means the default device of this process.
      requested: returned if not None. With an explicit `device` it is rejected if it cannot run there. Without one it
        is not checked, because a program may be traced here and compiled for another machine.

    Raises:
      BackendUnavailableError: `device` cannot run `requested`.
      TypeError: `requested` is not a Backend.
    """
    if requested is not None and not isinstance(requested, Backend):
        raise TypeError(f"backend must be a Backend or None, got {requested!r}; write Backend.REFERENCE")
    if requested is not None and (device is None or requested is Backend.REFERENCE):
        return requested
    device = gpus.default_device() if device is None else device
    chosen, reason = _on_cpu() if device.platform == "cpu" else _on_accelerator(device)
    if requested is Backend.TRITON and gpus.kind_of(device) is not None and has_jax_triton():
        return requested  # on Hopper too, where it is not the default
    if requested not in (None, chosen):
        raise BackendUnavailableError(
            f"{requested} cannot run on {_describe(device)}, which {reason}; pass None or Backend.REFERENCE"
        )
    _log_once(chosen, f"{_describe(device)} {reason}")
    return chosen


_fallbacks: dict[str, Backend] = {}


def set_fallbacks(table: Mapping[str, Backend]) -> None:
    """Sets the default backends of the operations in `table` in this process; all others use their device's.

    Call it before programs are traced: compiled ones do not change. Raises ValueError for names that are not in
    `OPERATIONS`.
    """
    if unknown := sorted(table.keys() - OPERATIONS):
        raise ValueError(f"set_fallbacks: {', '.join(unknown)} is not in OPERATIONS: {', '.join(sorted(OPERATIONS))}")
    if table == _fallbacks:
        return
    _fallbacks.clear()
    _fallbacks.update(table)
    jax.clear_caches()  # traced functions must be traced again


def fallbacks() -> dict[str, Backend]:
    """Returns the table of `set_fallbacks`, sorted by name."""
    return dict(sorted(_fallbacks.items()))


def with_fallback(operation: str, requested: Backend | None) -> Backend | None:
    """Returns the backend to request for `operation`: `requested`, else that of `fallbacks`, if any.

    An operation passes the result to the operations it calls. So a fallback of an operation includes those, and a
    fallback of an inner operation applies in all callers.
    """
    assert operation in OPERATIONS, operation
    return _fallbacks.get(operation) if requested is None else requested


def resolve_operation(operation: str, requested: Backend | None) -> Backend:
    """Returns the backend that runs `operation`: `with_fallback`, or that of the default device."""
    return resolve_backend(requested=with_fallback(operation, requested))


def prepare(backend: Backend) -> None:
    """Prepares this process to compile programs with kernels of `backend`, and to load them from a file.

    Raises ValueError where the ptxas that would assemble them is too old.
    """
    if backend in (Backend.MOSAIC, Backend.TRITON):
        prefer_own_ptxas()
        check_ptxas()
    if backend is Backend.MOSAIC:
        load_mosaic()


def _on_accelerator(device: jax.Device) -> tuple[Backend, str]:
    """Returns the backend of a device other than a CPU, and the reason."""
    kind = gpus.kind_of(device)
    if kind is None:
        return Backend.REFERENCE, f"is no GPU of compute capability {gpus.known()}"
    chosen = Backend(kind.kernels)
    if chosen is Backend.MOSAIC:
        return chosen, "is a Hopper GPU"
    if not has_jax_triton():
        return Backend.REFERENCE, "needs jax-triton for its kernels; install the 'triton' extra"
    return chosen, f"is a GPU of {kind.architecture}"


@functools.cache
def has_jax_triton() -> bool:
    """Returns whether Triton kernels can be started from jax here."""
    return importlib.util.find_spec("jax_triton") is not None


def uses_triton(backend: Backend) -> bool:
    """Returns whether programs of `backend` may use Triton kernels, on Hopper too; logs once if jax-triton is missing.

    Some operations have Triton kernels alone: Mosaic cannot scan within a thread block, nor gather rows by an operation
    of its own.
    """
    if backend not in (Backend.MOSAIC, Backend.TRITON):
        return False
    if not has_jax_triton():
        warn_once("kernels: jax.numpy instead of Triton's, because jax-triton is missing; install the 'triton' extra")
        return False
    return True


def traced_gpu(backend: Backend = Backend.TRITON) -> gpus.GpuKind:
    """Returns the GPU that Triton kernels in programs of `backend` are traced for.

    It is Hopper for MOSAIC, else that of `gpus.target`, which raises UnknownGpuError.
    """
    return gpus.by_number(90) if backend is Backend.MOSAIC else gpus.target(gpus.default_device())


def _on_cpu() -> tuple[Backend, str]:
    """Returns the backend of this process's CPU, and the reason."""
    library = native.library()
    if library.targets:
        return Backend.NATIVE, f"has kernels of its own, {library.reason}"
    return Backend.REFERENCE, f"has no kernels of its own: {library.reason}"


def blocks_host(backend: Backend) -> bool:
    """Returns whether a condition on device data blocks the host: on GPUs, in programs of `backend`."""
    return backend in (Backend.MOSAIC, Backend.TRITON)


def is_hopper(device: jax.Device) -> bool:
    """Returns True for a GPU of compute capability 9.0, attached or described by a compile-only topology."""
    kind = gpus.kind_of(device)
    return kind is not None and Backend(kind.kernels) is Backend.MOSAIC


def _describe(device: jax.Device) -> str:
    capability = getattr(device, "compute_capability", None)
    return f"{device.device_kind!r} ({device.platform}{f', sm {capability}' if capability else ''})"


@functools.cache
def _log_once(chosen: Backend, reason: str) -> None:
    level = logging.WARNING if chosen is Backend.REFERENCE else logging.INFO
    _log.log(level, "kernels: %s, because %s", chosen.value, reason)


@functools.cache
def warn_once(text: str) -> None:
    """Logs a warning, the same one once per process."""
    _log.warning("%s", text)


if __name__ == "__main__":
    print(resolve_backend().value)
