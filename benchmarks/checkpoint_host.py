"""Time that a load takes apart from reading weights: DeepSeek-V3's headers and its plan.

    python -m benchmarks.checkpoint_host --rounds=5

The checkpoint has DeepSeek-V3's 92,000 tensors in 163 files with real headers and holes instead of weights, so it takes
a few MB of disk. Each round reads all headers, plans the whole load with the garbage collector paused (as `load_params`
does) and running, and plans the experts of 288 replicas and of the 16 that 8 of 144 devices hold. It names the weights
by their content, as processes do that must have the same. All figures are medians over the rounds.
"""

import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from absl import flags as absl_flags

from configs.deepseek_v3 import DEEPSEEK_V3 as MODEL
from dsv3.checkpoint.hugging_face import F32, plan_hf
from dsv3.checkpoint.identity import weights_identity
from dsv3.checkpoint.layout import leaves
from dsv3.checkpoint.load_plan import with_replicas
from dsv3.checkpoint.safetensors_file import INDEX, header_bytes, read_directory
from dsv3.checkpoint.writer import out_tensors
from launch import flags
from pallas_kernels.float8 import E4M3

ROUNDS = absl_flags.DEFINE_integer("rounds", 5, "How often each is measured.", 1)

FILES = 163
BF16 = np.dtype(ml_dtypes.bfloat16)
SPECS = leaves(MODEL)


class Shapes:
    """Stacks that have dtypes and no values (`writer.Stacks`)."""

    def dtypes(self, path: str) -> tuple[np.dtype, ...]:
        """Dtypes of a leaf's arrays in the published checkpoint."""
        return (E4M3, F32) if SPECS[path].quantizable else (BF16,)

    def rows(self, path: str, part: int, rows: slice) -> np.ndarray:
        """Not available."""
        raise NotImplementedError(path)


def make(directory: Path) -> int:
    """Writes the files and their index; returns the number of tensors."""
    tensors = list(out_tensors(MODEL, Shapes(), F32))
    weight_map: dict[str, str] = {}
    for i in range(FILES):
        mine, name = tensors[i::FILES], f"model-{i + 1:05}-of-{FILES:05}.safetensors"
        header = header_bytes([(t.name, t.dtype, t.shape) for t in mine], {"format": "pt"})
        with (directory / name).open("wb") as file:
            file.write(header)
            file.truncate(len(header) + sum(t.nbytes for t in mine))
        weight_map |= {t.name: name for t in mine}
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return len(tensors)


def seconds(work: Callable[[], Any], *, collect: bool = False) -> tuple[float, Any]:
    """Elapsed seconds and the result of `work`, with the garbage collector running or paused."""
    gc.collect()
    if not collect:
        gc.disable()
    start = time.perf_counter()
    result = work()
    elapsed = time.perf_counter() - start
    gc.enable()
    return elapsed, result


def one_round(directory: Path) -> dict[str, float]:
    """Seconds of each part."""
    phy2log = np.arange(288) % MODEL.n_routed_experts * np.ones((MODEL.num_moe_layers, 1), int)
    result = {}
    result["headers of all files"], tensors = seconds(lambda: read_directory(directory))

    def plan() -> Any:
        return plan_hf(directory, tensors, MODEL, None, "keep")

    result["plan, collector running"], _ = seconds(plan, collect=True)
    result["plan"], planned = seconds(plan)
    result["16 replicas, as on 8 of 144 devices"], _ = seconds(
        lambda: with_replicas(planned, MODEL, phy2log[:, :16], {})
    )
    result["288 replicas"], _ = seconds(lambda: with_replicas(planned, MODEL, phy2log, {}))
    before = time.process_time()
    result["weights named by their content"], _ = seconds(lambda: weights_identity(directory))
    result["the same, processor time"] = time.process_time() - before
    return result


def main() -> int:
    """Prints one line per part."""
    with tempfile.TemporaryDirectory() as name:
        count = make(Path(name))
        rounds = [one_round(Path(name)) for _ in range(ROUNDS.value)]
    print(f"{count:,} tensors in {FILES} files; median of {ROUNDS.value} rounds")
    for what in rounds[0]:
        print(f"{what:40}{statistics.median(r[what] for r in rounds) * 1e3:10,.2f} ms")
    return 0


if __name__ == "__main__":
    flags.run(main)
