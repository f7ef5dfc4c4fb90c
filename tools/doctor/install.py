"""Checks the installation: `machine` reads what the system says, `jax` starts the devices and computes on each."""

import importlib.metadata
import math
import os
import platform
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tools.doctor.rows import CaseResult, run_cases

GB = 1e9
_QUERY_S = 60.0  # the first query of a machine whose driver keeps no state starts its GPUs
_MOST_USED = 2 * GB  # that a GPU's driver and a desktop hold
_SHARED_MEMORY = 1 * GB  # NCCL's buffers of 8 GPUs; a container has 64 MB where it is not asked for more
_CACHE_DISK = 2 * GB
_PACKAGE = re.compile(r"dsv3|jax.*|nvidia[-_](nccl|cudnn|cublas|cuda[-_]nvcc).*|triton|numpy", re.IGNORECASE)


def count_gpus() -> int:
    """Returns the number of NVIDIA GPUs that this machine, or this container, has."""
    return sum(len(list(Path("/dev").glob(pattern))) for pattern in ("nvidia[0-9]*", "dxg"))


def query(*arguments: str) -> str:
    """Returns what nvidia-smi prints, "" where there is none. Raises RuntimeError where it fails."""
    if shutil.which("nvidia-smi") is None:
        return ""
    ran = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=_QUERY_S, check=False)
    if ran.returncode:
        raise RuntimeError(f"nvidia-smi {' '.join(arguments)} fails: {(ran.stdout + ran.stderr).strip()[-300:]}")
    return ran.stdout


def used_bytes() -> list[float]:
    """Returns what is in use of each GPU's memory, by whatever process; nothing where nvidia-smi does not say."""
    try:
        text = query("--query-gpu=memory.used", "--format=csv,noheader,nounits")
    except (RuntimeError, subprocess.TimeoutExpired):
        return []
    return [float(line) * 2**20 for line in text.splitlines() if line.strip().isdigit()]


def _driver() -> str:
    from dsv3.engine.device.driver import driver_version

    found = driver_version()
    return f"NVIDIA driver {found}" if found else "no NVIDIA driver"


def _gpus() -> CaseResult | str:
    text = query("--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits")
    if not text:
        return "nvidia-smi is not on PATH" if count_gpus() else "no NVIDIA GPU"
    gpus = Counter(tuple(word.strip() for word in line.split(",")) for line in text.splitlines())
    says = ", ".join(f"{count} x {_gpu(*gpu)}" for gpu, count in gpus.items())
    return CaseResult("gpus", True, says, {"count": float(gpus.total())})


def _gpu(name: str, mib: str = "?", capability: str = "?") -> str:
    return f"{name} ({mib} MiB, compute capability {capability})"


def _others() -> CaseResult | str:
    used = used_bytes()
    if not used:
        there = count_gpus() or shutil.which("nvidia-smi") is not None
        return "not known: nvidia-smi does not say" if there else "no NVIDIA GPU"
    busy = [f"GPU {i}: {size / GB:.1f} GB" for i, size in enumerate(used) if size > _MOST_USED]
    says = f"other processes hold memory ({', '.join(busy)}); end them" if busy else ""
    return CaseResult("other processes", not busy, says, {"GB in use on the fullest GPU": max(used) / GB})


def _topology() -> str:
    found = query("topo", "-m") + query("topo", "-p2p", "r")
    print(found, file=sys.stderr)
    return "in this check's log" if found else "not known: nvidia-smi is not on PATH"


def _versions() -> str:
    found = {each.name: each.version for each in importlib.metadata.distributions() if _PACKAGE.fullmatch(each.name)}
    plugins = [name for name in found if re.fullmatch(r"jax[-_]cuda\d+[-_]plugin", name)]
    if len(plugins) > 1:
        raise ValueError(f"{' and '.join(plugins)} are both installed, but jax can use only one; uninstall one of them")
    said = [f"Python {platform.python_version()}", *(f"{name} {found[name]}" for name in sorted(found)), *_commit()]
    return ", ".join([*said, f"Linux {platform.release()}"])


def _commit() -> list[str]:
    """Returns the commit of this checkout, nothing where it is none."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [f"commit {ran.stdout.strip()}"] if ran.returncode == 0 else []


def _ptxas() -> str:
    from pallas_kernels.toolchain import check_ptxas, prefer_own_ptxas

    prefer_own_ptxas()
    found = check_ptxas()
    if not found and count_gpus():
        raise ValueError(
            "no ptxas is installed or on PATH, so no kernel can be assembled; install the extra cuda13 or cuda12"
        )
    return found or "none; without a GPU none is needed"


def _locked_memory() -> str:
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return "unlimited"
    if _infiniband():
        raise ValueError(
            f"at most {limit / 1e6:.0f} MB may be locked, but InfiniBand locks what it sends; set ulimit -l unlimited"
        )
    return f"at most {limit / 1e6:.0f} MB; with InfiniBand it must be unlimited"


def _shared_memory() -> str:
    if not Path("/dev/shm").exists():
        return "no /dev/shm"
    size = shutil.disk_usage("/dev/shm").total
    if size < _SHARED_MEMORY and count_gpus() > 1:
        raise ValueError(
            f"/dev/shm has {size / GB:.2f} GB; NCCL needs 1 GB; start the container with --shm-size=8g or --ipc=host"
        )
    return f"/dev/shm has {size / GB:.2f} GB"


def _networks() -> str:
    return ", ".join(_infiniband()) or "no InfiniBand device"


def _infiniband() -> list[str]:
    ports = sorted(Path("/sys/class/infiniband").glob("*/ports/*"))
    return [f"{port.parts[-3]}: {_read(port / 'state')}, {_read(port / 'rate')}" for port in ports]


def free_bytes() -> float:
    """Returns what processes may still take of the host's memory; not a number where the system does not say."""
    return _meminfo("MemAvailable")


def _meminfo(name: str) -> float:
    found = re.search(rf"^{name}:\s+(\d+) kB", _read(Path("/proc/meminfo")), re.MULTILINE)
    return int(found[1]) * 1024.0 if found else math.nan


def _host() -> CaseResult:
    limit = _read(Path("/sys/fs/cgroup/memory.max"))
    says = f"this container may use {int(limit) / GB:.1f} GB" if limit.isdigit() else ""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0
    figures = {"cores": cores, "memory GB": _meminfo("MemTotal") / GB, "free memory GB": free_bytes() / GB}
    return CaseResult("host", True, says, figures)


def _cache() -> CaseResult:
    from dsv3.engine.stored import default_cache_directory

    wanted = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or default_cache_directory()).absolute()
    there = next(path for path in (wanted, *wanted.parents) if path.exists())
    free = shutil.disk_usage(there).free
    writable = os.access(there, os.W_OK)
    says = str(wanted) if writable else f"{wanted} cannot be written; set XDG_CACHE_HOME"
    if writable and free <= _CACHE_DISK:
        says = (
            f"{wanted} has less than {_CACHE_DISK / GB:.0f} GB free; free some, or set XDG_CACHE_HOME to another disk"
        )
    return CaseResult("compilation cache", writable and free > _CACHE_DISK, says, {"free GB": free / GB})


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _devices() -> str:
    import jax

    from dsv3.config.options import EngineOptions
    from dsv3.engine.device.driver import started_devices
    from dsv3.engine.device.pool import set_memory_fraction

    set_memory_fraction(EngineOptions().gpu_memory_utilization)
    devices = started_devices()
    kinds = Counter(f"{device.device_kind} ({device.platform})" for device in devices)
    asked = f", since JAX_PLATFORMS is {jax.config.jax_platforms}" if jax.config.jax_platforms else ""
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items()) + asked


def _pool() -> CaseResult | str:
    import jax

    from dsv3.engine.device.pool import device_memory

    memory = device_memory(jax.devices()[0])
    if memory is None:
        return "none: on a CPU jax reserves no memory"
    figures = {"total GB": memory.total / GB, "pool GB": memory.pool / GB, "in use GB": memory.in_use / GB}
    return CaseResult("pool", True, "the part of a device's memory that jax reserves in a server", figures)


def _kernels() -> str:
    from pallas_kernels.backend import prepare, resolve_backend

    backend = resolve_backend()
    prepare(backend)
    return f"{backend.value} kernels"


def _products() -> str:
    """Computes on each device what is exact in any precision."""
    import jax
    import numpy as np

    left, right = np.random.default_rng(0).integers(-4, 5, (2, 256, 256)).astype(np.float32)
    for device in jax.devices():
        found = np.asarray(jax.jit(lambda x, y: x @ y)(*jax.device_put((left, right), device)))
        if not np.array_equal(found, left @ right):
            worst = np.abs(found - left @ right).max()
            raise ValueError(f"{device} computes wrong: a product of small integers differs by up to {worst:g}")
    return "each device computes a product of small integers exactly"


CASES: dict[str, dict[str, Callable[[], CaseResult | str]]] = {
    "machine": {
        "driver": _driver,
        "gpus": _gpus,
        "other processes": _others,
        "versions": _versions,
        "ptxas": _ptxas,
        "topology": _topology,
        "networks": _networks,
        "locked memory": _locked_memory,
        "shared memory": _shared_memory,
        "host": _host,
        "compilation cache": _cache,
    },
    "jax": {"devices": _devices, "pool": _pool, "kernels": _kernels, "products": _products},
}


if __name__ == "__main__":
    from dsv3.logs import configure_logging

    configure_logging()
    sys.exit(run_cases(CASES[sys.argv[1]]))
