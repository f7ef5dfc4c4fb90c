"""Quick checks of a device's kernels before an engine starts, and the fallback of a kernel that fails.

Each check is a process of its own, `python -m pallas_kernels.checks`, with a time limit: one that hangs, crashes or
corrupts its context costs only its own operation. They run one after the other, before this process takes the GPU's
memory, on one of its devices.
"""

import dataclasses
import functools
import json
import logging
import sys
from collections.abc import Mapping
from typing import Any

from dsv3.engine.device.pool import environment_with_memory_fraction, holds_gpu
from dsv3.engine.errors import KernelCheckError
from dsv3.processes.child import ChildResult, run_limited
from pallas_kernels.backend import OPERATIONS, PARTS, Backend, set_fallbacks

_log = logging.getLogger(__name__)
_DEVICE = (sys.executable, "-m", "pallas_kernels.backend")
_CHECKS = (sys.executable, "-m", "pallas_kernels.checks")
_LIMIT_S = 240.0  # a slow check on a busy host must not count as a failure
_MEMORY_FRACTION = 0.1  # the shapes of quick checks are small, and other processes may share the device
_UNTRIED = 2  # exit status of a check that could not run


@dataclasses.dataclass(frozen=True)
class KernelFallback:
    """The back end that replaces an operation's kernel, and the fault that its check found."""

    backend: str
    fault: str


@functools.cache  # once it serves, this process has the device's memory
def check_kernels(gpu: int | None = None) -> dict[str, KernelFallback]:
    """Returns the fallbacks of the operations whose kernels fail here, by name; cached after the first call.

    The checks run on the GPU `gpu` of those that this process sees, None for the first. Raises KernelCheckError where
    the checks cannot run, or one fails for which there is no fallback.
    """
    if holds_gpu():
        raise KernelCheckError(
            "check_kernels: jax has allocated this device's memory already, and the checks are processes of their own; "
            "make the engine before anything else uses jax, or omit check_kernels"
        )
    backend = Backend(_listed(_DEVICE, gpu)[-1])
    if backend is Backend.REFERENCE:
        _log.warning("check_kernels: this device has no kernels to check")
        return {}
    names = _listed((*_CHECKS, "--list", "--backend", backend.value), gpu)
    _log.info("checking %d %s kernels", len(names), backend.value)
    found = {name: _run_check(name, backend, gpu) for name in names}
    faults = _by_operation({name: fault for name, fault in found.items() if fault})
    if lost := sorted(faults.keys() - OPERATIONS):
        raise KernelCheckError(
            f"check_kernels: {lost[0]} fails its check and has no fallback: {faults[lost[0]]}; without check_kernels "
            "it would be used nevertheless"
        )
    has_triton = backend is Backend.MOSAIC and faults
    triton = _listed((*_CHECKS, "--list", "--backend", "triton"), gpu) if has_triton else []
    return {
        name: KernelFallback(_choose_fallback(name, name in triton, gpu).value, fault) for name, fault in faults.items()
    }


def merge_fallbacks(found: Mapping[int, Mapping[str, KernelFallback]]) -> dict[str, KernelFallback]:
    """Returns what all processes replace: what fails in any of them, by process id.

    An operation falls back to Triton only where every process found its kernel faulty and the Triton form correct.
    """
    agreed: dict[str, KernelFallback] = {}
    for name in sorted({name for each in found.values() for name in each}):
        by_process = {process_id: each[name] for process_id, each in sorted(found.items()) if name in each}
        backends = {each.backend for each in by_process.values()}
        backend = backends.pop() if len(by_process) == len(found) and len(backends) == 1 else Backend.REFERENCE.value
        fault = "; ".join(f"process {process_id}: {each.fault}" for process_id, each in by_process.items())
        agreed[name] = KernelFallback(backend, fault)
    return agreed


def apply_fallbacks(replaced: Mapping[str, KernelFallback]) -> None:
    """Replaces the operations' back ends in this process, with a warning; call it before anything is traced."""
    for name, each in replaced.items():
        _log.warning(
            "THE KERNEL OF %s FAILS ITS CHECK: %s. The operation falls back to the %s backend, which is slower",
            *(name, each.fault, each.backend),
        )
    set_fallbacks({name: Backend(each.backend) for name, each in replaced.items()})


def _by_operation(faults: Mapping[str, str]) -> dict[str, str]:
    """Returns the faults by operation; a check of `PARTS` counts for each of its operations."""
    found: dict[str, list[str]] = {}
    for name, fault in faults.items():
        for operation in PARTS.get(name, (name,)):
            found.setdefault(operation, []).append(f"{name}: {fault}" if name in PARTS else fault)
    return {operation: "; ".join(each) for operation, each in found.items()}


def _choose_fallback(name: str, has_triton: bool, gpu: int | None) -> Backend:
    """Returns the back end for an operation whose kernel has failed: Triton where that form exists and passes."""
    if not has_triton:
        return Backend.REFERENCE
    try:
        fault = _run_check(name, Backend.TRITON, gpu)
    except KernelCheckError as error:  # this device or installation has no Triton
        fault = str(error)
    if fault:
        _log.warning("%s does not fall back to its Triton form: %s", name, fault)
    return Backend.REFERENCE if fault else Backend.TRITON


def _run_check(name: str, backend: Backend, gpu: int | None) -> str:
    """Returns the fault of an operation, empty if it passes; KernelCheckError where nothing could be tried."""
    ended = _run((*_CHECKS, name, "--quick", "--backend", backend.value), gpu)
    if ended.status == _UNTRIED and not ended.timed_out:
        raise KernelCheckError(f"check_kernels: the check of {name} cannot run ({_last_line(ended)})")
    rows = _rows(ended.output)
    failed = [row for row in rows if not row.get("passed")]
    if failed:
        fault = f"{failed[0].get('case', '')}: {failed[0].get('says') or 'differs from the reference'}"
        fault += f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
    elif ended.status != 0 or ended.timed_out:
        fault = f"the check ends after {len(rows)} cases: {ended.cause}; {_last_line(ended)}"
    else:
        fault = "" if rows else "the check has no case"
    _log.info("%s on %s: %s, %.1f s", name, backend.value, "fails" if fault else "passes", ended.seconds)
    return fault


def _rows(output: str) -> list[dict[str, Any]]:
    """Returns the rows that a check has printed; an incomplete one counts as a failed row."""
    rows = []
    for line in output.splitlines():
        if line.startswith("{"):
            try:
                rows.append(json.loads(line))
            except ValueError:
                rows.append({"passed": False, "says": f"printed no row: {line[:80]!r}"})
    return rows


def _listed(command: tuple[str, ...], gpu: int | None) -> list[str]:
    """Returns the words that a command prints. Raises KernelCheckError where it fails."""
    ended = _run(command, gpu)
    words = ended.output.split()
    if ended.status != 0 or not words:
        raise KernelCheckError(
            f"check_kernels: the checks cannot run: {' '.join(command[1:])}: {ended.cause}; {_last_line(ended)}"
        )
    return words


def _run(command: tuple[str, ...], gpu: int | None) -> ChildResult:
    environment = environment_with_memory_fraction(_MEMORY_FRACTION)
    if gpu is not None:
        environment["JAX_CUDA_VISIBLE_DEVICES"] = str(gpu)
    try:
        return run_limited(command, _LIMIT_S, environment)
    except OSError as error:
        raise KernelCheckError(f"check_kernels: the checks cannot run: {command[0]}: {error.strerror}") from error


def _last_line(ended: ChildResult) -> str:
    lines = ended.log.strip().splitlines()
    return lines[-1][:300] if lines else "it printed nothing"
