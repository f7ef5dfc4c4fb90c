"""Starts jax's devices; where its GPU plugin does not start, the error says what to change on this machine."""

import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path

import jax

from dsv3.logs import plugin_errors

_ROOT = Path("/")
_VERSION = "proc/driver/nvidia/version"
_DEVICE_FILES = ("dev/nvidia[0-9]*", "dev/nvidiactl", "dev/dxg")
# Extras, jax's plugin in each, and the oldest driver that CUDA of its version runs on.
_EXTRAS = (("cuda13", "jax_cuda13_plugin", 580), ("cuda12", "jax_cuda12_plugin", 525))
_ON_PURPOSE = "To run on the CPU on purpose, set JAX_PLATFORMS=cpu"


def started_devices() -> list[jax.Device]:
    """Returns jax's devices, starting them if necessary.

    Raises ValueError where jax cannot start, and where it has only a CPU on a machine with a GPU, unless JAX_PLATFORMS
    asks for that: a model would load into the host's memory and run slowly, with nothing but a log line to explain it.
    """
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter, without a text, where no requested platform is left
        reason = "; ".join(filter(None, (str(error), plugin_errors()))) or "it gives no reason"
        platforms = f" with JAX_PLATFORMS={jax.config.jax_platforms}" if jax.config.jax_platforms else ""
        raise ValueError(f"jax does not start{platforms} ({reason}). {_machine()}. {_ON_PURPOSE}") from error
    if devices[0].platform == "cpu" and not jax.config.jax_platforms and (driver_version() is not None or _has_files()):
        reason = plugin_errors() or "jax gives no reason here"
        raise ValueError(f"jax runs on the CPU ({reason}). {_machine()}. {_ON_PURPOSE}")
    return devices


def _has_files() -> bool:
    return any(any(_ROOT.glob(pattern)) for pattern in _DEVICE_FILES)


def _machine() -> str:
    """Returns what this machine has, and what to change."""
    version, files = driver_version(), _has_files()
    installed = [extra for extra in _EXTRAS if importlib.util.find_spec(extra[1]) is not None]
    if version is None and not files:
        return "This machine has no NVIDIA driver: /proc/driver/nvidia/version and /dev/nvidia0 are missing"
    driver = f"NVIDIA driver {version}" if version else "an NVIDIA device"
    return f"This machine has {driver}. {_advice(version or '', files, installed)}"


def driver_version() -> str | None:
    """Returns the version of the kernel's NVIDIA driver, None without one."""
    try:
        text = (_ROOT / _VERSION).read_text(errors="replace")
    except OSError:
        return None
    found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return found[1] if found else "of unknown version"


def _advice(version: str, files: bool, installed: Sequence[tuple[str, str, int]]) -> str:
    major = int(version.split(".")[0]) if version[:1].isdigit() else None
    suits = next((extra for extra, _, oldest in _EXTRAS if major is None or major >= oldest), None)
    if suits is None:
        return f"Update the driver: {_EXTRAS[0][2]} or newer for the extra cuda13, {_EXTRAS[1][2]} for cuda12"
    if not installed:
        return f"jax has no plugin for it; install this package with the extra that brings one: {_install(suits)}"
    extra, _, oldest = installed[0]
    if major is not None and major < oldest:
        return f"The extra {extra} needs driver {oldest} or newer; update it, or {_install(suits)} in a new environment"
    if not files:
        return "There is no /dev/nvidia0 here: give the container its GPUs (docker run --gpus all)"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    unset = "" if hidden is None else f"CUDA_VISIBLE_DEVICES is {hidden!r}; unset it. "
    return f"{unset}Reinstall the extra {extra} with CUDA's libraries: {_install(extra)}"


def _install(extra: str) -> str:
    return f"pip install -e '.[{extra}]'"
