"""Copies between host and devices are measured from both kinds of memory, and a changed value is found."""

import jax
import numpy as np

from tools.doctor import host_copies


def test_both_kinds_of_memory_are_measured() -> None:
    for pinned in (False, True):
        found = host_copies.measure(pinned, 64)
        assert found.passed and found.case == ("pinned memory" if pinned else "pageable memory")
        assert all(rate > 0 for rate in found.figures.values())


def test_on_a_cpu_nothing_is_tried(capsys) -> None:
    assert host_copies.main() == 2
    assert "in host memory" in capsys.readouterr().err


def test_a_value_that_changes_on_its_way_is_found(monkeypatch) -> None:
    put = jax.device_put

    def wrong(x, to):
        return put(np.where(np.arange(len(x)) == 7, 1 - x, x) if to.device_set == {jax.devices()[3]} else x, to)

    monkeypatch.setattr(jax, "device_put", wrong)
    found = host_copies.measure(False, 64)
    assert not found.passed and found.says == "other values came back from " + str(jax.devices()[3])
