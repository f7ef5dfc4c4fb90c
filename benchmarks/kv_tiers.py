"""How near the cache's tiers come to the memory and the disk below them.

    JAX_PLATFORMS=cpu python -m benchmarks.kv_tiers --directory /path/on/the/disk [--values 48] [--rounds 7]

Values have 4.5 MB, DeepSeek-V3's page in bfloat16. Every round takes all cases in a new random order. Before a case
that reads a disk its files leave the page cache. Ratios are taken within a round, and
their median is shown: against raw copies in memory, and against raw O_DIRECT reads by as many threads.
"""

import contextlib
import dataclasses
import functools
import mmap
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.checkpoint import drop_cache
from benchmarks.record import Report, arguments, elapsed, run
from dsv3.kv_cache.page_keys import ALIGNMENT, aligned
from dsv3.kv_cache.tiers import host_pool as host_memory
from dsv3.kv_cache.tiers.host_pool import HostPool, SharedMemory, host_pool_bytes
from dsv3.kv_cache.tiers.store import Directory
from dsv3.kv_cache.tiers.tiers import PrefixLoad, Tiers

VALUE_BYTES = 61 * 64 * 576 * 2
THREADS = 8
BATCH = 8  # values, as the pages of DeepSeek-V3 go to a device


def main(report: Report) -> None:
    given = arguments(__doc__, rounds=7, values=48, directory=Path(tempfile.gettempdir()))
    temporary = tempfile.TemporaryDirectory
    with temporary(dir=given.directory) as disk, temporary(dir=host_memory.FOLDER) as memory:
        host_memory.FOLDER = Path(memory)  # apart from other engines' arenas
        _rates(report, Path(disk), given.rounds, given.values)


@dataclasses.dataclass
class Bench:
    """Values on a disk and in memory, and room to read them into: uint8 `[n, VALUE_BYTES]`."""

    folder: Path
    keys: list[bytes]
    values: np.ndarray
    out: np.ndarray
    directory: Directory
    host_pool: HostPool
    tiers: Tiers
    pool: ThreadPoolExecutor


def _rates(report: Report, folder: Path, rounds: int, count: int) -> None:
    with _bench(folder, count) as bench:
        for title, unit, cases in (
            ("Storing", "a raw copy in memory", _storing(bench)),
            ("Loading from the disk", "raw O_DIRECT reads", _loading(bench)),
            ("Loading from host memory", "a raw copy in memory", _from_host(bench)),
        ):
            rates = _in_turns(bench, cases, rounds, count)
            base = rates[next(iter(cases))]
            lines = ([name, *map(statistics.median, (mine, np.divide(mine, base)))] for name, mine in rates.items())
            report.table(title, ["case", "MB/s", f"over {unit}"], lines)


def _in_turns(bench: Bench, cases: dict[str, Callable], rounds: int, count: int) -> dict[str, list[float]]:
    """MB per second of each case by round."""
    rates: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name in random.sample(list(cases), len(cases)):
            drop_cache(bench.folder)
            rates[name].append(count * VALUE_BYTES / 1e6 / cases[name]())
    return rates


def _memory(rows: int) -> np.ndarray:
    """Returns uint8 `[rows, VALUE_BYTES]` at the start of a memory page, each of whose pages is there already."""
    array = np.frombuffer(mmap.mmap(-1, rows * VALUE_BYTES), np.uint8).reshape(rows, VALUE_BYTES)
    array[:] = 1
    return array


@contextlib.contextmanager
def _bench(folder: Path, count: int) -> Iterator[Bench]:
    keys = [i.to_bytes(32, "big") for i in range(count)]
    values = _memory(count)
    values[:] = np.random.default_rng(0).integers(0, 256, values.shape, np.uint8)
    memory = SharedMemory("bench", host_pool_bytes(count, VALUE_BYTES))
    memory.array[:] = 0
    directory = Directory(folder / "directory", VALUE_BYTES, 2**40)
    host_pool = HostPool(memory.array, VALUE_BYTES, count)
    directory.put(keys, values)
    with ThreadPoolExecutor(THREADS) as pool:
        tiers = Tiers((1, BATCH), host_pool, directory, page_size=64)
        yield Bench(folder, keys, values, _memory(count), directory, host_pool, tiers, pool)


def _storing(bench: Bench) -> dict[str, Callable[[], float]]:
    """A raw copy, the host_pool, and files that the page cache takes: seconds to write all values."""

    def host_pool() -> float:
        bench.host_pool.clear()
        return elapsed(lambda: [bench.host_pool.put(k, v) for k, v in zip(bench.keys, bench.values, strict=True)])

    def directory() -> float:
        bench.directory.delete(bench.keys)
        return elapsed(lambda: bench.directory.put(bench.keys, bench.values))

    copy = functools.partial(elapsed, lambda: np.copyto(bench.out, bench.values))
    return {"raw copy": copy, "host memory": host_pool, "directory, unsynced": directory}


def _loading(bench: Bench) -> dict[str, Callable[[], float]]:
    """Seconds to read all values from the disk."""
    read = functools.partial(_read_one, bench)
    return {
        "raw O_DIRECT": lambda: elapsed(lambda: list(bench.pool.map(read, range(len(bench.keys))))),
        "directory, verified": lambda: elapsed(lambda: _get(bench)),
        "tiers: disk to batches, and to host memory behind them": lambda: _through_tiers(bench, host=False),
    }


def _read_one(bench: Bench, i: int) -> None:
    """Reads a file's header and value with one call."""
    header = np.frombuffer(mmap.mmap(-1, ALIGNMENT), np.uint8)
    descriptor = os.open(bench.directory._path(bench.keys[i]), os.O_RDONLY | os.O_DIRECT)
    try:
        count = os.preadv(descriptor, [header, bench.out[i]], 0)
    finally:
        os.close(descriptor)
    assert count == ALIGNMENT + aligned(VALUE_BYTES)


def _get(bench: Bench) -> None:
    for start in range(0, len(bench.keys), BATCH):
        keys = bench.keys[start : start + BATCH]
        assert bench.directory.get(keys, bench.out[start : start + BATCH]) == len(keys)


def _from_host(bench: Bench) -> dict[str, Callable[[], float]]:
    bench.host_pool.clear()
    for key, value in zip(bench.keys, bench.values, strict=True):
        bench.host_pool.put(key, value)

    def host_pool() -> float:
        return elapsed(lambda: [bench.host_pool.get(k, v) for k, v in zip(bench.keys, bench.out, strict=True)])

    copy = functools.partial(elapsed, lambda: np.copyto(bench.out, bench.values))
    return {
        "raw copy": copy,
        "host memory": host_pool,
        "tiers: host memory to batches": lambda: _through_tiers(bench, host=True),
    }


def _through_tiers(bench: Bench, *, host: bool) -> float:
    """Seconds to load all values as a request does, but for the copy to a device."""
    if not host:
        bench.host_pool.clear()
    tiers = bench.tiers

    def load() -> None:
        fetch, count = PrefixLoad(tiers, bench.keys), 0
        while not fetch.is_over:
            if (batch := fetch.pop_batch()) is None:
                tiers.wait(0.01)
            else:
                count += batch.num_pages
        assert count == len(bench.keys)

    seconds = elapsed(load)
    _settle(tiers)
    return seconds


def _settle(tiers: Tiers) -> None:
    """Waits until nothing is to be written any more."""
    while any(tiers._backlog.values()):
        time.sleep(0.01)


if __name__ == "__main__":
    run(main)
