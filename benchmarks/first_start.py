"""Programs and processor time of the first `LLM()` on a machine, which finds none of an earlier start; and of a wake.

  JAX_PLATFORMS=cpu python -m benchmarks.first_start
  JAX_PLATFORMS=cpu python -m benchmarks.first_start --wake

Reports how many programs it compiles, and the processor seconds of the process from its start until it is ready. With
`--wake` it reports how long an engine takes to sleep and to wake, by level, beside the start of another process that
finds all programs in the store; each round measures all of them.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from benchmarks.record import Report, arguments, elapsed, run, spread
from dsv3 import LLM
from dsv3.engine.build import bundled_model

ROUNDS = 5
_RESTART = "import sys; from dsv3 import LLM; LLM(sys.argv[1], progress=False, compilation_cache_dir=sys.argv[2])"


def main(report: Report) -> None:
    given = arguments(__doc__, wake=False, model=str(bundled_model()))
    with tempfile.TemporaryDirectory() as directory:
        llm = LLM(given.model, progress=False, compilation_cache_dir=directory)
        programs = len(llm.engine.executor.devices.programs.keys())
        report.table("The first `LLM()`", ["programs", "processor time (s)"], [[programs, time.process_time()]])
        if given.wake:
            measure_wakes(report, llm, given.model, directory)


def measure_wakes(report: Report, llm: LLM, model: str, programs: str) -> None:
    """Measures a wake by level, and a restart with stored programs, in turn."""
    seconds: dict[str, list[float]] = {}

    def measure(name: str, work: Callable[[], object]) -> None:
        seconds.setdefault(name, []).append(elapsed(work))

    def restart() -> None:
        subprocess.run([sys.executable, "-c", _RESTART, model, programs], check=True, env=os.environ)

    def wake_with_weights() -> None:
        llm.wake()
        llm.update_weights(model)

    restart()  # its process finds what it compiles itself too, from then on
    for _ in range(ROUNDS):
        measure("sleep, level 1", lambda: llm.sleep(1))
        measure("wake from level 1", llm.wake)
        measure("sleep, level 2", lambda: llm.sleep(2))
        measure("wake from level 2, weights from the directory", wake_with_weights)
        measure("restart of the process, programs stored", restart)
    rows = [[name, spread(found, 3)] for name, found in seconds.items()]
    report.table("Sleep, wake and restart", ["what", "seconds: median (least to most)"], rows)


if __name__ == "__main__":
    run(main)
