"""Stands for `python -m pallas_kernels.checks` and `python -m pallas_kernels.backend`, and imports nothing of ours.

Its first argument is a JSON object: the device's `backend`, the operations that a backend `has`, and how the check of
an operation on a backend `ends` where it does not pass ("mla_decode mosaic": "fails"). The rest is the command line.
"""

import json
import os
import signal
import sys
import time

PASSED = {"case": "small", "passed": True, "says": "", "figures": {"calc_diff": 0.0}}
FAILED = {"case": "ragged", "passed": False, "says": "is off by 3.1, allowed 0.01", "figures": {"calc_diff": 3.1}}


def row(content: dict) -> None:
    print(json.dumps(content), flush=True)


def check(how: str) -> int:
    """Prints the output of a check with this end; returns its status."""
    if how == "untried":
        print("no device of this kind", file=sys.stderr)
        return 2
    if how == "empty":
        return 0
    print("a line that is no row")
    row(PASSED)
    if how == "fails":
        row(FAILED)
        row(FAILED)
        return 1
    if how == "hangs":
        time.sleep(600)
    if how == "crashes":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raises":
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")
    if how == "breaks off":
        print('{"case": "ragg', flush=True)
    return 0


def main(plan: dict, *words: str) -> int:
    if not words:
        print(plan["backend"])
        return 0
    backend = words[words.index("--backend") + 1]
    if words[0] != "--list":
        assert "--quick" in words
        return check(plan.get("ends", {}).get(f"{words[0]} {backend}", "passes"))
    if "list" in plan:
        return check(plan["list"])
    print("\n".join(plan["has"].get(backend, [])))
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]), *sys.argv[2:]))
