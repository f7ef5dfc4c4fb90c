"""Compilation: the persistent cache, and proof that nothing compiles once the engine is warm."""

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import jax

_log = logging.getLogger(__name__)
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_HIT_EVENT = "/jax/compilation_cache/cache_hits"
_watched = threading.local()


class CompilationCounter:
    """Counts XLA compilations, of whatever program, on the thread that is inside `watch`."""

    def __init__(self) -> None:
        self.count = 0

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Counts this thread's compilations until the end of the block, and logs them as a warning."""
        before = getattr(_watched, "counter", None)
        _watched.counter = self
        try:
            yield
        finally:
            _watched.counter = before


class CacheHits:
    """Counts, inside of its block, the executables of this thread that jax's persistent cache had."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> "CacheHits":
        _watched.hits = self
        return self

    def __exit__(self, *_: object) -> None:
        _watched.hits = None


def _on_hit(event: str, **_: str | int) -> None:
    hits = getattr(_watched, "hits", None)
    if hits is not None and event == _HIT_EVENT:
        hits.count += 1


def _on_event(event: str, duration_secs: float, **_: str | int) -> None:
    counter = getattr(_watched, "counter", None)
    if counter is not None and event == _COMPILE_EVENT:
        counter.count += 1
        _log.warning(
            "a program was compiled after warm-up (%.1f s): a shape is missing from the buckets", duration_secs
        )


jax.monitoring.register_event_listener(_on_hit)
jax.monitoring.register_event_duration_secs_listener(_on_event)  # jax offers no way to take one listener off again


def default_cache_directory() -> Path:
    """Returns where compiled programs are kept between runs: `dsv3/xla` in the user's cache directory."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "dsv3" / "xla"


def use_compilation_cache(directory: str | Path | None = None) -> Path:
    """Turns on JAX's persistent compilation cache for this process, every program in it however small.

    A directory that jax has been given already stays. Returns the directory in use.
    """
    configured = jax.config.jax_compilation_cache_dir
    if directory is None and configured:
        return Path(configured)
    path = Path(directory) if directory is not None else default_cache_directory()
    path.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path
