"""The router that `routing` starts: a module whose imports all routers of a worker share."""

import json
import sys

from launch import flags, router


def main() -> int:
    """Runs `python -m launch.router` with the arguments of a JSON list."""
    flags.run(router.main, argv=["router", *json.loads(sys.argv[1])])
