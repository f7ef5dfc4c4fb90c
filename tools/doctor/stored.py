"""Checks that programs that one process compiles and stores serve the next one, which neither traces nor compiles.

Each of two processes starts an engine with the bundled model and the same new folder for programs, and answers a
prompt. They are `python -m tools.doctor.stored FOLDER`, which prints what it has seen; the check has no argument.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dsv3.processes.child import run_limited
from tools.doctor.rows import CaseResult, run_cases

_PROMPT = tuple(range(10, 30))
_TOKENS = 16
_SECONDS = 250.0
_TRITON = "programs with Triton kernels are made while they are traced, so none is stored"
Seen = dict[str, Any]


class Watched:
    """A store that notes which programs it is asked for, and which are traced since it has them not."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.asked, self.traced = list[str](), list[str]()
        self.forget_unused = store.forget_unused

    def get(self, name: str, lower: Callable[[], Any], options: Mapping[str, Any] | None) -> Callable[..., Any]:
        """Returns the store's program."""

        def noted() -> Any:
            self.traced.append(name)
            return lower()

        self.asked.append(name)
        return self._store.get(name, noted, options)


def answer(folder: Path) -> Seen:
    """Starts an engine whose programs are stored in `folder`, and answers; returns what came, and what was traced."""
    from dsv3.config.options import EngineOptions
    from dsv3.engine.build import bundled_model, load_components
    from dsv3.engine.engine import Engine
    from dsv3.engine.stored import NothingKept, own_store
    from dsv3.sampling_params import SamplingParams
    from dsv3.scheduler.request import EngineRequest

    options = EngineOptions(
        compilation_cache_dir=str(folder), max_num_seqs=1, max_num_batched_tokens=64, max_model_len=256
    )
    began = time.monotonic()
    parts = load_components(bundled_model(), options, progress=False)
    store = own_store(bundled_model(), options, parts)
    if store is None or isinstance(store, NothingKept):
        return {"nothing": _TRITON if store else "the folder cannot be used, as the log says"}
    watched = Watched(store)
    engine = Engine(parts, store=watched)
    engine.warm_up()
    started = time.monotonic() - began
    sampling = SamplingParams(temperature=0, max_tokens=_TOKENS, ignore_eos=True, logprobs=1)
    engine.add(EngineRequest(request_id=0, prompt_token_ids=_PROMPT, sampling=sampling))
    outputs = list[tuple[Any, Any]]()
    while engine.has_work:
        for output in engine.step():
            if output.error:
                raise RuntimeError(output.error)
            outputs.append((output.token_ids, output.logprobs))
    return {"asked": watched.asked, "traced": watched.traced, "seconds": started, "outputs": str(outputs)}


def check_store(folder: Path, child: Callable[[Path], Seen]) -> int:
    """Prints the rows of two processes, run by `child`, with programs in `folder`; returns the status of a check."""
    seen: list[Seen] = []
    try:
        first = child(folder)
    except Exception as error:
        says = f"{type(error).__name__}: {error}"
        return run_cases({"written": lambda: CaseResult("written", False, says)})
    if "nothing" in first:
        print(first["nothing"], file=sys.stderr)
        return 2

    def written() -> CaseResult:
        files = [path for path in folder.glob("programs-*/*") if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        figures = {"programs": len(first["asked"]), "files": len(files), "MB": size / 1e6, "s": first["seconds"]}
        return CaseResult("written", bool(files), "" if files else "no program is stored, as the log says", figures)

    def found() -> CaseResult:
        seen.append(child(folder))
        asked, traced = seen[0]["asked"], seen[0]["traced"]
        says = f"{len(traced)} of {len(asked)} are traced and compiled again: {', '.join(traced)}" if traced else ""
        figures = {"programs": len(asked), "found": len(asked) - len(traced), "s": seen[0]["seconds"]}
        return CaseResult("found", not traced and bool(asked), says, figures)

    def equal() -> str:
        if not seen:
            raise RuntimeError("the second process has not answered")
        if first["outputs"] != seen[0]["outputs"]:
            raise ValueError(f"stored programs answer {seen[0]['outputs']}, and compiled ones {first['outputs']}")
        return "stored programs give what they gave when they were compiled"

    return run_cases({"written": written}) or run_cases({"found": found, "equal": equal})


def run_child(folder: Path) -> Seen:
    """Returns what a process of its own has seen. Raises RuntimeError where it fails."""
    ended = run_limited((sys.executable, "-m", "tools.doctor.stored", str(folder)), _SECONDS)
    print(ended.log, file=sys.stderr)
    if ended.timed_out or ended.status != 0:
        raise RuntimeError(f"the process that starts an engine: {ended.cause}")
    return json.loads(ended.output)


def main(arguments: list[str]) -> int:
    """Runs the check, or the process that starts an engine where its folder is given; returns the exit status."""
    if arguments:
        from dsv3.logs import configure_logging

        configure_logging()
        print(json.dumps(answer(Path(arguments[0]))))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        return check_store(Path(folder), run_child)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
