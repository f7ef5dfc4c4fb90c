"""Runs `launch.serve` several times on this host, once per GPU, as the processes of one node of an instance.

  python -m deploy.node --num_nodes 18 --node_rank 3 --processes_per_node 8 -- \\
    --model /models/DeepSeek-V3 --coordinator HOST0:8476 --cluster_key_file cluster.key --enable_expert_parallel

What follows "--" are the flags of `launch.serve`; the number of processes and the place of each are added.
`launch/node.py` describes signals, failures and the exit status.
"""

import argparse
import sys
from collections.abc import Sequence

from launch import node


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until all processes have ended; returns the exit status."""
    options = parse(argv)
    flags = node.places(options.arguments, options.num_nodes, options.node_rank, options.processes_per_node)
    return node.serve(flags, options.node_rank * options.processes_per_node, options.drain_timeout)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line; ends the process with status 2 where it is wrong."""
    parser = argparse.ArgumentParser("deploy.node", description=__doc__.partition("\n")[0])
    parser.add_argument("--num_nodes", type=int, default=1, help="Hosts of the instance.")
    parser.add_argument("--node_rank", type=int, default=0, help="This host's number; host 0 serves HTTP.")
    parser.add_argument("--processes_per_node", type=int, required=True, help="Processes on each host.")
    parser.add_argument(
        "--drain_timeout",
        type=float,
        default=node.DRAIN_S,
        help="After a signal, wait this many seconds for the processes.",
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="Flags of launch.serve, after --.")
    options = parser.parse_args(argv)
    if options.num_nodes < 1 or options.processes_per_node < 1:
        parser.error("--num_nodes and --processes_per_node must be at least 1")
    if not 0 <= options.node_rank < options.num_nodes:
        parser.error(f"--node_rank {options.node_rank} is not from 0 to {options.num_nodes - 1}")
    options.arguments = options.arguments[options.arguments[:1] == ["--"] :]
    return options


if __name__ == "__main__":
    sys.exit(main())
