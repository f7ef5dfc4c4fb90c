"""The kernels of this machine's CPU: compiled at first use by its own compiler, kept, loaded and named to XLA.

A wheel would hold code for the oldest CPU it supports, and an extension built by pip needs jax's headers in an isolated
build. So the compiler of the machine builds six files, for the instructions that this CPU has. A machine without a
compiler uses XLA's own products, and the log says so.
"""

import concurrent.futures
import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import jax

COMPILERS = ("c++", "g++", "clang++")
HANDLERS = (
    "LayerProduct",
    "HeadProduct",
    "GroupedProduct",
    "Fp8GroupedProduct",
    "DecodeAttention",
    "ContextAttention",
    "PrefillAttention",
    "QuantizeRows",
    "AlignGroups",
    "ChooseExperts",
    "RmsNorm",
    "SwiGlu",
    "RotateHeads",
    "LatentRows",
)

_SOURCES = tuple(
    Path(__file__).with_name(f"{name}.cc")
    for name in ("products", "attention", "prefill", "quantize", "routing", "rows")
)
_HEADERS = tuple(Path(__file__).with_name(name) for name in ("vectors.h", "attention.h", "e4m3.h"))
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-Wno-psabi")
_BUILD_SECONDS = 240  # 4 to 10 s of processor time per source; the rest is for a busy machine
_PROBE_SECONDS = 20
_ABANDONED_SECONDS = 24 * 3600  # no build takes a day
_ERROR_CHARACTERS = 300
_BUILDS = ".build-"
_building = threading.Lock()


class Library(NamedTuple):
    """The kernels, or why there are none.

    `targets` are the names under which XLA knows the handlers, empty without kernels. `reason` says where the kernels
    came from, or what was missing. `multiplies_bfloat16` is True where they need not widen bfloat16 first.
    """

    targets: dict[str, str]
    reason: str
    multiplies_bfloat16: bool = False


class _NoLibraryError(Exception):
    """The kernels cannot be built or trusted here."""


def library() -> Library:
    """Returns the kernels of this CPU; built, loaded and registered once per process, whichever thread asks first."""
    with _building:
        return _library()


@functools.cache
def _library() -> Library:
    try:
        compiler = _compiler()
        key = _key(compiler)
        path = _directory() / f"kernels-{key}.so"
        built = "found in" if _is_trusted(path) else "built into"
        if built == "built into":
            _build(compiler, path)
        targets, multiplies_bfloat16 = _register(path, key)
        return Library(targets, f"{built} {path} by {compiler}", multiplies_bfloat16)
    except (_NoLibraryError, OSError, subprocess.SubprocessError) as error:
        return Library({}, str(error))


def _compiler() -> str:
    if sys.platform == "win32":
        raise _NoLibraryError("there are no C++ kernels for Windows")
    found = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if found is None:
        raise _NoLibraryError(f"no C++ compiler is on the path ({', '.join(COMPILERS)})")
    return found


def _key(compiler: str) -> str:
    """Digests all that the machine code depends on: the source, XLA's headers, the compiler, the CPU's instructions."""
    macros = _run(compiler, *_FLAGS, "-dM", "-E", "-x", "c++", os.devnull, seconds=_PROBE_SECONDS)
    total = hashlib.sha256(b"\0".join(path.read_bytes() for path in (*_HEADERS, *_SOURCES)))
    total.update("\0".join((compiler, *_FLAGS, importlib.metadata.version("jaxlib"), macros)).encode())
    return total.hexdigest()[:16]


def _directory() -> Path:
    """Returns the directory of built kernels. Raises `_NoLibraryError` where someone else could put code into it."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(base) / "dsv3" / "native"
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not stat.S_ISDIR(path.lstat().st_mode) or not _is_private(path):
        raise _NoLibraryError(f"{path} must be a directory that only its user may write; remove it, or chmod 700 it")
    return path


def _is_private(path: Path) -> bool:
    status = path.lstat()
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _is_trusted(path: Path) -> bool:
    return path.exists() and stat.S_ISREG(path.lstat().st_mode) and _is_private(path)


def _build(compiler: str, path: Path) -> None:
    """Compiles into a new directory next to `path`, then moves the library there: no process ever loads half of one.

    Each source has a compiler of its own, as many at once as there are cores.
    """
    _remove_abandoned(path.parent)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=_BUILDS) as directory:
        include = f"-isystem{jax.ffi.include_dir()}"

        def compiled(source: Path) -> str:
            made = f"{directory}/{source.stem}.o"
            _run(compiler, *_FLAGS, include, "-c", str(source), "-o", made, seconds=_BUILD_SECONDS)
            return made

        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as compilers:
            objects = list(compilers.map(compiled, _SOURCES))
        part = f"{directory}/{path.name}"
        _run(compiler, *_FLAGS, "-shared", *objects, "-o", part, seconds=_BUILD_SECONDS)
        os.chmod(part, 0o700)
        os.replace(part, path)


def _remove_abandoned(directory: Path) -> None:
    """Removes the directories of builds that were killed."""
    for left in directory.glob(f"{_BUILDS}*"):
        with contextlib.suppress(FileNotFoundError):  # a process beside this one has removed it
            if time.time() - left.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(left, ignore_errors=True)


def _run(*command: str, seconds: float) -> str:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds)
    if done.returncode:
        raise _NoLibraryError(f"{command[0]} failed: {done.stderr.strip()[:_ERROR_CHARACTERS]}")
    return done.stdout


def _register(path: Path, key: str) -> tuple[dict[str, str], bool]:
    """Loads the library and tells XLA its handlers; returns their names, and whether bfloat16 is multiplied as it is.

    Names change with the code they stand for: compiled programs are kept on disk and know a handler only by its name.
    """
    loaded = ctypes.CDLL(str(path))
    targets = {handler: f"dsv3_{handler}_{key}" for handler in HANDLERS}
    for handler, target in targets.items():
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(loaded, handler)), platform="cpu")
    return targets, bool(loaded.multiplies_bfloat16())
