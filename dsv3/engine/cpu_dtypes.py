"""What `--dtype=auto` is on a CPU, by the table of `benchmarks/cpu_dtypes.py` in benchmarks/README.md.

bfloat16 was faster than float32 at each size, number of rows and length of prompt, where the CPU multiplies it and the
C++ kernels are there. It rounds, so a model whose step is short in either type stays float32.
"""

from dsv3.config.model import ModelConfig
from dsv3.engine.size import count_parameters, short
from pallas_kernels import native

EXACT_PARAMETERS = 16 * 2**20
"""Up to so many parameters per token (64 MiB in float32) a step takes few milliseconds, and exactness is worth more."""


def fastest(model: ModelConfig, stored: str | None) -> tuple[str, str]:
    """Returns the type for a checkpoint of the type `stored` on this machine's CPU, and why."""
    if stored != "bfloat16":
        return "float32", f"bfloat16 would round a checkpoint of {stored or 'no stated type'}"
    if model.int4_experts:
        return "float32", "INT4 experts were not measured in bfloat16 on a CPU"
    active = count_parameters(model)[1]
    if active <= EXACT_PARAMETERS:
        return "float32", f"{short(active)} parameters per token are few"
    if not native.library().multiplies_bfloat16:
        return "float32", "no kernel multiplies bfloat16 as it is on this CPU"
    return "bfloat16", "this CPU multiplies it and reads half the bytes"
