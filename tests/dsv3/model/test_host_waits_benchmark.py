"""The GPU benchmark of loops that are not run, on a CPU: what it compares is the same computation."""

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu import host_waits


@pytest.mark.parametrize("kind", ["while_loop", "cond"])
def test_what_stands_between_products_changes_them_only_if_it_runs(kind: str) -> None:
    x, w = jnp.ones((2, 8)), jnp.eye(8)
    plain, idle, running = (
        np.asarray(host_waits.chain(x, w, jnp.int32(longest), kind=name, places=3))
        for name, longest in (("nothing", 0), (kind, 0), (kind, 1))
    )
    np.testing.assert_array_equal(idle, plain)
    assert (running > plain + 0.5).all()


def test_the_table_has_a_row_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in dict(PLACES=2, TOKENS=2, WIDTH=8, RUNS=1).items():
        monkeypatch.setattr(host_waits, name, value)
    rows = host_waits.table()[2:]
    assert [row.split("|")[1].strip() for row in rows] == list(host_waits.KINDS)


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["host_waits", "--out", "unused"])
    assert host_waits.main() == 2
    assert "needs a GPU" in capsys.readouterr().err
