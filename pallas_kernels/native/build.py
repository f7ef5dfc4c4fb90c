"""The kernels of this machine's CPU: compiled at first use by its own compiler, cached, loaded and registered with XLA.

A wheel would hold code for the oldest CPU it supports, and an extension built by pip needs jax's headers in an isolated
build. So the first compiler on the path that can builds six files for this CPU's instructions. A machine without one
uses XLA's products, and the log says why.
"""

import concurrent.futures
import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import logging
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

COMPILERS = ("c++", "g++", "clang++")
"""Compilers to find on the path, the last two also with a version suffix, `g++-14`."""
HANDLERS = (
    "LayerProduct",
    "HeadProduct",
    "GroupedProduct",
    "Fp8GroupedProduct",
    "Fp4GroupedProduct",
    "Int4GroupedProduct",
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
_FILES = (*_HEADERS, *_SOURCES)
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-Wno-psabi")
# Which of them selects this CPU depends on compiler and platform: clang for Arm may support only the second.
_THIS_CPU = (("-march=native",), ("-mcpu=native",), ())
_VERSIONED = re.compile(r"(?:g|clang)\+\+-(\d+)")
_BUILD_SECONDS = 240  # 4 to 10 s of processor time per source; the rest is for a busy machine
_PROBE_SECONDS = 20
_ABANDONED_SECONDS = 24 * 3600  # no build takes a day
_ERROR_CHARACTERS = 300
_BUILDS = ".build-"
_building = threading.Lock()
_log = logging.getLogger(__name__)


class Library(NamedTuple):
    """The kernels, or the reason for their absence.

    `targets` are the names of the handlers registered with XLA, empty without kernels. `reason` says where the kernels
    came from, or what was missing. `multiplies_bfloat16` is False if they widen bfloat16 first.
    """

    targets: dict[str, str]
    reason: str
    multiplies_bfloat16: bool = False


class _Compiler(NamedTuple):
    """A compiler of this machine, its flags for this CPU, and the macros it defines with them."""

    path: str
    flags: tuple[str, ...]
    macros: str

    def __str__(self) -> str:
        is_own = self.flags != _FLAGS
        return self.path if is_own else f"{self.path}, which has no flag for this CPU's own instructions"

    def key(self, files: Iterable[Path]) -> str:
        """Returns a digest of the code's inputs: source files, XLA's headers, the compiler, the CPU's instructions."""
        total = hashlib.sha256(b"\0".join(path.read_bytes() for path in files))
        parts = (self.path, *self.flags, importlib.metadata.version("jaxlib"), self.macros)
        total.update("\0".join(parts).encode())
        return total.hexdigest()[:16]


class NoLibraryError(Exception):
    """C++ code cannot be built, loaded or trusted here; the text names the compilers and what they said."""


_FAILURES = (NoLibraryError, OSError, subprocess.SubprocessError)


def library() -> Library:
    """Returns the kernels of this CPU; built, loaded and registered once per process. Thread-safe."""
    with _building:
        return _library()


def build_library(name: str, sources: Sequence[Path], headers: Sequence[Path] = ()) -> Path:
    """Returns a shared library of other C++ sources, which may include XLA's headers and those in `headers`.

    The first compiler that can builds it, unless it did before; processes that start at once may all build. Raises
    `NoLibraryError`.
    """
    failures: list[str] = []
    with _building:
        for found in _compilers():
            try:
                compiler = _probed(found)
                path = _directory() / f"{name}-{compiler.key((*headers, *sources))}.so"
                if not _is_trusted(path):
                    _build(compiler, path, sources, headers)
            except _FAILURES as error:
                failures.append(str(error))
            else:
                return path
    raise NoLibraryError("; ".join(failures))


@functools.cache
def _library() -> Library:
    try:
        directory, found = _directory(), _compilers()
    except _FAILURES as error:
        return Library({}, str(error))
    compilers: list[_Compiler] = []
    failures: list[str] = []
    for path in found:
        try:
            compiler = _probed(path)
        except _FAILURES as error:
            failures.append(str(error))
            continue
        if (kept := _kept(directory, compiler)) is not None:
            return kept
        if all(compiler.macros != other.macros for other in compilers):  # `c++` is an alias of another compiler
            compilers.append(compiler)
    for compiler in compilers:
        try:
            return _built(directory, compiler, failures)
        except subprocess.TimeoutExpired as error:  # another compiler would take as long
            failures.append(str(error))
            break
        except _FAILURES as error:
            failures.append(str(error))
    return Library({}, "; ".join(failures))


def _compilers() -> list[str]:
    """Returns the paths of this machine's compilers, newer versions first among those with a version suffix."""
    if sys.platform == "win32":
        raise NoLibraryError("there are no C++ kernels for Windows")
    versioned = sorted(set(_versioned()), reverse=True)
    names = (*COMPILERS, *(name for _, name in versioned))
    found = [path for name in names if (path := shutil.which(name)) is not None]
    if not found:
        raise NoLibraryError(f"no C++ compiler is on the path ({', '.join(COMPILERS)})")
    return found


def _versioned() -> Iterator[tuple[int, str]]:
    for directory in os.get_exec_path():
        with contextlib.suppress(OSError):
            for name in os.listdir(directory):
                if match := _VERSIONED.fullmatch(name):
                    yield int(match[1]), name


def _probed(path: str) -> _Compiler:
    """Reads a compiler's macros, with the first flags for this CPU that it supports."""
    for own in _THIS_CPU:
        flags = (*_FLAGS, *own)
        try:
            macros = _run(path, *flags, "-dM", "-E", "-x", "c++", os.devnull, seconds=_PROBE_SECONDS)
        except NoLibraryError as error:
            failure = error
        else:
            return _Compiler(path, flags, macros)
    raise failure


def _kept(directory: Path, compiler: _Compiler) -> Library | None:
    """Returns the library that this compiler built earlier; None if there is none, or it does not load."""
    path = directory / f"kernels-{compiler.key(_FILES)}.so"
    if not _is_trusted(path):
        return None
    try:
        return _loaded(path, compiler, f"found in {path} by {compiler}")
    except _FAILURES as error:
        _log.warning("the C++ kernels are rebuilt: those in %s do not load (%s)", path, error)
        return None


def _built(directory: Path, compiler: _Compiler, failures: list[str]) -> Library:
    """Builds and loads the library; the reason names the compilers that failed."""
    path = directory / f"kernels-{compiler.key(_FILES)}.so"
    _build(compiler, path, _SOURCES)
    others = f" (before it {'; '.join(failures)})" if failures else ""
    return _loaded(path, compiler, f"built into {path} by {compiler}{others}")


def _loaded(path: Path, compiler: _Compiler, reason: str) -> Library:
    targets, multiplies_bfloat16 = _register(path, compiler.key(_FILES))
    return Library(targets, reason, multiplies_bfloat16)


def _directory() -> Path:
    """Returns the directory of built kernels. Raises `NoLibraryError` if another user could write to it."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(base) / "dsv3" / "native"
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not stat.S_ISDIR(path.lstat().st_mode) or not _is_private(path):
        raise NoLibraryError(f"{path} must be a directory that only its user may write; remove it, or chmod 700 it")
    return path


def _is_private(path: Path) -> bool:
    status = path.lstat()
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _is_trusted(path: Path) -> bool:
    return path.exists() and stat.S_ISREG(path.lstat().st_mode) and _is_private(path)


def _build(compiler: _Compiler, path: Path, sources: Sequence[Path], headers: Sequence[Path] = ()) -> None:
    """Compiles into a new directory next to `path`, then moves the library there, so no process loads a partial one.

    Sources are compiled in parallel, one process per core. File and directory are synced.
    """
    _remove_abandoned(path.parent)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=_BUILDS) as directory:
        include = [f"-isystem{jax.ffi.include_dir()}", *(f"-I{folder}" for folder in {h.parent for h in headers})]

        def compiled(source: Path) -> str:
            made = f"{directory}/{source.stem}.o"
            _run(compiler.path, *compiler.flags, *include, "-c", str(source), "-o", made, seconds=_BUILD_SECONDS)
            return made

        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as compilers:
            objects = list(compilers.map(compiled, sources))
        part = f"{directory}/{path.name}"
        _run(compiler.path, *compiler.flags, "-shared", *objects, "-o", part, seconds=_BUILD_SECONDS)
        os.chmod(part, 0o700)
        _sync(part)
        os.replace(part, path)
        _sync(path.parent)


def _sync(path: str | Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_abandoned(directory: Path) -> None:
    """Removes the directories of killed builds."""
    for left in directory.glob(f"{_BUILDS}*"):
        with contextlib.suppress(FileNotFoundError):  # another process has removed it
            if time.time() - left.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(left, ignore_errors=True)


def _run(*command: str, seconds: float) -> str:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        said = next((line for line in lines if "error" in line), " ".join(lines))
        raise NoLibraryError(f"{command[0]} failed: {said[:_ERROR_CHARACTERS]}")
    return done.stdout


def _register(path: Path, key: str) -> tuple[dict[str, str], bool]:
    """Loads the library and registers its handlers with XLA; returns their names, and whether bfloat16 is not widened.

    Names include `key`: compiled programs are cached on disk and refer to a handler by name. Raises OSError for a file
    that is no library, or lacks a handler.
    """
    loaded = ctypes.CDLL(str(path))
    try:
        multiplies_bfloat16 = bool(loaded.multiplies_bfloat16())
        functions = {handler: getattr(loaded, handler) for handler in HANDLERS}
    except AttributeError as error:
        raise OSError(str(error)) from None
    targets = {handler: f"dsv3_{handler}_{key}" for handler in HANDLERS}
    for handler, target in targets.items():
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(functions[handler]), platform="cpu")
    return targets, multiplies_bfloat16
