"""The check of collectives passes what is right, whatever the mesh, and catches a device that gets something else."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from sharding import collectives as wire
from sharding.mesh import DEVICES
from tools.doctor import collectives
from tools.doctor.rows import run_cases

ROOT = Path(__file__).parents[3]
SMALL = {"decode": 8 << 10}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(collectives, "_SMALL_SIZES", SMALL)
    monkeypatch.setattr(collectives, "_SMALL_COPY_BYTES", 1 << 20)
    monkeypatch.setattr(collectives, "_FEW_ROUNDS", 3)


def run(capsys, kind: str) -> tuple[int, dict[str, dict]]:
    status = run_cases(collectives.Wires(quick=True).cases(kind))
    rows = map(json.loads, capsys.readouterr().out.splitlines())
    return status, {row["case"]: row for row in rows}


@pytest.mark.parametrize("kind", collectives.KINDS)
def test_right_results_pass(capsys, kind):
    status, rows = run(capsys, kind)
    assert status == 0, rows
    names = ["all: 8 devices", "node: 2 devices", "gpu and tensor: 4 devices", "tensor: 2 devices"]
    names = ["4 at once"] if kind == collectives.IN_FLIGHT else names
    assert list(rows) == [f"{name}, decode" for name in names]
    assert all(row["figures"]["share of the copy's rate"] > 0 for row in rows.values())


@pytest.mark.parametrize("kind", collectives.KINDS)
def test_one_value_that_is_wrong_in_one_round_on_one_device_is_found(capsys, monkeypatch, kind):
    """It is added to what a transfer along the axis `tensor` brings to device 5, wherever the round's values begin."""
    finish = wire.Transfer.finish

    def wrong(transfer: wire.Transfer) -> jax.Array:
        found = finish(transfer)
        mine = jax.lax.axis_index(DEVICES) == 5
        return found.at[0, 3].add((mine & (found[0, 0] % 3 == 1)).astype(found.dtype))

    monkeypatch.setattr(wire.Transfer, "finish", wrong)
    status, rows = run(capsys, kind)
    assert status == 1
    first = next(iter(rows.values()))
    assert not first["passed"] and "1 of" in first["says"] and "on devices 5" in first["says"]


@pytest.mark.parametrize(
    ("count", "names"),
    [
        (1, []),
        (2, ["all"]),
        (3, ["all"]),
        (4, ["all", "node", "gpu"]),
        (8, ["all", "node", "gpu and tensor", "tensor"]),
    ],
)
def test_each_group_of_devices_is_there_once(count, names):
    found = collectives.groups(collectives.machine_mesh(jax.devices()[:count]))
    assert list(found) == names


def test_what_numpy_expects_by_hand():
    mesh = collectives.machine_mesh(jax.devices()[:2])
    base = np.arange(8, dtype=np.float32).reshape(2, 2, 2)
    [axes] = collectives.groups(mesh).values()
    once = {kind: collectives.expected(mesh, kind, axes, base, 1) for kind in collectives.KINDS[:3]}
    assert once["all_to_all"].tolist() == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert once["all_gather"].tolist() == [[[0, 1], [2, 3], [4, 5], [6, 7]]] * 2
    assert once["reduce_scatter"].tolist() == [[[4, 6]], [[8, 10]]]
    twice = collectives.expected(mesh, "reduce_scatter", axes, base, 2)
    assert twice.tolist() == [[[10, 14]], [[18, 22]]]


def test_with_one_device_nothing_is_tried(capsys, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [object()])
    for arguments in (["--list"], ["all_to_all"]):
        assert collectives.main(arguments) == 2
        assert capsys.readouterr() == ("", "there is one device, so nothing is sent\n")


def test_on_a_cpu_the_command_makes_devices_of_its_own():
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tools.doctor.collectives", "--list"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == list(collectives.KINDS), done.stderr
