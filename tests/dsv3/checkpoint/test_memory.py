"""Host memory of loading: the finished arrays and the largest stack, never more."""

import json
import os
import subprocess
import sys

import pytest

from dsv3.checkpoint.load import plan_directory
from dsv3.checkpoint.reader import BLOCK_BYTES
from dsv3.config.hugging_face import load_config, to_hf
from tests.dsv3.checkpoint import hf

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# Each case runs in a process of its own, forked when everything is imported and before jax starts. VmHWM is the peak of
# the resident set since then; jax and a first array belong to the baseline.
#
# "load" is `load_params`. "spread" and "replicated" are as the engine places parameters: 32 experts as 40 replicas on 8
# devices, or the whole model on each device. A CPU's devices share the host's memory.
MEASURE = """
import dataclasses, json, os, pathlib, sys
import jax, jax.numpy as jnp, numpy
from dsv3.checkpoint import load_params
from dsv3.engine.expert_parallel import expert_parallel_functions
from dsv3.engine.functions import model_functions
from dsv3.engine.expert_parallel import Reading, load_replicated, load_spread
from dsv3.config.hugging_face import load_config
from sharding.mesh import rank_mesh, shardings

def status(field):
    return int(pathlib.Path("/proc/self/status").read_text().split(field + ":")[1].split()[0]) * 1024

def load(directory, dtype, fp8):
    cfg = load_config(directory)
    before = status("VmRSS")
    params = load_params(directory, cfg, dtype=dtype, fp8=fp8, progress=False, threads=4)
    return [status("VmHWM") - before, sum(a.nbytes for a in jax.tree.leaves(params))]

def serve(directory, how):
    cfg = dataclasses.replace(load_config(directory), num_nextn_predict_layers=0)
    mesh, read = rank_mesh(jax.devices()), Reading(jnp.bfloat16, "keep", False)
    functions = expert_parallel_functions(cfg, mesh, 8) if how == "spread" else model_functions()
    before = status("VmRSS")
    if how == "spread":
        served = load_spread(directory, cfg, functions.param_specs, mesh, 8, read)
    else:
        served = load_replicated(directory, cfg, functions.param_specs, mesh, read)
    served = jax.device_put(served, shardings(functions.param_specs, mesh))  # as the executor does
    shards = [shard.data for leaf in jax.tree.leaves(served) for shard in leaf.addressable_shards]
    held = {data.unsafe_buffer_pointer(): data.nbytes for data in shards}
    return [status("VmHWM") - before, sum(held.values()), max(held.values())]

root, cases = sys.argv[1], json.loads(sys.argv[2])
for name, *how in cases:
    if not os.fork():
        jax.block_until_ready(jax.device_put(numpy.zeros(8)))
        print(*(load if len(how) == 2 else serve)(pathlib.Path(root, name), *how), flush=True)
        os._exit(0)
    os.wait()
"""
LOADS = [
    ("bf16", "bfloat16", "keep"),
    ("bf16", "float32", "keep"),
    ("fp8", "bfloat16", "keep"),
    ("fp8", "bfloat16", "dequantize"),
]
SERVED = [("bf16", "spread"), ("fp8", "spread"), ("bf16", "replicated")]


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Two models of 120 MB, most of it experts: one of bfloat16, and one of twice as many in FP8."""
    root = tmp_path_factory.mktemp("memory")
    sizes = {"hidden_size": 512, "n_routed_experts": 32, "vocab_size": 2000}
    configs = hf.config(**sizes, moe_intermediate_size=384), hf.fp8_config(**sizes, moe_intermediate_size=768)
    for name, cfg in zip(("bf16", "fp8"), configs, strict=True):
        hf.write(root / name, hf.random_tensors(cfg), shards=4)
        (root / name / "config.json").write_text(json.dumps(to_hf(cfg)))
    return root


@pytest.fixture(scope="module")
def measured(directories) -> dict[tuple[str, ...], list[int]]:
    """What each case has printed."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, directories, json.dumps([*LOADS, *SERVED])],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=540,
    )
    lines = [list(map(int, line.split())) for line in done.stdout.splitlines()]
    return dict(zip((*LOADS, *SERVED), lines, strict=True))


@pytest.mark.parametrize(("name", "dtype", "fp8"), LOADS)
def test_peak_memory_is_the_result_and_one_stack(directories, measured, name, dtype, fp8):
    directory = directories / name
    plan = plan_directory(directory, load_config(directory), dtype, fp8)
    largest = max(array.nbytes for leaf in plan.leaves.values() for array in leaf)
    peak, final = measured[name, dtype, fp8]
    print(
        f"{name} to {dtype}, {fp8}: result {final / 1e6:.0f} MB, largest stack {largest / 1e6:.0f} MB, "
        f"peak above baseline {peak / 1e6:.0f} MB"
    )
    assert peak <= final + largest


@pytest.mark.parametrize(("name", "how"), SERVED)
def test_peak_memory_of_serving_is_the_shares_and_one_more(measured, name, how):
    """Above the shares there is scratch at most, and the engine's own placement of what was read copies nothing."""
    peak, final, largest = measured[name, how]
    print(
        f"{name}, {how}: shares {final / 1e6:.0f} MB, largest share {largest / 1e6:.0f} MB, "
        f"peak above baseline {peak / 1e6:.0f} MB"
    )
    assert peak <= final + largest + 8 * 2 * BLOCK_BYTES  # scratch and buffers of 8 threads
