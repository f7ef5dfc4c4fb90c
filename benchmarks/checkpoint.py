"""Speed of loading a checkpoint as a fraction of the disk's raw read speed; every case runs in a fresh process.

    python -m benchmarks.checkpoint --size-gb=2 --rounds=3 --directory=/path/on/the/disk [--only="hf bf16"]
        [--threads=8]

Makes a bfloat16 checkpoint of DeepSeek-V3's shape and about the given size, and its FP8 twin. Each round then reads

- "raw": the files alone, by threads with 4 MiB reads, through the page cache, with O_DIRECT, and into as much new
  memory as the files take;
- "hf": the parameters, by `load_params`;
- "spread": the same with experts as replicas on eight forced CPU devices, 8 replicas more than experts. "then spread"
  loads the model first and copies experts in memory. "an eighth" is one of eight processes, with one device's share.

The page cache is dropped before every run: by /proc/sys/vm/drop_caches if permitted, else by POSIX_FADV_DONTNEED. "from
disk" shows how much the kernel then fetched from storage. Ratios are taken within a round, and their median is shown.
Processor seconds are shown because a load that waits for a busy processor looks like a slow disk.
"""

import contextlib
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags as absl_flags

from launch import flags

SIZE_GB = absl_flags.DEFINE_float("size_gb", 2.0, "Size of the bfloat16 checkpoint, in 10^9 bytes.", 0.01)
ROUNDS = absl_flags.DEFINE_integer("rounds", 3, "Rounds; each reads everything once.", 1)
DIRECTORY = absl_flags.DEFINE_string(
    "directory", None, "Directory on the disk to measure; files are removed at the end. Default: /tmp."
)
ONLY = absl_flags.DEFINE_list(
    "only",
    [],
    "Measure only cases whose names contain one of these texts, and the raw ones, which all are compared with.",
)
THREADS = absl_flags.DEFINE_integer("threads", 8, "Threads of every case, as --load_threads of a server.", 1)
CASE = absl_flags.DEFINE_string("case", None, "Case to run in this process; the benchmark calls itself with it.")

READ_BYTES = 4 << 20
# case -> checkpoint it reads
CASES = {
    "raw": "bf16",
    "raw O_DIRECT": "bf16",
    "raw to new memory": "bf16",
    "safetensors package": "bf16",
    "hf bf16": "bf16",
    "raw fp8": "fp8",
    "raw fp8 O_DIRECT": "fp8",
    "hf fp8 keep": "fp8",
    "hf fp8 dequantize": "fp8",
    "hf fp8, then spread": "fp8",
    "hf fp8 spread": "fp8",
    "hf fp8 an eighth": "fp8",
}
DEVICES = 8


def main() -> int:
    """Makes the checkpoints, runs the cases and prints one line per case."""
    if CASE.value:
        print(json.dumps(run_case(CASE.value, Path(DIRECTORY.value))))
        return 0
    with tempfile.TemporaryDirectory(dir=DIRECTORY.value) as directory:
        make(Path(directory), SIZE_GB.value)
        chosen = {case: name for case, name in CASES.items() if "raw" in case or _is_wanted(case)}
        results: dict[str, list[dict[str, float]]] = {case: [] for case in chosen}
        for _ in range(ROUNDS.value):
            for case, name in chosen.items():
                how = drop_cache(Path(directory) / name)
                results[case].append(in_fresh_process(case, Path(directory) / name))
        report(results, how)
    return 0


def _is_wanted(case: str) -> bool:
    return not ONLY.value or any(text in case for text in ONLY.value)


def make(root: Path, size_gb: float) -> None:
    """Writes the two checkpoint directories; their values repeat a block of random numbers."""
    import jax
    import ml_dtypes

    from dsv3.checkpoint import save_hf
    from dsv3.checkpoint.layout import scale_shape
    from dsv3.config.model import Fp8Config, ModelConfig
    from dsv3.model.params import Fp8Weight, declare

    sizes: dict[str, Any] = {
        "vocab_size": 32_000, "hidden_size": 2048, "num_hidden_layers": 3, "num_attention_heads": 16,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "q_lora_rank": 1536,
        "intermediate_size": 8192, "moe_intermediate_size": 1408, "num_experts_per_tok": 2, "n_routed_experts": 4,
    }  # fmt: skip
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
    for path in files(directory):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return "POSIX_FADV_DONTNEED"


def files(directory: Path) -> list[Path]:
    """Weight files of a directory."""
    return sorted(directory.rglob("*.safetensors"))


def in_fresh_process(case: str, directory: Path) -> dict[str, float]:
    """Result of one case, measured in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.checkpoint", f"--case={case}", f"--directory={directory}"]
    command.append(f"--threads={THREADS.value}")
    environment = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout)


def run_case(case: str, directory: Path) -> dict[str, float]:
    """Seconds, bytes asked of the kernel and fetched from storage, processor seconds, peak memory above the start."""
    work = loader(case)
    asked, fetched, resident = io("rchar"), io("read_bytes"), memory("VmRSS")
    start, cpu = time.perf_counter(), time.process_time()
    keep = work(directory)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    result = {"seconds": seconds, "cpu": cpu, "bytes": io("rchar") - asked, "fetched": io("read_bytes") - fetched}
    if case == "safetensors package":
        result["bytes"] = sum(path.stat().st_size for path in files(directory))  # it maps files into memory
    result["peak"] = memory("VmHWM") - resident
    del keep
    return result


def loader(case: str) -> Callable[[Path], Any]:
    """Returns what a case does; imports are done and JAX is started."""
    if case.startswith("raw"):
        return lambda d: read_raw(d, direct=case.endswith("O_DIRECT"), into_one=not case.endswith("memory"))
    import jax

    from dsv3.checkpoint import load_params
    from dsv3.config.hugging_face import load_config

    jax.block_until_ready(jax.device_put(np.zeros(8)))
    if case == "safetensors package":
        return read_with_package
    if case.endswith(("spread", "eighth")):
        return lambda d: read_experts(d, case)
    fp8: Any = "dequantize" if case.endswith("dequantize") else "keep"
    return lambda d: load_params(d, load_config(d), dtype="bfloat16", fp8=fp8, progress=False, threads=THREADS.value)


def read_experts(directory: Path, case: str) -> Any:
    """Loads the parameters with replicas of experts, for all devices or for one that holds an eighth of them."""
    import jax

    from dsv3.checkpoint import load_params
    from dsv3.config.hugging_face import load_config
    from dsv3.engine.expert_parallel import (
        Reading,
        expert_parallel_functions,
        first_expert_map,
        load_spread,
        spread_experts,
    )
    from sharding.mesh import rank_mesh, shardings

    cfg, mesh = load_config(directory), rank_mesh(jax.devices())
    redundant = DEVICES + -cfg.n_routed_experts % DEVICES
    specs = expert_parallel_functions(cfg, mesh, redundant).param_specs
    if case.endswith("eighth"):
        phy2log = first_expert_map(cfg, mesh, redundant).phy2log
        mine = phy2log[:, : phy2log.shape[1] // DEVICES]
        return load_params(directory, cfg, dtype="bfloat16", phy2log=mine, progress=False, threads=THREADS.value)
    if case.endswith("then spread"):
        params = load_params(directory, cfg, dtype="bfloat16", progress=False, threads=THREADS.value)
        served = spread_experts(params, cfg, mesh, redundant)
        return jax.block_until_ready(jax.device_put(served, shardings(specs, mesh)))
    return load_spread(
        directory, cfg, specs, mesh, redundant, Reading("bfloat16", "keep", progress=False, threads=THREADS.value)
    )


def read_raw(directory: Path, *, direct: bool, into_one: bool) -> Any:
    """Reads every byte of the files with threads, into one buffer per thread or into one new array."""
    paths = files(directory)
    jobs = [(path, at) for path in paths for at in range(0, path.stat().st_size, READ_BYTES)]
    handles = {path: os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0)) for path in paths}
    buffers = [mmap.mmap(-1, READ_BYTES) for _ in range(THREADS.value)]
    everything = None if into_one else np.empty(len(jobs) * READ_BYTES, np.uint8)

    def read(worker: int) -> None:
        for job in range(worker, len(jobs), THREADS.value):
            path, at = jobs[job]
            part = buffers[worker] if everything is None else everything[job * READ_BYTES : (job + 1) * READ_BYTES]
            os.preadv(handles[path], [part], at)

    with ThreadPoolExecutor(THREADS.value) as pool:
        list(pool.map(read, range(THREADS.value)))
    return everything


def read_with_package(directory: Path) -> Any:
    """Does what a plain loader does: numpy stacks the safetensors package's arrays as the table says."""
    from safetensors import safe_open

    from dsv3.checkpoint.layout import leaves, slices
    from dsv3.config.hugging_face import load_config

    cfg = load_config(directory)
    where = {}
    handles = [safe_open(path, "np") for path in files(directory)]
    for handle in handles:
        where |= dict.fromkeys(handle.keys(), handle)
    stacks = {}
    for path, spec in leaves(cfg).items():
        parts = {p.name: where[p.name].get_tensor(p.name) for p in slices(cfg)[path]}
        stack = np.empty(spec.shape, next(iter(parts.values())).dtype)
        for tensor_slice in slices(cfg)[path]:
            stack[tensor_slice.target] = parts[tensor_slice.name].reshape(tensor_slice.view)[tensor_slice.source]
        stacks[path] = stack
    return stacks


def io(field: str) -> int:
    """Bytes that this process asked for ("rchar"), or that the kernel fetched from storage for it ("read_bytes")."""
    return int(Path("/proc/self/io").read_text().split(f"{field}:")[1].split()[0])


def memory(field: str) -> int:
    """Returns a field of /proc/self/status in bytes."""
    return int(Path("/proc/self/status").read_text().split(field + ":")[1].split()[0]) * 1024


def report(results: dict[str, list[dict[str, float]]], how: str) -> None:
    """Prints one line per case: bytes, throughput, ratio to the raw read of the same checkpoint, memory."""
    rounds = len(next(iter(results.values())))
    rates = {case: [r["bytes"] / r["seconds"] / 1e9 for r in runs] for case, runs in results.items()}
    print(f"page cache dropped by {how}; {rounds} rounds; median (all ratios)")
    print(f"{'case':22}{'GB':>7}{'from disk':>11}{'GB/s':>7}{'of raw':>8}{'CPU s':>7}{'peak GB':>9}")
    for case, runs in results.items():
        bases = ["raw fp8", "raw fp8 O_DIRECT"] if "fp8" in case else ["raw", "raw O_DIRECT"]
        ratios = [rates[case][i] / max(rates[base][i] for base in bases) for i in range(rounds)]
        middle = {key: statistics.median(r[key] for r in runs) for key in runs[0]}
        print(
            f"{case:22}{middle['bytes'] / 1e9:7.2f}{middle['fetched'] / middle['bytes']:10.0%} "
            f"{statistics.median(rates[case]):7.2f}{statistics.median(ratios):8.0%}{middle['cpu']:7.2f}"
            f"{middle['peak'] / 1e9:9.2f}  ({', '.join(f'{r:.0%}' for r in ratios)})"
        )


if __name__ == "__main__":
    flags.run(main)
