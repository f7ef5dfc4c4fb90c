"""Speed of loading a checkpoint as a fraction of the disk's raw read speed; every case runs in a fresh process.

    python -m benchmarks.checkpoint --size_gb=2 --rounds=3 --directory=/path/on/the/disk [--only="hf bf16"]

Makes a bfloat16 checkpoint of DeepSeek-V3's shape and of about `--size_gb` 10^9 bytes, and its FP8 twin. Each round
then reads, with `--only` those cases alone whose names have this text, beside the raw ones,

- "raw": the files alone, by threads with 4 MiB reads with O_DIRECT;
- "hf": the parameters, by `load_params`;
- "update": the parameters, into a running engine (`UpdateWeights`); with `--directory=/dev/shm` as from a trainer in
  another process.

The page cache is dropped before every run: by /proc/sys/vm/drop_caches if permitted, else by POSIX_FADV_DONTNEED. "From
the disk" is how much the kernel then fetched from storage. Ratios are taken within a round, and their median is shown.
Processor seconds are shown because a load that waits for a busy processor looks like a slow disk.
"""

import contextlib
import mmap
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.record import Cell, Report, arguments, run

READ_BYTES = 4 << 20
THREADS = 8
CASES = {f"{what} {name}": name for name in ("bf16", "fp8") for what in ("raw", "hf", "update")}
"""The checkpoint that a case reads."""
SIZES: dict[str, Any] = {
    "vocab_size": 32_000, "hidden_size": 2048, "num_hidden_layers": 3, "num_attention_heads": 16,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "q_lora_rank": 1536,
    "intermediate_size": 8192, "moe_intermediate_size": 1408, "num_experts_per_tok": 2, "n_routed_experts": 4,
}  # fmt: skip
"""Of the model; the number of experts follows from `--size_gb`."""


def main(report: Report) -> None:
    """Makes the checkpoints, runs the cases and reports a line per case."""
    given = arguments(__doc__, size_gb=2.0, rounds=3, directory=tempfile.gettempdir(), only="")
    with tempfile.TemporaryDirectory(dir=given.directory) as directory:
        make(Path(directory), given.size_gb)
        chosen = {case: name for case, name in CASES.items() if "raw" in case or given.only in case}
        results: dict[str, list[dict[str, float]]] = {case: [] for case in chosen}
        for _ in range(given.rounds):
            for case, name in chosen.items():
                how = drop_cache(Path(directory) / name)
                results[case].append(in_fresh_process(case, Path(directory) / name))
    columns = ["case", "GB", "from the disk (%)", "GB/s", "of direct reads (%)", "processor (s)",
               "peak above the start (GB)"]  # fmt: skip
    report.table(f"Page cache dropped by {how}, {given.rounds} rounds", columns, lines(results))


def make(root: Path, size_gb: float) -> None:
    """Writes the two checkpoint directories; their values repeat a block of random numbers."""
    import jax
    import ml_dtypes

    from dsv3.checkpoint import save_hf
    from dsv3.checkpoint.layout import scale_shape
    from dsv3.config.model import Fp8Config, ModelConfig
    from dsv3.model.params import Fp8Weight, declare

    sizes = dict(SIZES)
    expert = 3 * sizes["hidden_size"] * sizes["moe_intermediate_size"] * 2 * 2
    sizes["n_routed_experts"] = max(4, round((size_gb * 1e9 - 0.5e9) / expert))
    block = np.random.default_rng(0).normal(size=1 << 20).astype(ml_dtypes.bfloat16)
    fp8_block = block.astype(ml_dtypes.float8_e4m3fn)

    def draw(spec: Any, quantized: bool) -> Any:
        if quantized and spec.quantizable:
            scale = np.full(scale_shape(spec.shape), 0.01, np.float32)
            return Fp8Weight(np.resize(fp8_block, spec.shape), scale)
        return np.resize(block, spec.shape).astype(spec.dtype or block.dtype)

    for name, cfg in (("bf16", ModelConfig(**sizes)), ("fp8", ModelConfig(**sizes, fp8=Fp8Config()))):
        params = jax.tree.map(lambda spec, q=name == "fp8": draw(spec, q), declare(cfg))
        save_hf(root / name, cfg, params, shard_bytes=10**9)
        del params


def drop_cache(directory: Path) -> str:
    """Drops a directory's files from the page cache; returns the method used."""
    os.sync()
    with contextlib.suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("1")
        return "drop_caches"
    for path in (each for each in directory.rglob("*") if each.is_file()):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return "POSIX_FADV_DONTNEED"


def in_fresh_process(case: str, directory: Path) -> dict[str, float]:
    """Returns what `run_case` measures in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(run_case, case, directory).result()


def run_case(case: str, directory: Path) -> dict[str, float]:
    """Returns seconds, processor seconds, bytes asked of the kernel and fetched from storage, peak above the start."""
    work, process = loader(case, directory), psutil.Process()
    before, resident = process.io_counters(), process.memory_info().rss
    start, cpu = time.perf_counter(), time.process_time()
    keep = work()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    after = process.io_counters()
    status = Path("/proc/self/status").read_text()
    peak = 1024 * int(status.split("VmHWM:")[1].split()[0])  # `ru_maxrss` has the parent's, too
    asked, fetched = after.read_chars - before.read_chars, after.read_bytes - before.read_bytes
    del keep
    return {"seconds": seconds, "cpu": cpu, "bytes": asked, "fetched": fetched, "peak": peak - resident}


def loader(case: str, directory: Path) -> Callable[[], Any]:
    """Returns what a case does; imports are done, JAX and the engine are started, and no program is compiled."""
    if case.startswith("raw"):
        return lambda: read_raw(directory)
    import jax

    from dsv3.checkpoint import load_params
    from dsv3.config.hugging_face import load_config
    from dsv3.config.options import EngineOptions
    from dsv3.engine.build import build_engine
    from dsv3.engine.operations import UpdateWeights

    jax.block_until_ready(jax.device_put(np.zeros(8)))
    if case.startswith("hf"):
        cfg = load_config(directory)
        return lambda: load_params(directory, cfg, dtype="bfloat16", progress=False, threads=THREADS)
    limits: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 1, "max_num_batched_tokens": 64}
    engine = build_engine(directory, EngineOptions(dtype="bfloat16", **limits), progress=False)

    def update() -> None:
        done = engine.operate(UpdateWeights(str(directory), None, "keep"))
        while not done.done():
            engine.step()
        done.result(0)

    return update


def read_raw(directory: Path) -> None:
    """Reads every byte of the files with threads, into one buffer per thread."""
    paths = sorted(directory.rglob("*.safetensors"))
    jobs = [(path, at) for path in paths for at in range(0, path.stat().st_size, READ_BYTES)]
    handles = {path: os.open(path, os.O_RDONLY | os.O_DIRECT) for path in paths}
    buffers = [mmap.mmap(-1, READ_BYTES) for _ in range(THREADS)]

    def read(worker: int) -> None:
        for path, at in jobs[worker::THREADS]:
            os.preadv(handles[path], [buffers[worker]], at)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(read, range(THREADS)))


def lines(results: dict[str, list[dict[str, float]]]) -> Iterator[list[Cell]]:
    """Yields one line per case: bytes, throughput, ratio to the raw read of the same checkpoint, memory."""
    rates = {case: np.array([each["bytes"] / each["seconds"] / 1e9 for each in runs]) for case, runs in results.items()}
    for case, runs in results.items():
        middle = {key: statistics.median(each[key] for each in runs) for key in runs[0]}
        ratio = np.median(rates[case] / rates[f"raw {CASES[case]}"])
        yield [case, middle["bytes"] / 1e9, round(100 * middle["fetched"] / middle["bytes"]), np.median(rates[case]),
               round(100 * ratio), middle["cpu"], middle["peak"] / 1e9]  # fmt: skip


if __name__ == "__main__":
    run(main)
