"""The NVIDIA GPUs with kernels, by compute capability: their backend, and the limits of their tiles."""

import contextlib
import contextvars
import dataclasses
import re
from collections.abc import Iterator

import jax

_KIB = 1 << 10


@dataclasses.dataclass(frozen=True)
class GpuKind:
    """Properties of all GPUs of one compute capability, from the tables of NVIDIA's CUDA programming guide."""

    capability: tuple[int, int]
    kernels: str
    """The value of their default `Backend`."""
    shared_memory: int
    """Bytes of shared memory that one thread block may use."""
    fp8: bool
    """Whether tensor cores multiply e4m3. Where not, kernels widen it to float16, which is exact."""
    multiprocessors: int
    """Of the largest GPU of the kind; `multiprocessors` returns those of a device."""
    names: tuple[str, ...]
    """Words in device names, for compile-only devices, which have no capability attribute."""

    @property
    def architecture(self) -> str:
        """Its name for a compiler: `sm_89`."""
        return f"sm_{self.number}"

    @property
    def number(self) -> int:
        """The capability in two or three digits: 89 for 8.9."""
        return 10 * self.capability[0] + self.capability[1]


KINDS = (
    GpuKind((8, 0), "triton", 163 * _KIB, False, 108, ("A100", "A800", "A30")),
    GpuKind((8, 6), "triton", 99 * _KIB, False, 84, ("A40", "A10", "A10G", "A16", "A6000", "3090")),
    GpuKind((8, 9), "triton", 99 * _KIB, True, 142, ("L4", "L40", "L40S", "L20", "4090")),
    GpuKind((9, 0), "mosaic", 227 * _KIB, True, 132, ("H100", "H200", "H800", "H20", "GH200")),
    GpuKind((10, 0), "triton", 227 * _KIB, True, 148, ("B200", "GB200", "B100")),
    GpuKind((12, 0), "triton", 99 * _KIB, True, 188, ("5090",)),
)
"""One row per capability. Code for a capability runs on no other major one, and from sm_100 on only on its own."""

_described: contextvars.ContextVar[GpuKind | None] = contextvars.ContextVar("described GPU", default=None)


class UnknownGpuError(RuntimeError):
    """Kernels were requested for an unknown GPU."""


def kind_of(device: jax.Device) -> GpuKind | None:
    """Returns the kind of an NVIDIA GPU, attached or described by a compile-only topology; None for other devices."""
    if device.platform not in ("gpu", "cuda"):
        return None
    capability = getattr(device, "compute_capability", None)  # absent from compile-only devices
    if capability is not None:
        return next((kind for kind in KINDS if _dotted(kind) == str(capability)), None)
    words = re.split(r"[\s-]+", device.device_kind)
    return next((kind for kind in KINDS if any(name in words for name in kind.names)), None)


def multiprocessors(device: jax.Device) -> int:
    """Returns the multiprocessors of a GPU, attached or described by a compile-only topology: 78 of an H20.

    Without a count, the largest GPU of the kind is assumed; for the CPU that interprets kernels, an H200.
    """
    own = getattr(device, "core_count", None) if device.platform in ("gpu", "cuda") else None
    return (kind_of(device) or by_number(90)).multiprocessors if own is None else int(own)


def default_device() -> jax.Device:
    """Returns the default device of this process."""
    configured = jax.config.jax_default_device
    if configured is None:
        return jax.devices()[0]
    return jax.devices(configured)[0] if isinstance(configured, str) else configured


def by_number(number: int) -> GpuKind:
    """Returns the kind of a capability such as 89; raises ValueError for an unknown one."""
    for kind in KINDS:
        if kind.number == number:
            return kind
    raise ValueError(f"no kernels for compute capability {number}; known are {[kind.number for kind in KINDS]}")


def known() -> str:
    """Lists the capabilities that have kernels: "8.0, 8.6, ..."."""
    return ", ".join(map(_dotted, KINDS))


@contextlib.contextmanager
def compiling_for(kind: GpuKind) -> Iterator[GpuKind]:
    """Traces kernels in the block for `kind`, whatever the devices of this process are."""
    token = _described.set(kind)
    try:
        yield kind
    finally:
        _described.reset(token)


def target(device: jax.Device) -> GpuKind:
    """Returns the kind that kernels are traced for: that of `compiling_for`, or of `device`.

    Raises:
      UnknownGpuError: there is neither.
    """
    kind = _described.get() or kind_of(device)
    if kind is None:
        raise UnknownGpuError(
            f"Backend.TRITON was asked for on {device.device_kind!r}, which is no GPU of capability {known()}; trace "
            "inside of gpus.compiling_for(kind) to compile for another machine, or use Backend.REFERENCE"
        )
    return kind


def _dotted(kind: GpuKind) -> str:
    return ".".join(map(str, kind.capability))
