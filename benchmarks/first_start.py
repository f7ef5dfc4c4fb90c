"""Programs and processor time of the first `LLM()` on a machine, which finds none of an earlier start.

  JAX_PLATFORMS=cpu python -m benchmarks.first_start

Prints how many programs it compiles, and the processor seconds of the process from its start until it is ready.
"""

import tempfile
import time

from dsv3 import LLM


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        llm = LLM(progress=False, compilation_cache_dir=directory)
    programs = len(llm.engine.executor.devices.programs.keys())
    print(f"{programs} programs, {time.process_time():.1f} s of processor time")


if __name__ == "__main__":
    main()
