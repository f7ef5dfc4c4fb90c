"""Weights loaded to the devices that serve them: as if spread in memory, never copied, by one process or several."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv3.checkpoint import load_params
from dsv3.config.hugging_face import to_hf
from dsv3.engine.expert_parallel import Reading, expert_parallel_functions, load_replicated, load_spread
from dsv3.engine.functions import model_functions
from sharding.mesh import rank_mesh, shardings
from tests.dsv3.checkpoint import hf
from tests.dsv3.engine.spread import spread_experts

READ = Reading(jnp.bfloat16, "keep", progress=False)
CFG = hf.fp8_config(n_routed_experts=6, num_nextn_predict_layers=0)
SPLITTABLE = dataclasses.replace(CFG, num_attention_heads=4, qk_nope_head_dim=92, v_head_dim=64, intermediate_size=512)
SPLITTABLE = dataclasses.replace(SPLITTABLE, moe_intermediate_size=256)


def arrays(tree) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def write(directory: Path, cfg) -> Path:
    hf.write(directory, hf.random_tensors(cfg), shards=3)
    (directory / "config.json").write_text(json.dumps(to_hf(cfg)))
    return directory


def placed(leaf) -> tuple:
    return leaf.shape, np.dtype(leaf.dtype), leaf.sharding


@pytest.mark.parametrize(("ranks", "tensor", "redundant"), [(2, 1, 0), (8, 1, 10), (4, 2, 2)])
def test_reading_replicas_gives_what_spreading_in_memory_gives(tmp_path, ranks, tensor, redundant):
    cfg = CFG if tensor == 1 else SPLITTABLE
    mesh = rank_mesh(jax.devices()[: ranks * tensor], tensor_parallel_size=tensor)
    functions = expert_parallel_functions(cfg, mesh, redundant)
    directory = write(tmp_path, cfg)
    served = load_spread(directory, cfg, functions.param_specs, mesh, redundant, READ)
    shapes = load_spread(directory, cfg, functions.param_specs, mesh, redundant, dataclasses.replace(READ, shapes=True))
    assert jax.tree.map(placed, shapes) == jax.tree.map(placed, served)
    plain = load_params(directory, cfg, dtype=jnp.bfloat16, progress=False)
    want = spread_experts(plain, cfg, mesh, redundant)
    assert jax.tree.structure(served) == jax.tree.structure(want)
    for got, wanted in zip(arrays(served), arrays(want), strict=True):
        assert got.dtype == wanted.dtype
        np.testing.assert_array_equal(got.view(np.uint8), wanted.view(np.uint8))


@pytest.mark.parametrize("how", ["spread", "replicated"])
def test_the_executors_placement_copies_nothing(tmp_path, how):
    mesh = rank_mesh(jax.devices()[:4])
    directory = write(tmp_path, CFG)
    if how == "spread":
        specs = expert_parallel_functions(CFG, mesh, 2).param_specs
        served = load_spread(directory, CFG, specs, mesh, 2, READ)
    else:
        specs = model_functions().param_specs
        served = load_replicated(directory, CFG, specs, mesh, READ)
    placed = jax.device_put(served, shardings(specs, mesh))
    for before, after in zip(jax.tree.leaves(served), jax.tree.leaves(placed), strict=True):
        assert addresses(before) == addresses(after)


def addresses(array: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


# One of two processes of four devices each: what it read and what its shards hold, for each directory.
PROCESS = """
import json, pathlib, sys, zlib
import jax, jax.numpy as jnp, numpy
from dsv3.engine.expert_parallel import expert_parallel_functions
from dsv3.engine.expert_parallel import Reading, load_spread
from dsv3.config.hugging_face import load_config
from sharding.mesh import rank_mesh

coordinator, process, *directories = sys.argv[1:]
jax.distributed.initialize(coordinator, 2, int(process))
cfg, mesh = load_config(directories[0]), rank_mesh(jax.devices(), num_nodes=2)
specs = expert_parallel_functions(cfg, mesh, 2).param_specs

def bytes_read():
    return int(pathlib.Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])

def load(directory):
    before = bytes_read()
    served = load_spread(directory, cfg, specs, mesh, 2, Reading(jnp.bfloat16, "keep", False))
    read = bytes_read() - before
    shards = [
        [zlib.crc32(numpy.asarray(shard.data).tobytes()) for shard in leaf.addressable_shards]
        for leaf in jax.tree.leaves(served)
    ]
    return {"read": read, "shards": shards}

print(json.dumps([load(directory) for directory in directories]))
"""


def two_processes(*directories: Path) -> list[list[dict]]:
    """Returns the output of each process for each directory."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    command = [sys.executable, "-c", PROCESS, f"127.0.0.1:{port}"]
    processes = [
        subprocess.Popen([*command, str(i), *directories], env=environment, stdout=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    try:
        return [json.loads(process.communicate(timeout=120)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_each_of_two_processes_reads_what_its_devices_hold(tmp_path):
    """Six experts as eight replicas on eight devices: a process reads four replicas, and once what all devices hold."""
    cfg = dataclasses.replace(CFG, moe_intermediate_size=512, hidden_size=512)
    write(tmp_path / "hf", cfg)
    results = two_processes(tmp_path / "hf")

    mesh = rank_mesh(jax.devices(), num_nodes=2)
    specs = expert_parallel_functions(cfg, mesh, 2).param_specs
    want = load_spread(tmp_path / "hf", cfg, specs, mesh, 2, READ)
    crcs = [
        [zlib.crc32(np.asarray(shard.data).tobytes()) for shard in leaf.addressable_shards]
        for leaf in jax.tree.leaves(want)
    ]
    moe = want.params.moe.moe
    experts = sum(leaf.nbytes for leaf in jax.tree.leaves((moe.gate_up, moe.down)))
    rest = sum(leaf.nbytes for leaf in jax.tree.leaves(want.params)) - experts
    for first, second in zip(*results, strict=True):
        assert [a + b for a, b in zip(first["shards"], second["shards"], strict=True)] == crcs
        for process in (first, second):
            assert experts / 2 <= process["read"] < experts / 2 + rest + 300_000
