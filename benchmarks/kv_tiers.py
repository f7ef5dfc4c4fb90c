"""What pages gain that leave a device, and how near the tiers come to the memory and the disk below them.

    JAX_PLATFORMS=cpu python -m benchmarks.kv_tiers ttft [--rounds 7]
    JAX_PLATFORMS=cpu python -m benchmarks.kv_tiers rates --directory /path/on/the/disk [--values 48]

`ttft`: time to the first token of a 1,900-token prompt of the bundled model and of a 7,900-token prompt of a random
model of two layers with DeepSeek-V3's latents. Each round asks the same new prompt cold, then from host memory, then
from a directory in the page cache; the device forgets it in between. Prints medians, and the median of the ratios.

`rates`: values of 4.5 MB, DeepSeek-V3's page in bfloat16. Every round takes all cases in a new random order. Before a
case that reads a disk its files leave the page cache (fsync, then POSIX_FADV_DONTNEED). Ratios are taken within a
round, and their median is shown: against raw copies in memory, and against raw O_DIRECT reads by as many threads.
"""

import argparse
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

import jax
import jax.numpy as jnp
import numpy as np

from dsv3.config.engine import EngineConfig
from dsv3.config.model import ModelConfig
from dsv3.config.options import EngineOptions
from dsv3.engine.build import build_engine, bundled_model
from dsv3.engine.components import EngineComponents
from dsv3.engine.engine import Engine
from dsv3.engine.functions import model_functions
from dsv3.kv_cache.page_keys import ALIGNMENT, aligned, read_header
from dsv3.kv_cache.tiers import host_pool as host_memory
from dsv3.kv_cache.tiers.host_pool import HostPool, SharedMemory, host_pool_bytes
from dsv3.kv_cache.tiers.store import Directory, Objects
from dsv3.kv_cache.tiers.tiers import Tiers
from dsv3.model.params import initialize
from dsv3.sampling_params import SamplingParams
from dsv3.scheduler.request import EngineRequest

VALUE_BYTES = 61 * 64 * 576 * 2
THREADS = 8
BATCH = 8  # values, as the pages of DeepSeek-V3 go to a device
LONG = ModelConfig(
    vocab_size=1024,
    hidden_size=512,
    intermediate_size=1024,
    moe_intermediate_size=128,
    num_hidden_layers=2,
    first_k_dense_replace=1,
    num_attention_heads=8,
    q_lora_rank=256,
    kv_lora_rank=512,
    qk_nope_head_dim=64,
    qk_rope_head_dim=64,
    v_head_dim=64,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    n_shared_experts=1,
    max_position_embeddings=8192,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("ttft", "rates"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--values", type=int, default=48)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    arguments = parser.parse_args()
    temporary = tempfile.TemporaryDirectory
    with temporary(dir=arguments.directory) as disk, temporary(dir=host_memory.FOLDER) as memory:
        host_memory.FOLDER = Path(memory)  # apart from other engines' arenas
        if arguments.what == "ttft":
            _ttft(Path(disk), arguments.rounds)
        else:
            _rates(Path(disk), arguments.rounds, arguments.values)


# Time to the first token.


def _ttft(folder: Path, rounds: int) -> None:
    tiers = {"kv_offloading_size": 0.5, "kv_store": str(folder / "store")}
    print("| model | prompt | cold | from host | from the page cache of a disk | cold over host | cold over disk |")
    print("|---|---|---|---|---|---|---|")
    options = EngineOptions(max_num_seqs=4, max_num_batched_tokens=1024, **tiers)
    _compare("bundled", build_engine(bundled_model(), options, progress=False), 1900, rounds)
    limits = EngineConfig(8192, 128, max_num_seqs=4, max_num_batched_tokens=1024, identity="random", **tiers)
    params = initialize(LONG, jax.random.key(0), jnp.float32)
    _compare("random", Engine(EngineComponents.on_devices(model_functions(), params, LONG, limits)), 7900, rounds)


def _compare(name: str, engine: Engine, length: int, rounds: int) -> None:
    engine.warm_up()
    draw = np.random.default_rng(0)
    times = [_round(engine, draw.integers(3, 1000, length).tolist()) for _ in range(rounds + 1)][1:]
    cold, host, disk = (statistics.median(each) * 1e3 for each in zip(*times, strict=True))
    gain = [statistics.median(each[0] / each[i] for each in times) for i in (1, 2)]
    shown = f"{cold:.0f} ms | {host:.0f} ms | {disk:.0f} ms | {gain[0]:.1f} | {gain[1]:.1f}"
    print(f"| {name} | {length:,} | {shown} |", flush=True)


def _round(engine: Engine, prompt: list[int]) -> tuple[float, float, float]:
    """Seconds to the first token of a new prompt: computed, from host memory, from the store."""
    cold = _first_token(engine, prompt, 0)
    _forget(engine)
    host = _first_token(engine, prompt, (len(prompt) - 1) // 64 * 64)
    _forget(engine)
    engine.scheduler.tiers.clear()
    return cold, host, _first_token(engine, prompt, (len(prompt) - 1) // 64 * 64)


def _first_token(engine: Engine, prompt: list[int], cached: int) -> float:
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    started = time.perf_counter()
    engine.add(EngineRequest(request_id=time.monotonic_ns() % 2**40, prompt_token_ids=prompt, sampling=sampling))
    seconds = None
    while engine.has_work:
        for output in engine.step():
            seconds = time.perf_counter() - started
            assert output.num_cached_tokens == cached, (output, cached)
    assert seconds is not None
    return seconds


def _forget(engine: Engine) -> None:
    """Empties the device once all that has left it is written."""
    _settle(engine.scheduler.tiers)
    for cache in engine.scheduler.caches:
        cache.clear()


# Rates of values of 4.5 MB.


@dataclasses.dataclass
class Bench:
    """Values on a disk and in memory, and room to read them into: uint8 `[n, VALUE_BYTES]`."""

    folder: Path
    keys: list[bytes]
    values: np.ndarray
    out: np.ndarray
    directory: Directory
    host_pool: HostPool
    objects: Objects
    tiers: Tiers
    pool: ThreadPoolExecutor

    def files(self) -> list[Path]:
        """The files of the directory, in the order of the keys."""
        return [self.directory._path(key) for key in self.keys]

    def drop(self) -> None:
        """Has all files leave the page cache."""
        for path in self.folder.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _rates(folder: Path, rounds: int, count: int) -> None:
    with _bench(folder, count) as bench:
        for title, unit, cases in (
            ("store", "a raw copy in memory", _storing(bench)),
            ("load", "raw O_DIRECT reads", _loading(bench)),
            ("from host", "a raw copy in memory", _from_host(bench)),
        ):
            rates = _in_turns(bench, cases, rounds, count)
            base = rates[next(iter(cases))]
            print(f"| {title} | MB/s (median; least and most) | over {unit} |\n|---|---|---|")
            for name, mine in rates.items():
                ratio = statistics.median(a / b for a, b in zip(mine, base, strict=True))
                print(f"| {name} | {statistics.median(mine):,.0f} ({min(mine):,.0f}, {max(mine):,.0f}) | {ratio:.2f} |")
            print(flush=True)


def _in_turns(bench: Bench, cases: dict[str, Callable], rounds: int, count: int) -> dict[str, list[float]]:
    """MB per second of each case by round."""
    rates: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name in random.sample(list(cases), len(cases)):
            bench.drop()
            rates[name].append(count * VALUE_BYTES / 1e6 / cases[name]())
    return rates


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


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
    objects = Objects(f"file://{folder}/objects/", VALUE_BYTES)
    directory = Directory(folder / "directory", VALUE_BYTES, 2**40)
    host_pool = HostPool(memory.array, VALUE_BYTES, count)
    directory.put(keys, values)
    objects.put(keys, values)
    with ThreadPoolExecutor(THREADS) as pool:
        tiers = Tiers((1, BATCH), host_pool, directory, page_size=64)
        yield Bench(folder, keys, values, _memory(count), directory, host_pool, objects, tiers, pool)


def _storing(bench: Bench) -> dict[str, Callable[[], float]]:
    """A raw copy, the arena, and files that the page cache takes: seconds to write all values."""

    def host_pool() -> float:
        bench.host_pool.clear()
        return _seconds(lambda: [bench.host_pool.put(k, v) for k, v in zip(bench.keys, bench.values, strict=True)])

    def directory() -> float:
        bench.directory.delete(bench.keys)
        return _seconds(lambda: bench.directory.put(bench.keys, bench.values))

    def tensorstore() -> float:
        bench.objects.delete(bench.keys)
        return _seconds(lambda: bench.objects.put(bench.keys, bench.values))

    copy = functools.partial(_seconds, lambda: np.copyto(bench.out, bench.values))
    cases = {"raw copy": copy, "arena": host_pool, "directory": directory, "tensorstore's file driver": tensorstore}
    return cases | {"raw writes, unsynced": lambda: _seconds(lambda: _write_raw(bench))}


def _write_raw(bench: Bench) -> None:
    def write(i: int) -> None:
        path = bench.folder / f"raw-{i}"
        path.unlink(missing_ok=True)
        with path.open("wb", buffering=0) as file:
            file.write(memoryview(bench.values[i]))

    list(bench.pool.map(write, range(len(bench.keys))))


def _loading(bench: Bench) -> dict[str, Callable[[], float]]:
    """Seconds to read all values from the disk, in several ways."""
    direct = os.O_RDONLY | os.O_DIRECT

    def by_threads(flags: int, *, check: bool) -> float:
        read = functools.partial(_read_one, bench, flags=flags, check=check)
        return _seconds(lambda: list(bench.pool.map(read, range(len(bench.keys)))))

    def by_batches(store: Directory | Objects) -> float:
        return _seconds(lambda: _get(store, bench))

    return {
        "raw O_DIRECT": lambda: by_threads(direct, check=False),
        "raw, through the page cache": lambda: by_threads(os.O_RDONLY, check=False),
        "O_DIRECT into aligned memory, verified": lambda: by_threads(direct, check=True),
        "directory": lambda: by_batches(bench.directory),
        "tensorstore's file driver": lambda: by_batches(bench.objects),
        "tiers: disk to arena to batches": lambda: _through_tiers(bench, host=False),
    }


def _read_one(bench: Bench, i: int, flags: int, check: bool) -> None:
    """Reads a file's header and value with one call."""
    header = np.frombuffer(mmap.mmap(-1, ALIGNMENT), np.uint8)
    descriptor = os.open(bench.files()[i], flags)
    try:
        count = os.preadv(descriptor, [header, bench.out[i]], 0)
    finally:
        os.close(descriptor)
    assert count == ALIGNMENT + aligned(VALUE_BYTES)
    if check:
        found = read_header(header.tobytes())
        assert found is not None and found.covers(bench.keys[i], bench.out[i])


def _get(store: Directory | Objects, bench: Bench) -> None:
    for start in range(0, len(bench.keys), BATCH):
        keys = bench.keys[start : start + BATCH]
        assert store.get(keys, bench.out[start : start + BATCH]) == len(keys)


def _from_host(bench: Bench) -> dict[str, Callable[[], float]]:
    bench.host_pool.clear()
    for key, value in zip(bench.keys, bench.values, strict=True):
        bench.host_pool.put(key, value)

    def host_pool() -> float:
        return _seconds(lambda: [bench.host_pool.get(k, v) for k, v in zip(bench.keys, bench.out, strict=True)])

    copy = functools.partial(_seconds, lambda: np.copyto(bench.out, bench.values))
    return {"raw copy": copy, "arena": host_pool, "tiers: arena to batches": lambda: _through_tiers(bench, host=True)}


def _through_tiers(bench: Bench, *, host: bool) -> float:
    """Seconds to load all values as a request does, but for the copy to a device."""
    if not host:
        bench.host_pool.clear()
    tiers = bench.tiers

    def load() -> None:
        fetch, count = tiers.fetch(bench.keys), 0
        while not fetch.is_over:
            if (batch := fetch.take()) is None:
                tiers.wait(0.01)
            else:
                count += batch.num_pages
        assert count == len(bench.keys)

    seconds = _seconds(load)
    _settle(tiers)
    return seconds


def _settle(tiers: Tiers) -> None:
    """Waits until nothing is to be written any more."""
    while any(tiers._backlog.values()):
        time.sleep(0.01)


if __name__ == "__main__":
    main()
