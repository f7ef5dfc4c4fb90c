"""Carries the same pages from one process to another by encrypted sockets and by NIXL, in turns, on one host.

  python -m benchmarks.nixl_transfer [--pages 32] [--rounds 5]
  UCX_TLS=tcp python -m benchmarks.nixl_transfer        NIXL over TCP in place of shared memory

Pages have 4.5 MB, DeepSeek-V3's size, and each is verified. Rates are MB per processor second of both processes
together and MB/s; the last column is what a carrier's threads take of a core while no page is read. The process that
does not take part in a round is stopped. Needs the extra `nixl`.
"""

import os
import re
import signal
import statistics
import subprocess
import sys
import time

import numpy as np

from benchmarks.record import Cell, Report, arguments, run, spread
from dsv3.kv_cache.tiers.counts import TierCounts
from dsv3.kv_cache.tiers.host_pool import HostPool, host_pool_bytes
from dsv3.kv_cache.transfer.client import Peers
from dsv3.kv_cache.transfer.nixl import open_nixl
from dsv3.kv_cache.transfer.protocol import VERSION, PeerHello
from dsv3.kv_cache.transfer.server import PageServer

PAGE_BYTES = 4_497_408  # 64 tokens of 576 bfloat16 in 61 layers
SECRET = b"benchmark " * 4
HELLO = PeerHello(VERSION, "{}", PAGE_BYTES)
CARRIERS = ("sockets", "nixl")
_IDLE_S = 5.0


def key(i: int) -> bytes:
    """Returns the key of a page."""
    return i.to_bytes(32, "little")


def serve(carrier: str, pages: int) -> None:
    """Serves pages until standard input ends; prints where, and processor seconds for each line that it reads."""
    host_pool = HostPool(np.zeros(host_pool_bytes(pages, PAGE_BYTES), np.uint8), PAGE_BYTES, pages)
    for i in range(pages):
        host_pool.put(key(i), np.full(PAGE_BYTES, i % 256, np.uint8))
    agent, _reader = open_nixl(carrier, host_pool, serves=True)
    server = PageServer("127.0.0.1", 0, SECRET, HELLO, host_pool, agent=agent)
    print("{}:{}".format(*server.address), flush=True)
    for _ in sys.stdin:
        print(time.process_time(), flush=True)


class Other:
    """A process that gives pages by a carrier, and the way to it."""

    def __init__(self, carrier: str, pages: int) -> None:
        command = [sys.executable, "-m", "benchmarks.nixl_transfer", "--serve", carrier, "--pages", str(pages)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = next(line.strip() for line in self.process.stdout if re.fullmatch(r"[\d.]+:\d+\n", line))
        room = HostPool(np.zeros(host_pool_bytes(1, PAGE_BYTES), np.uint8), PAGE_BYTES, 1)
        _, reader = open_nixl(carrier, room, serves=False)
        self.peers = Peers(SECRET, HELLO, reader)

    def seconds(self) -> float:
        """Returns the processor seconds that the process has taken."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def round(self, landed: np.ndarray) -> tuple[float, float]:
        """Fetches all pages; returns MB per processor second of both processes, and MB/s."""
        landed[:] = 0
        self.process.send_signal(signal.SIGCONT)
        place, there, here, started = iter(landed), self.seconds(), time.process_time(), time.monotonic()
        self.peers.fetch(
            self.address, [key(i) for i in range(len(landed))], 5.0, lambda _, value: np.copyto(next(place), value)
        )
        wall, size = time.monotonic() - started, landed.nbytes / 1e6
        processor = time.process_time() - here + self.seconds() - there
        self.process.send_signal(signal.SIGSTOP)
        assert all((row == i % 256).all() for i, row in enumerate(landed))
        return size / processor, size / wall

    def idle(self) -> float:
        """Returns the share of a core that the process takes while it is idle."""
        self.process.send_signal(signal.SIGCONT)
        before = self.seconds()
        time.sleep(_IDLE_S)
        return (self.seconds() - before) / _IDLE_S


def main(report: Report) -> None:
    args = arguments(__doc__, serve=None, pages=32, rounds=5)
    if args.serve:
        serve(args.serve, args.pages)
        return
    others = {carrier: Other(carrier, args.pages) for carrier in CARRIERS}
    try:
        landed = np.empty((args.pages, PAGE_BYTES), np.uint8)
        for other in others.values():
            other.round(landed)  # connects
        rounds = [{carrier: other.round(landed) for carrier, other in others.items()} for _ in range(args.rounds)]
        assert not others["nixl"].peers.carrier_stats.with_carriers(TierCounts()).carried_bytes[0], (
            "what was measured was not NIXL alone"
        )
        lines: list[list[Cell]] = []
        for carrier, other in others.items():
            rates = [statistics.median(each[carrier][i] for each in rounds) for i in (0, 1)]
            lines.append([carrier, *rates, other.idle()])
        over = [spread(each["nixl"][i] / each["sockets"][i] for each in rounds) for i in (0, 1)]
        lines.append(["nixl / sockets", *over, None])
        columns = ["carrier", "MB per processor second", "MB/s", "of a core while idle"]
        report.table(f"{args.pages} pages, UCX_TLS {os.environ.get('UCX_TLS', 'as UCX chooses')}", columns, lines)
    finally:
        for other in others.values():
            other.process.kill()


if __name__ == "__main__":
    run(main)
