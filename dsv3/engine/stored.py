"""The compiled programs of a process, kept for its next start; jax's compilation cache; and a counter of compilations.

jax's own cache needs every program traced again, which is most of a warm start's time, and it does not serve several
processes: only process 0 writes it, and on a CPU each process has keys of its own. Here a start with the same code,
versions, options and limits finds its executables by name, and neither traces nor compiles. A start with other options
traces, and finds unchanged programs by their text.

An executable that came out of jax's cache is not stored: it is incomplete when it is serialized again (XLA:CPU, jax
0.12.0.1: "Function ... not found" when it runs).

`jax.experimental.serialize_executable` unpickles what it loads, so a file is read only if its MAC proves that a process
with the same key wrote it.

Each version of the code, of jax and of the model stores programs of its own. Using a file sets its time. A start uses
what it needs before it removes files unused for `KEPT_S`, so a server that restarts after months still finds its
programs.
"""

import contextlib
import hashlib
import hmac
import importlib.metadata
import logging
import os
import pickle
import platform
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from dsv3.config.options import EngineOptions
from dsv3.engine.components import EngineComponents
from dsv3.engine.fingerprint import Fields, environment, program_options
from dsv3.files import read_secret, replace_file, sync
from pallas_kernels import native
from pallas_kernels.backend import Backend, fallbacks, resolve_backend
from pallas_kernels.tuned import plans

_log = logging.getLogger(__name__)
_MAC_BYTES = 32
_KEY_BYTES = 32
# jax's own settings that change an executable.
_SETTINGS = ("jax_disable_most_optimizations", "jax_default_matmul_precision", "jax_enable_x64")
# The CPU's instruction sets: a file on Linux, a command on macOS.
_CPUINFO = Path("/proc/cpuinfo")
_SYSCTL = ("/usr/sbin/sysctl", "hw.optional", "machdep.cpu")
_SYSCTL_S = 10
KEPT_S = 90 * 24 * 3600.0
_PATTERNS = ("programs-*/*", "instance-*/*/*", "instance-*/*", "programs-*", "instance-*")
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_HIT_EVENT = "/jax/compilation_cache/cache_hits"
_counters = threading.local()


class ProgramStore:
    """The stored programs of one process.

    Args:
      base: the compilation cache's directory; None is the user's.
      key: signs the files.
      machine: what every executable depends on, whatever the program: versions, flags, devices.
      fields: what the programs of this start depend on besides.
      process_id: this process among those of an instance.
      devices: those of the programs, in the order of their mesh.
    """

    def __init__(
        self,
        base: str | None,
        key: bytes,
        machine: Fields,
        fields: Fields,
        devices: Sequence[Any],
        process_id: int = 0,
    ) -> None:
        self._key = hmac.digest(key, b"compiled programs", hashlib.sha256)
        self._devices = devices
        self._hits = self._misses = 0
        self._root = root = Path(base or jax.config.jax_compilation_cache_dir or default_cache_directory())
        # Each key has files of its own: two users that overwrite each other's would both compile at each start.
        machine = machine | {"process": str(process_id), "key": self._mac(root, b"").hex()}
        self._executables = root / f"programs-{_digest(machine)}"
        self._names = root / f"instance-{_digest(machine | fields)}" / f"process-{process_id}"
        for directory in (self._executables, self._names):
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    def __str__(self) -> str:
        return f"{self._hits} of {self._hits + self._misses} programs loaded from the store"

    def get(self, name: str, lower: Callable[[], Any], options: Mapping[str, Any] | None) -> Callable[..., Any]:
        """Returns the program `name`: stored by this name or by the text of `lower()` and `options`, or compiled."""
        known = self._read(self._names / name)
        program = None if known is None else self._executable(known.decode())
        if program is not None:
            self._hits += 1
            return program
        self._misses += 1
        lowered = lower()
        described = f"{sorted((options or {}).items())}\n{_signature(lowered)}\n{lowered.as_text()}"
        text = hashlib.sha256(described.encode()).hexdigest()
        program = self._executable(text)
        if program is None:
            with EventCounter(_HIT_EVENT) as hits:
                program = lowered.compile(options)
            if hits.count or not self._keep(text, program):
                return program
        self._write(self._names / name, text.encode())
        return program

    def remove_unused(self) -> None:
        """Removes what has not been used for `KEPT_S`. Call it once this start has loaded its programs."""
        oldest = time.time() - KEPT_S
        for path in (path for pattern in _PATTERNS for path in self._root.glob(pattern)):
            with contextlib.suppress(OSError):  # a directory that is not empty; gone, or another user's
                if path.stat().st_mtime < oldest and path.suffix != ".key":
                    (path.rmdir if path.is_dir() else path.unlink)()

    def _executable(self, text: str) -> Callable[..., Any] | None:
        """Returns the executable of a program whose text has this digest, None if none can be used."""
        body = self._read(self._executables / text)
        if body is None:
            return None
        try:
            executable, arguments, results = pickle.loads(body)
            return serialize_executable.deserialize_and_load(
                executable, arguments, results, execution_devices=self._devices
            )
        except Exception as error:
            _log.warning("the stored program %s is not used: %s", text, error)
            return None

    def _keep(self, text: str, program: Any) -> bool:
        """Stores an executable; one that cannot be stored is compiled again next time."""
        try:
            body = pickle.dumps(serialize_executable.serialize(program))
        except Exception as error:
            _log.warning("a program is not stored for the next start: %s", error)
            return False
        return self._write(self._executables / text, body)

    def _read(self, path: Path) -> bytes | None:
        """Returns what was written to `path`; None where nothing was, or where the MAC is wrong."""
        try:
            content = path.read_bytes()
        except OSError:
            return None
        mac, body = content[:_MAC_BYTES], content[_MAC_BYTES:]
        if hmac.compare_digest(mac, self._mac(path, body)):
            with contextlib.suppress(OSError):  # another user's directory, or a read-only one
                os.utime(path)
            return body
        _log.warning("the stored program %s is not used: its MAC is wrong", path.name)
        return None

    def _write(self, path: Path, body: bytes) -> bool:
        try:
            replace_file(path, self._mac(path, body) + body)  # threads may have programs of the same text
        except OSError as error:
            _log.warning("the program %s is not stored for the next start: %s", path.name, error)
            return False
        return True

    def _mac(self, path: Path, body: bytes) -> bytes:
        return hmac.digest(self._key, f"{path}\0".encode() + body, hashlib.sha256)


def _signature(lowered: Any) -> str:
    """Returns trees, shapes and types of arguments and results: the text leaves out arguments that nothing reads."""
    leaves = jax.tree_util.tree_leaves_with_path((lowered.args_info, lowered.out_info))
    arrays = [f"{jax.tree_util.keystr(path)} {leaf.dtype}{leaf.shape}" for path, leaf in leaves]
    return f"{lowered.in_tree} {lowered.out_tree} {arrays}"


class NoProgramStore:
    """A store for a process that compiles all of its programs at each start."""

    def __str__(self) -> str:
        return "programs with Triton kernels are not stored"

    def get(self, name: str, lower: Callable[[], Any], options: Mapping[str, Any] | None) -> Callable[..., Any]:
        """Returns `lower()` compiled with `options`."""
        return lower().compile(options)

    def remove_unused(self) -> None:
        """Does nothing."""


def program_store(
    model_dir: Path, options: EngineOptions, components: EngineComponents, key: bytes, more: Fields, process_id: int = 0
) -> ProgramStore | NoProgramStore:
    """Returns the program store of this process.

    `components.cfg` are the limits that all processes use, `more` is what programs depend on besides. Triton kernels
    are made while a program is lowered, so programs with them are not stored. Raises OSError where the directory cannot
    be used.
    """
    if Backend.TRITON in (resolve_backend(components.mesh.devices.flat[0]), *fallbacks().values()):
        return NoProgramStore()
    fields = program_fields(model_dir, options, components) | more
    devices = list(components.mesh.devices.flat)
    return ProgramStore(options.compilation_cache_dir, key, machine_fields(), fields, devices, process_id)


def program_fields(model_dir: Path, options: EngineOptions, components: EngineComponents) -> Fields:
    """Returns what the programs of a start depend on besides the machine; `components.cfg` are its limits."""
    limits = {f"limit {name}": value for name, value in program_options(components.cfg).items()}
    return environment(model_dir) | device_fields(components) | limits | program_options(options)


def local_program_store(
    model_dir: Path, options: EngineOptions, components: EngineComponents
) -> ProgramStore | NoProgramStore | None:
    """Returns the program store of an instance of one process, None where it has none."""
    base = options.compilation_cache_dir or jax.config.jax_compilation_cache_dir or default_cache_directory()
    try:
        key = _own_key(Path(base))
        return program_store(model_dir, options, components, key, {"user": str(os.geteuid())})
    except (OSError, ValueError) as error:
        _log.warning("programs are not stored for the next start: %s", error)
        return None


def device_fields(components: EngineComponents) -> Fields:
    """Returns what the programs depend on of devices and parameters."""
    replaced = [f"{operation} by {backend.value}" for operation, backend in fallbacks().items()]
    leaves = jax.tree_util.tree_leaves_with_path(components.params)
    shapes = "\n".join(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}" for path, leaf in leaves)
    return {
        "platform": jax.local_devices()[0].client.platform_version,
        "devices": f"{jax.local_device_count()} x {jax.local_devices()[0].device_kind}",
        "kernels": ", ".join([resolve_backend(jax.local_devices()[0]).value, *replaced]),
        "measured plans": _digest(plans()),
        "parameters": hashlib.sha256(shapes.encode()).hexdigest()[:16],
    }


def machine_fields() -> Fields:
    """Returns what an executable depends on besides its program's text."""
    device = jax.local_devices()[0]
    fields = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    fields |= {name: str(jax.config.values[name]) for name in _SETTINGS}
    fields |= {"XLA_FLAGS": os.environ.get("XLA_FLAGS", ""), "platform": device.client.platform_version}
    fields["devices"] = f"{jax.local_device_count()} x {device.device_kind}"
    if device.platform == "cpu":
        fields["processor"] = _processor()
    if resolve_backend(device) is Backend.NATIVE:
        # Programs call C++ kernels by these names, which are another CPU's own in another process.
        fields["C++ kernels"] = ", ".join(native.library().targets.values())
    return fields


def _processor() -> str:
    """Returns the CPU's features: an executable for one with more instructions would crash on this one."""
    features = ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if _CPUINFO.exists():
            lines = _CPUINFO.read_text().splitlines()
            features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
        else:
            features = subprocess.run(_SYSCTL, capture_output=True, text=True, timeout=_SYSCTL_S, check=False).stdout
    return hashlib.sha256(features.encode()).hexdigest()[:16] if features else platform.processor()


def _own_key(directory: Path) -> bytes:
    """Returns this user's key; makes it at its first use, and again where a loss of power left it incomplete.

    An empty key would let any user sign a file that is then unpickled. Raises OSError where it can be neither read nor
    made, ValueError where others can read it or have made it.
    """
    path = directory / f"programs-{os.geteuid()}.key"
    directory.mkdir(parents=True, exist_ok=True)  # jax makes its cache with the first program
    if not path.exists():
        _make_key(path)
    key = _read_key(path)
    if not _is_whole(key):
        _log.warning("%s is damaged: a new key is made, and all programs compile again", path)
        path.unlink(missing_ok=True)
        _make_key(path)
        key = _read_key(path)
        if not _is_whole(key):
            raise ValueError(f"{path} is damaged again; remove it, or choose another compilation_cache_dir")
    return key


def _make_key(path: Path) -> None:
    """Writes a key to the disk, then gives it its name."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.touch(mode=0o600)
        part.write_bytes(secrets.token_bytes(_KEY_BYTES))
        sync(part)
        with contextlib.suppress(FileExistsError):
            os.link(part, path)  # the first of two processes wins
    finally:
        part.unlink(missing_ok=True)
    sync(path.parent)


def _read_key(path: Path) -> bytes:
    if path.lstat().st_uid != os.geteuid():  # lstat: another user's link may lead to a file of this user
        raise ValueError(f"{path} belongs to another user; remove it, or choose another compilation_cache_dir")
    return read_secret(path)


def _is_whole(key: bytes) -> bool:
    """Returns whether a key has all of its bytes; a file system may persist the length before them."""
    return len(key) >= _KEY_BYTES and any(key)


def _digest(fields: Fields) -> str:
    text = "\n".join(f"{name}={value}" for name, value in sorted(fields.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class EventCounter:
    """Counts this thread's events `event` of jax's monitoring inside its block."""

    def __init__(self, event: str) -> None:
        self.event, self.count = event, 0

    def __enter__(self) -> "EventCounter":
        _counters.active = [*getattr(_counters, "active", ()), self]
        return self

    def __exit__(self, *_: object) -> None:
        _counters.active.remove(self)


def _on_event(event: str, **_: str | int) -> None:
    for counter in getattr(_counters, "active", ()):
        counter.count += counter.event == event


def _on_duration(event: str, duration_secs: float, **_: str | int) -> None:
    if any(counter.event == event == COMPILE_EVENT for counter in getattr(_counters, "active", ())):
        text = "a program was compiled after warm-up (%.1f s): a shape is missing from the buckets"
        _log.warning(text, duration_secs)
    _on_event(event)


jax.monitoring.register_event_listener(_on_event)
jax.monitoring.register_event_duration_secs_listener(_on_duration)  # jax has no way to remove a single listener


def default_cache_directory() -> Path:
    """Returns the user's directory of compiled programs: `dsv3/xla` in the user's cache directory."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "dsv3" / "xla"


def use_compilation_cache(directory: str | Path | None = None) -> Path:
    """Turns on jax's persistent compilation cache for this process, for programs of any size.

    A directory already configured in jax stays. Returns the directory in use; raises ValueError where it cannot be
    made.
    """
    configured = jax.config.jax_compilation_cache_dir
    if directory is None and configured:
        return Path(configured)
    try:
        path = Path(directory) if directory is not None else default_cache_directory()
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # the latter where the user has no home directory
        raise ValueError(f"compilation_cache_dir: {error}; set it to a directory that this user can write to") from None
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path
