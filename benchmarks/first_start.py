"""Programs and processor time of the first `LLM()` on a machine, which finds none of an earlier start.

  JAX_PLATFORMS=cpu python -m benchmarks.first_start

Tells how many programs it compiles, and the processor seconds of the process from its start until it is ready.
"""

import tempfile
import time

from benchmarks.record import Report, run
from dsv3 import LLM


def main(report: Report) -> None:
    with tempfile.TemporaryDirectory() as directory:
        llm = LLM(progress=False, compilation_cache_dir=directory)
    programs = len(llm.engine.executor.devices.programs.keys())
    report.table("The first `LLM()`", ["programs", "processor time (s)"], [[programs, time.process_time()]])


if __name__ == "__main__":
    run(main)
