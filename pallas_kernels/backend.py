"""The choice of an operation's implementation, made once by what the device is."""

import enum
import functools
import logging

import jax

_log = logging.getLogger(__name__)
_HOPPER_NAMES = ("H100", "H200", "H800", "H20", "GH200")


class Backend(enum.Enum):
    """An implementation of an operation of `pallas_kernels`."""

    REFERENCE = "reference"
    """Plain jax.numpy: any platform, and the oracle of the tests."""
    MOSAIC = "mosaic"
    """Pallas Mosaic GPU kernels: Hopper (sm_90) only; elsewhere only through the interpreter."""


class BackendUnavailableError(RuntimeError):
    """The requested backend cannot run on the device."""


def resolve_backend(device: jax.Device | None = None, requested: Backend | None = None) -> Backend:
    """Returns the backend for `device`: MOSAIC on Hopper, REFERENCE elsewhere.

    Args:
      device: the device that will run the operation; None means the default device of this process.
      requested: a wish to check. With an explicit `device` it is refused where it cannot run. Without one it is
        taken as it is, because a program may be traced here and compiled for another machine.

    Raises:
      BackendUnavailableError: `requested` is MOSAIC and `device` is no Hopper GPU.
      TypeError: `requested` is not a Backend.
    """
    if requested is not None and not isinstance(requested, Backend):
        raise TypeError(f"backend must be a Backend or None, got {requested!r}; write Backend.REFERENCE")
    if requested is not None and (device is None or requested is Backend.REFERENCE):
        return requested
    device = _default_device() if device is None else device
    hopper = is_hopper(device)
    if requested is Backend.MOSAIC and not hopper:
        raise BackendUnavailableError(
            f"Backend.MOSAIC needs compute capability 9.0, but the device is {_describe(device)}; "
            "pass None or Backend.REFERENCE"
        )
    chosen = Backend.MOSAIC if hopper else Backend.REFERENCE
    _log_once(chosen, _describe(device))
    return chosen


def is_hopper(device: jax.Device) -> bool:
    """Returns True for a GPU of compute capability 9.0, attached or described by a compile-only topology."""
    if device.platform not in ("gpu", "cuda"):
        return False
    capability = getattr(device, "compute_capability", None)  # absent from compile-only devices
    if capability is not None:
        return str(capability) == "9.0"
    return any(name in device.device_kind.split() for name in _HOPPER_NAMES)


def _default_device() -> jax.Device:
    configured = jax.config.jax_default_device
    if configured is None:
        return jax.devices()[0]
    return jax.devices(configured)[0] if isinstance(configured, str) else configured


def _describe(device: jax.Device) -> str:
    capability = getattr(device, "compute_capability", None)
    return f"{device.device_kind!r} ({device.platform}{f', sm {capability}' if capability else ''})"


@functools.cache
def _log_once(chosen: Backend, device: str) -> None:
    needed = "is" if chosen is Backend.MOSAIC else "is not"
    _log.info("kernels: %s, because %s %s a Hopper GPU", chosen.value, device, needed)
