"""The working memory of an engine's programs, as their compiler counts it, known before the page pool is allocated.

How large the pool is hardly changes what a program takes beside it, and how many layers the model has changes nothing.
So the largest programs are compiled first, to be read and never run, with a pool of one request; in `launch.plan` for
GPUs that are not there, in a server for its own. What they take is kept with the compiled programs, so a later start
knows it. Once all programs of a start exist, what they take is compared with it.
"""

import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dsv3.config.engine import EngineConfig
from dsv3.engine.device.programs import Key, Programs
from dsv3.model.batch import AttentionForm
from pallas_kernels import aot, bodies

_SAMPLING, _MOVE = ("sample", "held sample", "logprobs", "prompt_logprobs"), "move_experts"
_THREADS = 4


class ReadPrograms:
    """Compiles programs that are read and never run, in half of the time.

    It leaves out the bodies of our kernels, and the search for tiles of XLA's own products.
    """

    def forget_unused(self) -> None:
        """Does nothing: no program is kept."""

    def get(self, name: str, lower: Callable[[], Any], options: Mapping[str, Any] | None) -> Callable[..., Any]:
        """Returns the program, compiled to be read."""
        with bodies.left_out():
            lowered = lower()
        return aot.compile_to_read(lowered, options)


def largest(cfg: EngineConfig, keys: Iterable[Key]) -> list[Key]:
    """Returns those programs of an engine that take the most working memory.

    They are the largest of each kind that runs layers, of prefill those after cached tokens; the sampler and the
    log-probabilities of the most rows; and those that move experts, where any are moved.
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
    """Returns the programs that ever run: those that move experts are compiled where none are moved, too."""
    return [key for key in keys if cfg.eplb_interval or key.kind != _MOVE]


def measure(cfg: EngineConfig, programs: Programs, keys: Iterable[Key] | None = None) -> int:
    """Returns the bytes that programs take beside weights, pages and state: the `largest` if no `keys` are given.

    One runs at a time. What a forward program leaves for a sampler is there meanwhile, and may be there twice, from a
    prefill and from a decode step.
    """
    wanted = list(keys) if keys is not None else largest(cfg, programs.keys())
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        analysed = dict(zip(wanted, pool.map(lambda key: _analysis(programs.get(key)), wanted), strict=True))
    forward = {program.kind for program in cfg.forward_programs}
    known = {key: found for key, found in analysed.items() if found is not None}
    results = max((results for key, (_, results) in known.items() if key.kind in forward), default=0)
    return max((temporaries for temporaries, _ in known.values()), default=0) + 2 * results


def _analysis(program: Any) -> tuple[int, int] | None:
    """Returns bytes of temporaries, and of results that are no donated argument; None where a program says nothing."""
    memory = program.memory_analysis() if hasattr(program, "memory_analysis") else None
    if memory is None:
        return None
    return memory.temp_size_in_bytes, memory.output_size_in_bytes - memory.alias_size_in_bytes
