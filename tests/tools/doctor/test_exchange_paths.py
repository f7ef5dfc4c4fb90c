"""XLA's ways to send rows in a node: what the compiler makes of their options, and what the check prints."""

import json

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels import aot
from sharding.collectives import Overlap, compiler_options
from sharding.mesh import DEVICES, rank_mesh
from tools.doctor import collectives, exchange_paths
from tools.doctor.rows import run_cases

TAKEN = {
    "nccl": "all-to-all",
    "one_shot_gather": '"kind":"__triton_collective"',
    "one_shot_scatter": '"kind":"__triton_collective"',
    "symmetric": ":S(7)}",  # the memory that NCCL may write in all devices
    "ragged": "ragged-all-to-all",
    "ragged_device": "ragged-all-to-all",
}


def compiled(name: str) -> str:
    way = exchange_paths.WAYS[name]
    mesh, kind = rank_mesh(aot.gpu_devices(8)), way.kinds[0]
    body = collectives.looped(mesh, [(kind, DEVICES)], 2, Overlap.NONE)
    dtype = np.float32 if kind == collectives.REDUCE_SCATTER else np.uint32
    sharding = NamedSharding(mesh, PartitionSpec(DEVICES))
    x = jax.ShapeDtypeStruct((8, 64, 1024), dtype, sharding=sharding)
    return jax.jit(body).lower(x).compile({**(compiler_options("cuda") or {}), **way.options}).as_text()


@pytest.mark.aot
@pytest.mark.parametrize("name", TAKEN)
def test_the_compiler_takes_the_options(name: str) -> None:
    assert TAKEN[name] in compiled(name)


@pytest.mark.aot
def test_this_xla_has_no_one_shot_all_to_all() -> None:
    """If this fails after an update of jax, the doctor measures it, and the docs may say so."""
    with pytest.raises(Exception, match=exchange_paths._ABSENT):
        compiled("one_shot")
    assert set(exchange_paths.WAYS) == {*TAKEN, "one_shot"}


def test_what_a_compiler_lacks_is_said_and_fails_nothing(capsys, monkeypatch) -> None:
    def refuse(*_):
        raise RuntimeError(f"INVALID_ARGUMENT: {exchange_paths._ABSENT}: COLLECTIVE_KERNEL_ALL_TO_ALL")

    monkeypatch.setattr(collectives.Wires, "row", refuse)
    assert run_cases(exchange_paths.cases("one_shot")) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["case"] for row in rows] == ["all_to_all, decode", "all_to_all, prefill"]
    assert {row["says"] for row in rows} == {"this version of XLA has no such kernel"}


def test_a_way_is_measured_with_exact_sums(capsys, monkeypatch) -> None:
    monkeypatch.setattr(collectives, "_SMALL_SIZES", {"decode": 8 << 10})
    monkeypatch.setattr(collectives, "_SMALL_COPY_BYTES", 1 << 20)
    monkeypatch.setattr(collectives, "_FEW_ROUNDS", 2)
    assert run_cases(exchange_paths.cases("nccl")) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["case"] for row in rows] == ["all_to_all, decode", "all_gather, decode", "reduce_scatter, decode"]
    assert all(row["passed"] and row["figures"]["us per round"] > 0 for row in rows)


def test_on_a_cpu_nothing_is_tried(capsys) -> None:
    assert exchange_paths.main(["ragged_device"]) == 2
    assert "there is 8 x cpu" in capsys.readouterr().err
