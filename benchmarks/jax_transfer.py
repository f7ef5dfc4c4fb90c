"""Carries the same pages from one process to another by our sockets and by `jax.experimental.transfer`, on a CPU.

  python -m benchmarks.jax_transfer [--pages 32] [--rounds 3]

Pages have 4.5 MB, DeepSeek-V3's size. Prints MB per processor second of both processes together, since that is what
a busy machine leaves comparable; ours include TLS and two checksums, jax's none of these. Then has jax pull an array
that nobody gives, with a timeout of 2 s, and prints when the pull comes back.
"""

import argparse
import datetime
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np

PAGE_BYTES = 4_497_408  # 64 tokens of 576 bfloat16 in 61 layers
SECRET = b"benchmark " * 4


def our_server(pages: int) -> None:
    """Serves pages until standard input ends; prints where, and processor seconds for each line that it reads."""
    from dsv3.kv_cache.tiers.host_pool import HostPool, host_pool_bytes
    from dsv3.kv_cache.transfer.server import PageServer

    host_pool = HostPool(np.zeros(host_pool_bytes(pages, PAGE_BYTES), np.uint8), PAGE_BYTES, pages)
    for i in range(pages):
        host_pool.put(_key(i), np.full(PAGE_BYTES, i % 256, np.uint8))
    server = PageServer("127.0.0.1", 0, SECRET, _hello(), host_pool)
    print("{}:{}".format(*server.address), flush=True)
    for _ in sys.stdin:
        print(time.process_time(), flush=True)


def jax_server(pages: int) -> None:
    """Offers all pages under the number in each line of standard input; prints where, and processor seconds."""
    import jax
    from jax.experimental import transfer

    client = jax.devices()[0].client
    server = transfer.start_transfer_server(client, "127.0.0.1:0", ["127.0.0.1:0"])
    array = jax.numpy.zeros((pages, PAGE_BYTES), np.uint8).block_until_ready()
    print(server.address(), flush=True)
    for line in sys.stdin:
        server.await_pull(int(line), [array])
        print(time.process_time(), flush=True)


def _key(i: int) -> bytes:
    return i.to_bytes(32, "little")


def _hello() -> Any:
    from dsv3.kv_cache.transfer.protocol import VERSION, PeerHello

    return PeerHello(VERSION, "{}", PAGE_BYTES)


class Other:
    """The other process."""

    def __init__(self, role: str, pages: int) -> None:
        command = [sys.executable, "-m", "benchmarks.jax_transfer", "--role", role, "--pages", str(pages)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address = self._line()

    def say(self, number: int) -> float:
        """Sends a number; returns the processor seconds of the process."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        return float(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


def our_rates(pages: int, rounds: int) -> list[float]:
    """Returns MB per processor second of each round."""
    from dsv3.kv_cache.transfer.client import Peers

    other, peers, rates = Other("ours", pages), Peers(SECRET, _hello()), []
    keys = [_key(i) for i in range(pages)]
    landed = np.empty((pages, PAGE_BYTES), np.uint8)
    for _ in range(rounds):
        there, here, place = other.say(0), time.process_time(), iter(landed)
        peers.fetch(other.address, keys, 5.0, lambda _, value: np.copyto(next(place), value))  # noqa: B023
        rates.append(pages * PAGE_BYTES / 1e6 / (time.process_time() - here + other.say(0) - there))
    other.process.kill()
    return rates


def jax_rates(pages: int, rounds: int, patience_s: float) -> tuple[list[float], str]:
    """Returns MB per processor second of each round, and what became of a pull that nobody answers."""
    import jax
    from jax.experimental import transfer

    other, device = Other("jax", pages), jax.devices()[0]
    server = transfer.start_transfer_server(device.client, "127.0.0.1:0", ["127.0.0.1:0"])
    connection = server.connect(other.address)
    shape = jax.ShapeDtypeStruct((pages, PAGE_BYTES), np.uint8, sharding=jax.sharding.SingleDeviceSharding(device))
    rates = []
    for number in range(rounds):
        there, here = other.say(number), time.process_time()
        [array] = connection.pull(number, [shape])
        array.block_until_ready()
        there_after = other.say(rounds + number)
        rates.append(pages * PAGE_BYTES / 1e6 / (time.process_time() - here + there_after - there))
    fate = unanswered(connection, shape, patience_s)
    other.process.kill()
    return rates, fate


def unanswered(connection: Any, shape: Any, patience_s: float) -> str:
    """Returns what becomes of a pull with a timeout of 2 s that nobody answers, watched from another thread."""
    ends: queue.Queue[str] = queue.Queue()

    def pull() -> None:
        deadline = datetime.datetime.now() + datetime.timedelta(seconds=2)
        try:
            [array] = connection.pull(2**40, [shape], timeout=deadline)
            array.block_until_ready()
            ends.put("it came")
        except Exception as error:
            ends.put(f"{type(error).__name__}: {str(error)[:80]}")

    started = time.monotonic()
    threading.Thread(target=pull, daemon=True).start()
    try:
        end = ends.get(timeout=patience_s)
    except queue.Empty:
        return f"it has not come back after {patience_s:.0f} s"
    return f"{end}, after {time.monotonic() - started:.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--role", choices=["ours", "jax"], help=argparse.SUPPRESS)
    parser.add_argument("--pages", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--patience", type=float, default=20.0, help="seconds for a pull that nobody answers")
    args = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    if args.role:
        {"ours": our_server, "jax": jax_server}[args.role](args.pages)
        return
    ours = our_rates(args.pages, args.rounds)
    theirs, fate = jax_rates(args.pages, args.rounds, args.patience)
    for name, rates in (("our sockets", ours), ("jax.experimental.transfer", theirs)):
        print(f"{name}: {statistics.median(rates):.0f} MB per processor second (rounds {[round(r) for r in rates]})")
    print(f"a pull that nobody answers, timeout 2 s: {fate}")
    sys.stdout.flush()
    os._exit(0)  # a pull may still wait


if __name__ == "__main__":
    main()
