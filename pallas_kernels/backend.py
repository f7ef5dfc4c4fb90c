"""The choice of an operation's implementation, made once by what the device is."""

import enum
import functools
import importlib.util
import logging

import jax

from pallas_kernels import gpus, native
from pallas_kernels.lazily import load_mosaic
from pallas_kernels.toolchain import check_ptxas, prefer_own_ptxas

_log = logging.getLogger(__name__)


class Backend(enum.Enum):
    """An implementation of an operation of `pallas_kernels`."""

    REFERENCE = "reference"
    """Plain jax.numpy: any platform, and the oracle of the tests."""
    NATIVE = "native"
    """C++ on a CPU: products of few rows, attention, norms, the choice of experts; reference for the rest."""
    MOSAIC = "mosaic"
    """Pallas Mosaic GPU kernels: Hopper (sm_90) only; elsewhere only through the interpreter."""
    TRITON = "triton"
    """Triton kernels by way of jax-triton: every GPU of `gpus.KINDS`, and what all but Hopper get."""


class BackendUnavailableError(RuntimeError):
    """The requested backend cannot run on the device."""


def resolve_backend(device: jax.Device | None = None, requested: Backend | None = None) -> Backend:
    """Returns the backend for `device`: what `gpus.KINDS` says, NATIVE on a CPU with kernels, REFERENCE elsewhere.

    Args:
      device: the device that will run the operation; None means the default device of this process.
      requested: a wish to check. With an explicit `device` it is refused where it cannot run. Without one it is
        taken as it is, because a program may be traced here and compiled for another machine.

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
    if requested is Backend.TRITON and gpus.kind_of(device) is not None and _has_jax_triton():
        return requested  # on Hopper too, where it is not the first choice
    if requested not in (None, chosen):
        raise BackendUnavailableError(
            f"{requested} cannot run on {_describe(device)}, which {reason}; pass None or Backend.REFERENCE"
        )
    _log_once(chosen, f"{_describe(device)} {reason}")
    return chosen


def prepare(backend: Backend) -> None:
    """Makes this process ready to compile programs with kernels of `backend`, and to load them from a file.

    Raises ValueError where the ptxas that would assemble them is too old.
    """
    if backend in (Backend.MOSAIC, Backend.TRITON):
        prefer_own_ptxas()
        check_ptxas()
    if backend is Backend.MOSAIC:
        load_mosaic()


def _on_accelerator(device: jax.Device) -> tuple[Backend, str]:
    """Returns the backend of a device that is no CPU, and what it says about the device."""
    kind = gpus.kind_of(device)
    if kind is None:
        return Backend.REFERENCE, f"is no GPU of compute capability {gpus.known()}"
    chosen = Backend(kind.kernels)
    if chosen is Backend.MOSAIC:
        return chosen, "is a Hopper GPU"
    if not _has_jax_triton():
        return Backend.REFERENCE, "needs jax-triton for its kernels; install the 'triton' extra"
    return chosen, f"is a GPU of {kind.architecture}"


@functools.cache
def _has_jax_triton() -> bool:
    return importlib.util.find_spec("jax_triton") is not None


def traced_gpu() -> gpus.GpuKind:
    """Returns the GPU that Triton kernels are traced for: see `gpus.target`, which raises UnknownGpuError."""
    return gpus.target(gpus.default_device())


def _on_cpu() -> tuple[Backend, str]:
    """Returns the backend of this process's CPU, and why."""
    library = native.library()
    if library.targets:
        return Backend.NATIVE, f"has kernels of its own, {library.reason}"
    return Backend.REFERENCE, f"has no kernels of its own: {library.reason}"


def asks_host(backend: Backend) -> bool:
    """Returns whether a condition on device data makes the host wait for it: on GPUs, in the programs of `backend`."""
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
