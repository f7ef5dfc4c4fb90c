"""Copies between host and devices are measured from both kinds of memory, and a changed value is found."""

import json

import jax
import numpy as np

from tools.doctor import host_copies


def test_both_kinds_of_memory_are_measured(capsys) -> None:
    assert host_copies.main(["--quick"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["case"] for row in rows] == ["pageable memory", "pinned memory"]
    assert all(rate > 0 for row in rows for rate in row["figures"].values())


def test_a_value_that_changes_on_its_way_is_found(monkeypatch) -> None:
    put = jax.device_put

    def wrong(x, to):
        return put(np.where(np.arange(len(x)) == 7, 1 - x, x) if to.device_set == {jax.devices()[3]} else x, to)

    monkeypatch.setattr(jax, "device_put", wrong)
    found = host_copies.measure(False, 64)
    assert not found.passed and found.says == "other values came back from " + str(jax.devices()[3])
