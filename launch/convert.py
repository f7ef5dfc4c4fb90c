"""Converts a checkpoint to DeepSeek's names and the layout that transformers reads.

    python -m launch.convert --model DeepSeek-V3 --output DeepSeek-V3-bf16 --fp8 dequantize

The output directory, with the tokenizer's files, appears when it is complete; after a kill run the same command again.
Needs memory for one layer of one weight.
"""

import sys
from pathlib import Path
from typing import Any

from absl import flags as absl_flags

from dsv3.checkpoint import CheckpointError, convert_checkpoint
from dsv3.config.hugging_face import ConfigError, load_config
from launch import flags

MODEL = absl_flags.DEFINE_string("model", None, "Read this checkpoint directory.")
OUTPUT = absl_flags.DEFINE_string("output", None, "Write to this directory, which must be absent or empty.")
FP8 = absl_flags.DEFINE_enum(
    "fp8",
    "keep",
    ["keep", "dequantize"],
    "Keep FP8 weights, and make FP8 with the same values of FP4 experts, or turn all into --dtype; kv_b_proj and wo_a "
    "are always dequantized.",
)
DTYPE = absl_flags.DEFINE_enum(
    "dtype",
    "auto",
    ["auto", "bfloat16", "float16", "float32"],
    "Write weights that are not FP8 in this type; auto is the embedding's. Routers may stay float32.",
)
SHARD_GB = absl_flags.DEFINE_float("shard_gb", 5.0, "Write safetensors files of at most this many 10^9 bytes.", 0.001)


def main() -> int:
    """Converts; returns 1 after a line on standard error if the checkpoint or the target is invalid."""
    if not MODEL.value or not OUTPUT.value:
        raise flags.UsageError("--model and --output are needed")
    source, target = Path(MODEL.value), Path(OUTPUT.value)
    dtype = None if DTYPE.value == "auto" else DTYPE.value
    options: dict[str, Any] = {"dtype": dtype, "fp8": FP8.value, "shard_bytes": int(SHARD_GB.value * 1e9)}
    try:
        convert_checkpoint(source, target, load_config(source), **options, progress=True)
    except (CheckpointError, ConfigError, OSError) as error:
        print(f"launch.convert: {error}", file=sys.stderr)
        return 1
    print(f"wrote {target}")
    return 0


if __name__ == "__main__":
    flags.run(main)
