"""Host memory of loading: the finished arrays and the largest stack, never more."""

import json
import os
import subprocess
import sys

import pytest

from dsv3.checkpoint import convert_to_stacked
from dsv3.checkpoint.fill import BLOCK_BYTES
from dsv3.checkpoint.load import plan_directory
from dsv3.hf_config import load_config, to_hf
from tests.dsv3.checkpoint import hf

# VmHWM is the peak of the resident set since the process began; jax and a first array belong to the baseline.
MEASURE = """
import pathlib, sys
import jax, numpy
from dsv3.checkpoint import load_params
from dsv3.hf_config import load_config

def status(field):
    return int(pathlib.Path("/proc/self/status").read_text().split(field + ":")[1].split()[0]) * 1024

directory, dtype, fp8 = sys.argv[1:]
cfg = load_config(directory)
jax.block_until_ready(jax.device_put(numpy.zeros(8)))
before = status("VmRSS")
params = load_params(directory, cfg, dtype=dtype, fp8=fp8, progress=False, threads=4)
print(status("VmHWM") - before, sum(a.nbytes for a in jax.tree.leaves(params)))
"""


# As the engine places them: 32 experts as 40 replicas on 8 devices, or the whole model on each device. A CPU's devices
# share the host's memory.
SERVE = """
import dataclasses, pathlib, sys
import jax, jax.numpy as jnp, numpy
from dsv3.engine.assemble.functions import expert_parallel_functions
from dsv3.engine.functions import model_functions
from dsv3.engine.assemble.weights import Reading, load_replicated, load_spread
from dsv3.hf_config import load_config
from sharding.mesh import rank_mesh, shardings

def status(field):
    return int(pathlib.Path("/proc/self/status").read_text().split(field + ":")[1].split()[0]) * 1024

directory, how = sys.argv[1:]
cfg = dataclasses.replace(load_config(directory), num_nextn_predict_layers=0)
mesh, read = rank_mesh(jax.devices()), Reading(jnp.bfloat16, "keep", False)
jax.block_until_ready(jax.device_put(numpy.zeros(8)))
functions = expert_parallel_functions(cfg, mesh, 8) if how == "spread" else model_functions()
before = status("VmRSS")
if how == "spread":
    served = load_spread(directory, cfg, functions.param_specs, mesh, 8, read)
else:
    served = load_replicated(directory, cfg, functions.param_specs, mesh, read)
served = jax.device_put(served, shardings(functions.param_specs, mesh))  # as the executor does
shards = [shard.data for leaf in jax.tree.leaves(served) for shard in leaf.addressable_shards]
held = {data.unsafe_buffer_pointer(): data.nbytes for data in shards}
print(status("VmHWM") - before, sum(held.values()), max(held.values()))
"""


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """310 MB of bfloat16, most of it experts, and the same model in FP8; the former also pre-stacked."""
    root = tmp_path_factory.mktemp("memory")
    sizes = {"hidden_size": 512, "moe_intermediate_size": 1024, "n_routed_experts": 32, "vocab_size": 2000}
    for name, cfg in (("bf16", hf.config(**sizes)), ("fp8", hf.fp8_config(**sizes))):
        hf.write(root / name, hf.random_tensors(cfg), shards=4)
        (root / name / "config.json").write_text(json.dumps(to_hf(cfg)))
    convert_to_stacked(root / "bf16", root / "stacked", load_config(root / "bf16"))
    return root


def measured(script, *arguments) -> list[int]:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        check=True,
    )
    return list(map(int, done.stdout.split()))


@pytest.mark.parametrize(
    ("name", "dtype", "fp8"),
    [
        ("bf16", "bfloat16", "keep"),
        ("bf16", "float32", "keep"),
        ("stacked", "bfloat16", "keep"),
        ("fp8", "bfloat16", "keep"),
        ("fp8", "bfloat16", "dequantize"),
    ],
)
def test_peak_memory_is_the_result_and_one_stack(directories, name, dtype, fp8):
    directory = directories / name
    plan = plan_directory(directory, load_config(directory), dtype, fp8)
    largest = max(array.nbytes for leaf in plan.leaves.values() for array in leaf)
    peak, final = measured(MEASURE, directory, dtype, fp8)
    print(
        f"{name} to {dtype}, {fp8}: result {final / 1e6:.0f} MB, largest stack {largest / 1e6:.0f} MB, "
        f"peak above baseline {peak / 1e6:.0f} MB"
    )
    assert peak <= final + largest


@pytest.mark.parametrize(
    ("name", "how"), [("bf16", "spread"), ("stacked", "spread"), ("fp8", "spread"), ("bf16", "replicated")]
)
def test_peak_memory_of_serving_is_the_shares_and_one_more(directories, name, how):
    """Above the shares there is scratch at most, and the engine's own placement of what was read copies nothing."""
    peak, final, largest = measured(SERVE, directories / name, how)
    print(
        f"{name}, {how}: shares {final / 1e6:.0f} MB, largest share {largest / 1e6:.0f} MB, "
        f"peak above baseline {peak / 1e6:.0f} MB"
    )
    assert peak <= final + largest + 8 * BLOCK_BYTES  # of 8 threads
