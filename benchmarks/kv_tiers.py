"""How near the cache's tiers come to the memory and the disk below them.

    JAX_PLATFORMS=cpu python -m benchmarks.kv_tiers --directory /path/on/the/disk [--values 48] [--rounds 7]

Values have 4.5 MB, DeepSeek-V3's page in bfloat16. Every round takes all cases in a new random order. Before a case
that reads a disk its files leave the page cache. Ratios are taken within a round, and their median is shown: against
raw copies in memory, and against raw O_DIRECT reads by as many threads.
"""

import mmap
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
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
type Cases = dict[str, Callable[[], object]]
"""What reads all values, the case that the others are compared with first."""


def main(report: Report) -> None:
    given = arguments(__doc__, rounds=7, values=48, directory=Path(tempfile.gettempdir()))
    temporary = tempfile.TemporaryDirectory
    with temporary(dir=given.directory) as disk, temporary(dir=host_memory.FOLDER) as memory:
        host_memory.FOLDER = Path(memory)  # apart from other engines' arenas
        with ThreadPoolExecutor(THREADS) as threads:
            tables, prepare = _tables(Path(disk), given.values, threads)
            for title, base, cases in tables:
                rates = _in_turns(cases, prepare, given.rounds, given.values * VALUE_BYTES / 1e6)
                pairs = ((name, mine, np.divide(mine, rates[next(iter(cases))])) for name, mine in rates.items())
                lines = ([name, statistics.median(mine), np.median(over)] for name, mine, over in pairs)
                report.table(title, ["case", "MB/s", f"over {base}"], lines)


def _in_turns(cases: Cases, prepare: Callable[[], object], rounds: int, size: float) -> dict[str, list[float]]:
    """Returns MB per second of each case by round, where all values have `size` MB."""
    rates: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name in random.sample(list(cases), len(cases)):
            prepare()
            rates[name].append(size / elapsed(cases[name]))
    return rates


def _tables(
    folder: Path, count: int, threads: ThreadPoolExecutor
) -> tuple[list[tuple[str, str, Cases]], Callable[[], object]]:
    """Returns title, base and cases of each table, over `count` values, and what must precede each case."""
    keys, values, out = [i.to_bytes(32, "big") for i in range(count)], _memory(count), _memory(count)
    values[:] = np.random.default_rng(0).integers(0, 256, values.shape, np.uint8)
    memory = SharedMemory("bench", host_pool_bytes(count, VALUE_BYTES))
    memory.array[:] = 0
    directory, pool = Directory(folder / "directory", VALUE_BYTES, 2**40), HostPool(memory.array, VALUE_BYTES, count)
    directory.put(keys, values)
    tiers = Tiers((1, BATCH), pool, directory, page_size=64)

    def from_pool() -> None:
        for key, value in zip(keys, out, strict=True):
            pool.get(key, value)

    def from_directory() -> None:
        for start in range(0, count, BATCH):
            some = keys[start : start + BATCH]
            assert directory.get(some, out[start : start + BATCH]) == len(some)

    def read_directly(i: int) -> None:
        """Reads a file's header and value with one call."""
        header = np.frombuffer(mmap.mmap(-1, ALIGNMENT), np.uint8)
        descriptor = os.open(directory._path(keys[i]), os.O_RDONLY | os.O_DIRECT)
        try:
            assert os.preadv(descriptor, [header, out[i]], 0) == ALIGNMENT + aligned(VALUE_BYTES)
        finally:
            os.close(descriptor)

    def through_tiers() -> None:
        """Loads all values as a request does, but for the copy to a device."""
        load, loaded = PrefixLoad(tiers, keys), 0
        while not load.is_over:
            if (batch := load.pop_batch()) is None:
                tiers.wait(0.01)
            else:
                loaded += batch.num_pages
        assert loaded == count

    def from_disk() -> None:
        pool.clear()
        through_tiers()

    def prepare() -> None:
        while any(tiers._backlog.values()):  # what the case before has left to be written
            time.sleep(0.01)
        drop_cache(folder)

    loading: Cases = {
        "raw O_DIRECT": lambda: list(threads.map(read_directly, range(count))),
        "directory, verified": from_directory,
        "tiers: disk to batches, and to host memory behind them": from_disk,
    }
    from_memory: Cases = {
        "raw copy": lambda: np.copyto(out, values),
        "host memory": from_pool,
        "tiers: host memory to batches": through_tiers,
    }
    for key, value in zip(keys, values, strict=True):
        pool.put(key, value)
    return [
        ("Loading from host memory", "a raw copy in memory", from_memory),
        ("Loading from the disk", "raw O_DIRECT reads", loading),
    ], prepare


def _memory(rows: int) -> np.ndarray:
    """Returns uint8 `[rows, VALUE_BYTES]` at the start of a memory page, each of whose pages is there already."""
    array = np.frombuffer(mmap.mmap(-1, rows * VALUE_BYTES), np.uint8).reshape(rows, VALUE_BYTES)
    array[:] = 1
    return array


if __name__ == "__main__":
    run(main)
