"""The ptxas that assembles kernels: pip's, in place of that of the machine's CUDA toolkit.

XLA gets pip's directory for its own kernels. Mosaic GPU and jax-triton search PATH, then /usr/local/cuda, and only then
that directory; many hosts have a toolkit that is too old for these kernels.
"""

import importlib.util
import logging
import os
import re
import shutil
import subprocess
from pathlib import Path

_log = logging.getLogger(__name__)
# Packages with a CUDA toolkit's programs, of CUDA 13 and CUDA 12, in jax's order.
_WHEELS = ("nvidia.cu13", "nvidia.cuda_nvcc")
_TOOLKIT = Path("/usr/local/cuda/bin")
_OLDEST = (12, 8)
"""The first that reads the PTX of `triton.call.OPTIONS`; Mosaic's copies fail to assemble up to 12.6, too."""
_INSTALL = "install this package with its extra cuda13 or cuda12, which bring one"
_VERSION_S = 60  # the first run may read a slow network disk


def prefer_own_ptxas() -> None:
    """Puts pip's ptxas, if installed, first on this process's PATH.

    Call it before compiling kernels.
    """
    own, path = _own_directory(), os.environ.get("PATH", os.defpath)
    if own is not None and path.split(os.pathsep)[0] != str(own):
        os.environ["PATH"] = f"{own}{os.pathsep}{path}"


def check_ptxas() -> str:
    """Logs and returns the ptxas that will assemble kernels, "" if there is none.

    Raises ValueError if it is too old or does not run.
    """
    path = shutil.which("ptxas") or shutil.which("ptxas", path=str(_TOOLKIT))
    if path is None:
        _log.warning("no ptxas is in a wheel, on PATH or in %s, so kernels may not compile; %s", _TOOLKIT, _INSTALL)
        return ""
    version = _version(path)
    if version < _OLDEST:
        raise ValueError(
            f"{path} is ptxas {_dotted(version)}, but the GPU kernels need {_dotted(_OLDEST)} or newer; {_INSTALL}, or "
            "put a newer CUDA toolkit first on PATH"
        )
    found = f"ptxas {_dotted(version)}, {path}"
    _log.info("kernels are assembled by %s", found)
    return found


def _own_directory() -> Path | None:
    """Returns the directory of the ptxas that pip has installed."""
    for package in _WHEELS:
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:  # nothing of NVIDIA's is installed
            return None
        for folder in (spec and spec.submodule_search_locations) or ():
            directory = Path(folder) / "bin"
            if shutil.which("ptxas", path=str(directory)):
                return directory
    return None


def _version(path: str) -> tuple[int, int]:
    try:
        ran = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=_VERSION_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"ptxas does not run, so no kernel can be assembled ({error}); {_INSTALL}") from None
    found = re.search(r"release (\d+)\.(\d+)", ran.stdout)
    if found is None:
        said = (ran.stdout + ran.stderr).strip()[-300:]
        raise ValueError(f"{path} --version names no release (status {ran.returncode}: {said!r}); {_INSTALL}")
    return int(found[1]), int(found[2])


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
