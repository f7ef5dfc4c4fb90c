"""The compiled programs: a table by kind and bucket, filled before the first request; and their working memory.

Working memory, as the compiler counts it, must be known before the page pool is allocated. The size of the pool hardly
changes it, and the number of layers not at all. So the largest programs are compiled first, for their memory analysis
only, with a pool of one request: in `launch.plan` for GPUs that are not there, in a server for its own. The figure is
stored with the compiled programs for later starts. Once all programs exist, their memory is compared with it.
"""

import dataclasses
import functools
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, NamedTuple, Protocol

import jax

from dsv3.config.engine import EngineConfig
from dsv3.model.batch import AttentionForm
from pallas_kernels import aot, bodies, invariance
from sharding.collectives import compiler_options

_log = logging.getLogger(__name__)
Progress = Callable[[int, int, str], None]
"""Called as `progress(done, total, what)` at the start and after each program."""

# Rematerialization: XLA counts the page pool, which loops carry, as memory pressure and recomputes values: 246
# instructions of a decode step of DeepSeek-V3 at EP144, whose temporaries stay the same.
# Sharded autotuning: each process waits, up to a day, for the others' results, and a process that has loaded the
# program from its store sends none.
_GPU_OPTIONS = {"xla_disable_hlo_passes": "rematerialization", "xla_gpu_shard_autotuning": False}
_READ_THREADS = 4
_COMPILE_THREADS = 8  # tracing holds the GIL, so more threads would only wait
_SAMPLING = (
    *("sample", "constrained sample", "sample with details", "constrained sample with details"),
    *("logprobs", "prompt_logprobs"),
)
_MOVE = "move_experts"


class Key(NamedTuple):
    """Names a program.

    `size` is the bucket: tokens of a prefill, rows of the others. `variant` is the sampler's, or the `AttentionForm` of
    a forward program; `width` are the tokens per row.
    """

    kind: str
    size: int = 0
    variant: int = 0
    width: int = 1

    def __str__(self) -> str:
        return f"{self.kind} {self.size or ''}".strip()


@dataclasses.dataclass(frozen=True)
class ProgramSpec:
    """A program to compile: `body` over all ranks, shapes of its arguments, and which of them are donated.

    Its results begin with the new values of donated arguments. `padding` has by number the value of an argument with
    which the program writes nothing, as what broadcasts to it, or a function of the arguments before; the others are
    zeros then (`dsv3.engine.device.devices.launch_all`).
    """

    key: Key
    body: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...] = ()
    padding: Mapping[int, Any] = dataclasses.field(default_factory=dict)


class Store(Protocol):
    """Programs of an earlier start; `dsv3.engine.stored.ProgramStore` is one."""

    def get(self, name: str, lower: Callable[[], Any], options: Mapping[str, Any] | None) -> Callable[..., Any]:
        """Returns the program `name`, or `lower()` compiled with `options` and stored for the next start."""

    def remove_unused(self) -> None:
        """Removes programs unused for long."""


class Programs:
    """Compiles programs, on demand or all at once, and caches them.

    Donated arguments are overwritten: pass the newest arrays. A `store`, where one is set, is looked up before anything
    is traced, and gets what is compiled. `channels` limits the channels of each NCCL communicator; 0 leaves them to
    NCCL. Unless it `overlaps`, one transfer is in flight at a time. With `invariant` XLA's part of a program is
    batch-invariant too.
    """

    def __init__(self, platform: str, channels: int = 0, overlaps: bool = True, invariant: bool = False) -> None:
        self.store: Store | None = None
        self.options: Mapping[str, Any] | None = compiler_options(platform, channels, overlaps)
        if platform != "cpu":
            self.options = {**(self.options or {}), **_GPU_OPTIONS}
        elif invariant:
            self.options = {**(self.options or {}), **invariance.CPU_OPTIONS}
        self.last: Key | None = None  # that `get` has returned
        self._specs: dict[Key, ProgramSpec] = {}
        self._compiled: dict[Key, Callable[..., Any]] = {}

    def add(self, specs: Iterable[ProgramSpec]) -> None:
        """Adds programs to the table."""
        for spec in specs:
            assert spec.key not in self._specs, f"two programs are called {spec.key}"
            self._specs[spec.key] = spec

    def keys(self) -> list[Key]:
        """Returns every program that serving can need."""
        return list(self._specs)

    def spec(self, key: Key) -> ProgramSpec:
        """Returns a program before its compilation."""
        return self._specs[key]

    def compile_all(self, progress: Progress | None = None) -> None:
        """Compiles the programs of `keys`, or loads them from the store or the persistent cache.

        Raises the first error, without the programs that have not begun to compile.
        """
        keys = self.keys()
        report = progress or (lambda done, total, what: None)
        report(0, len(keys), "programs")
        with ThreadPoolExecutor(min(_COMPILE_THREADS, os.cpu_count() or 1)) as pool:
            names = {pool.submit(self.get, key): str(key) for key in keys}
            try:
                for done, future in enumerate(as_completed(names), 1):
                    future.result()
                    report(done, len(keys), names[future])
            except BaseException:  # an interrupt, too, need not wait until the others are compiled
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        if self.store is not None:
            self.store.remove_unused()

    def get(self, key: Key) -> Callable[..., Any]:
        """Returns the compiled program; compiles it at its first use."""
        program = self._compiled.get(key)
        if program is None:
            program = self._compiled[key] = self._load_or_compile(key)
        self.last = key
        return program

    def _load_or_compile(self, key: Key) -> Callable[..., Any]:
        lower = functools.partial(self._lower, key)
        if self.store is None:
            return lower().compile(self.options)
        return self.store.get(f"{key.kind}-{key.size}-{key.variant}-{key.width}", lower, self.options)

    def _lower(self, key: Key) -> Any:
        _log.debug("tracing %s", key)
        spec = self._specs[key]
        return jax.jit(spec.body, donate_argnums=spec.donated).lower(*spec.arguments)


class ReadPrograms:
    """Compiles programs for their memory analysis only, in half of the time.

    It leaves out the bodies of our kernels, and XLA's search for tile sizes.
    """

    def remove_unused(self) -> None:
        """Does nothing: no program is stored."""

    def get(self, name: str, lower: Callable[[], Any], options: Mapping[str, Any] | None) -> Callable[..., Any]:
        """Returns the program, compiled for analysis."""
        with bodies.left_out():
            lowered = lower()
        return aot.compile_to_read(lowered, options)


def largest(cfg: EngineConfig, keys: Iterable[Key]) -> list[Key]:
    """Returns the programs of an engine that take the most working memory.

    They are the largest of each kind that runs layers, of prefill those with cached tokens; the sampler and the
    log-probabilities of the most rows; and those that move experts, where experts are moved.
    """
    kinds = {program.kind for program in cfg.forward_programs} | {*_SAMPLING, _MOVE}
    found: list[Key] = []
    candidates = sorted(key for key in running(cfg, keys) if key.kind in kinds)
    for kind, group in itertools.groupby(candidates, lambda key: key.kind):
        mine = list(group)
        size = max((key.size, key.width) for key in mine)
        mine = [key for key in mine if (key.size, key.width) == size]
        if kind == "prefill":
            mine = [key for key in mine if key.variant != AttentionForm.NEW]
        found += mine[-1:] if kind in _SAMPLING else mine
    return found


def running(cfg: EngineConfig, keys: Iterable[Key]) -> list[Key]:
    """Returns the programs that can run: those that move experts are compiled even without rebalancing."""
    return [key for key in keys if cfg.eplb_interval or key.kind != _MOVE]


def measure(cfg: EngineConfig, programs: Programs, keys: Iterable[Key] | None = None) -> int:
    """Returns the bytes that programs take besides weights, pages and state: of the `largest` unless `keys` are given.

    One runs at a time. What a forward program leaves for a sampler lives meanwhile, possibly twice: from a prefill and
    from a decode step.
    """
    wanted = list(keys) if keys is not None else largest(cfg, programs.keys())
    with ThreadPoolExecutor(min(_READ_THREADS, os.cpu_count() or 1)) as pool:
        analysed = dict(zip(wanted, pool.map(lambda key: _analysis(programs.get(key)), wanted), strict=True))
    forward = {program.kind for program in cfg.forward_programs}
    known = {key: found for key, found in analysed.items() if found is not None}
    results = max((results for key, (_, results) in known.items() if key.kind in forward), default=0)
    return max((temporaries for temporaries, _ in known.values()), default=0) + 2 * results


def _analysis(program: Any) -> tuple[int, int] | None:
    """Returns bytes of temporaries, and of results that are not donated arguments; None where there is no analysis."""
    memory = program.memory_analysis() if hasattr(program, "memory_analysis") else None
    if memory is None:
        return None
    return memory.temp_size_in_bytes, memory.output_size_in_bytes - memory.alias_size_in_bytes
