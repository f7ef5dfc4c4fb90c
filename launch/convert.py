"""Converts a checkpoint directory from the Hugging Face form to the pre-stacked form, or back.

    python -m launch.convert --model DeepSeek-V3 --output DeepSeek-V3-stacked
    python -m launch.convert --model DeepSeek-V3-stacked --output DeepSeek-V3-bf16 --to hf --fp8 dequantize

The pre-stacked form has checksums and needs no reassembly. The output directory appears whole, with the tokenizer's
files. After a kill the same command continues (`--to stacked`) or starts again (`--to hf`). Memory holds 256 MiB
(`--to stacked`) or one layer of one weight (`--to hf`) at a time.
"""

import sys
from pathlib import Path
from typing import Any

from absl import flags as absl_flags

from dsv3.checkpoint import CheckpointError, convert_to_hf, convert_to_stacked
from dsv3.config.hugging_face import ConfigError, load_config
from launch import flags

MODEL = absl_flags.DEFINE_string("model", None, "Read this checkpoint directory, of either form.")
OUTPUT = absl_flags.DEFINE_string("output", None, "Write to this directory, which must be absent or empty.")
TO = absl_flags.DEFINE_enum("to", "stacked", ["stacked", "hf"], "Write this form.")
FP8 = absl_flags.DEFINE_enum(
    "fp8",
    "keep",
    ["keep", "dequantize"],
    "Keep FP8 weights as FP8, or turn them into --dtype; kv_b_proj is always dequantized.",
)
DTYPE = absl_flags.DEFINE_enum(
    "dtype",
    "auto",
    ["auto", "bfloat16", "float16", "float32"],
    "Write weights that are not FP8 in this type; auto is the embedding's. Routers may stay float32.",
)
SHARD_GB = absl_flags.DEFINE_float(
    "shard_gb", 5.0, "Write safetensors files of at most this many 10^9 bytes (--to=hf).", 0.001
)


def main() -> int:
    """Converts; returns 1 after one line on standard error if the checkpoint or the target is at fault."""
    if not MODEL.value or not OUTPUT.value:
        raise flags.UsageError("--model and --output are needed")
    source, target = Path(MODEL.value), Path(OUTPUT.value)
    dtype = None if DTYPE.value == "auto" else DTYPE.value
    options: dict[str, Any] = {"dtype": dtype, "fp8": FP8.value, "progress": True}
    try:
        if TO.value == "hf":
            convert_to_hf(source, target, load_config(source), shard_bytes=int(SHARD_GB.value * 1e9), **options)
        else:
            convert_to_stacked(source, target, load_config(source), **options)
    except (CheckpointError, ConfigError, OSError) as error:
        print(f"launch.convert: {error}", file=sys.stderr)
        return 1
    print(f"wrote {target}")
    return 0


if __name__ == "__main__":
    flags.run(main)
