"""Chooses batch sizes, chunk size, drafts and kernels' plans by measurement, for `launch.serve --tuning FILE`.

    python -m launch.tune --output tuning.json
    python -m launch.tune --model /models/DeepSeek-V2-Lite --max_num_seqs 64 --output tuning.json

Give it the options that the server will have, on the machine that will serve, while nothing else runs there. The model
is loaded as for serving, by one process. docs/tuning.md explains what is measured.
"""

import sys
from pathlib import Path

from absl import flags as absl_flags

from dsv3.config.options import EngineOptions
from dsv3.config.server_options import ServiceOptions
from dsv3.logs import configure_logging
from launch import cli, flags
from launch.catalog import model_dir

_MODEL = absl_flags.DEFINE_string(
    "model", None, "Tune for this Hugging Face model directory; default: the bundled model."
)
_OUTPUT = absl_flags.DEFINE_string("output", "tuning.json", "Write to this file.")
_BUDGET = absl_flags.DEFINE_float(
    "budget_seconds", 900.0, "Begin no measurement after this many seconds; the last may take some longer.", 1.0
)
_PROMPTS = absl_flags.DEFINE_string(
    "prompts", None, "Choose drafts for the texts of this file, one per line; default: Python's standard library."
)
cli.define(EngineOptions)


def main() -> int:
    """Measures; returns 1 after a line on standard error for a model that cannot be served."""
    options = cli.read(EngineOptions)
    output = Path(_OUTPUT.value)
    if options.tuning is not None:
        raise flags.UsageError("--tuning: this command writes such a file; name it with --output")
    if output.is_dir() or not output.absolute().parent.is_dir():
        raise flags.UsageError(f"--output {output}: is not a file in a directory that exists")
    model = model_dir(ServiceOptions(model=_MODEL.value))
    configure_logging()
    from tools.tune.run import tune  # imports jax

    try:
        tune(model, options, output, _BUDGET.value, None if _PROMPTS.value is None else Path(_PROMPTS.value))
    except (ValueError, OSError) as error:
        print(f"launch.tune: {error}", file=sys.stderr)
        return 1
    print(f"wrote {output}; use it with python -m launch.serve --tuning {output}")
    return 0


if __name__ == "__main__":
    flags.run(main)
