"""Runs a check's module with its arguments: `child SECONDS MODULE [arguments]`, as `python -m MODULE` would.

After so many seconds it writes the stacks of all threads to standard error, wherever they hang, also in a driver; then
the doctor ends it.
"""

import faulthandler
import runpy
import sys

if __name__ == "__main__":
    seconds, module = float(sys.argv[1]), sys.argv[2]
    sys.argv[1:3] = []
    faulthandler.dump_traceback_later(seconds)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
