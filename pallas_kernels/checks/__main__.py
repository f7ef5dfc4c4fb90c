"""The command `python -m pallas_kernels.checks`, whose output the package's docstring describes."""

import argparse
import json
import sys

import jax

from pallas_kernels import checks, gpus
from pallas_kernels.backend import Backend, BackendUnavailableError, prepare, resolve_backend
from pallas_kernels.checks.case import ContextLostError


def main(argv: list[str] | None = None) -> int:
    """Lists the operations, or checks one; returns the exit status."""
    args = _arguments(argv)
    asked = Backend(args.backend) if args.backend else None
    if args.list:
        print("\n".join(checks.names(asked)))
        return 0
    try:
        backend = resolve_backend(gpus.default_device(), asked)
        prepare(backend)
    except (BackendUnavailableError, ValueError, RuntimeError) as error:
        return _nothing(str(error))
    if jax.default_backend() == "cpu" and not args.quick:
        return _nothing("a CPU takes minutes for the shapes of models; add --quick")
    cases = list(checks.OPERATIONS[args.operation].cases(backend, args.quick))
    if not cases:
        return _nothing(f"the backend {backend.value} has no {args.operation}")
    passed = True
    for case in cases:
        try:
            row = checks.check(case, backend)
        except ContextLostError as error:
            _print(checks.Row(case.name, False, f"the device's context is gone: {error}"))
            return 1
        passed &= row.passed
        _print(row)
    return 0 if passed else 1


def _print(row: checks.Row) -> None:
    print(json.dumps(row.as_json()), flush=True)


def _nothing(why: str) -> int:
    print(why, file=sys.stderr)
    return 2


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.checks", description=checks.__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("operation", nargs="?", choices=checks.names(), metavar="OPERATION", help="a name of --list")
    parser.add_argument("--list", action="store_true", help="print the operations' names")
    parser.add_argument("--quick", action="store_true", help="two small shapes")
    parser.add_argument("--backend", choices=[backend.value for backend in Backend], help="instead of the device's own")
    args = parser.parse_args(argv)
    if args.list == bool(args.operation):
        parser.error("say either an OPERATION or --list")
    return args


if __name__ == "__main__":
    sys.exit(main())
