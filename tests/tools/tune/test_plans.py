"""Kernels are timed under their legal plans, and a faster one is used if its results are right."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import invariance, native, tuned
from pallas_kernels.backend import Backend
from pallas_kernels.checks import arrays
from pallas_kernels.dense import layer_gemm, plain_gemm
from pallas_kernels.gemm.plan import plan_contiguous, plan_dense
from pallas_kernels.gpus import by_number
from pallas_kernels.triton.tiles import product_tile, product_tiles
from tools.tune import plans


@pytest.fixture(autouse=True)
def _no_plans_later():
    yield
    tuned.set_plans({})


def play_timer(monkeypatch, seconds) -> list[dict[str, str]]:
    """Traces what would be timed; `seconds` of the number of tried plans is its time. Returns the table of each."""
    tried: list[dict[str, str]] = []

    def timer(call, operands, roof):
        jax.eval_shape(call, operands, 0)
        tried.append(tuned.plans())
        found = seconds(len(tried) - 1)
        return lambda: found

    monkeypatch.setattr(plans, "timer", timer)
    return tried


@pytest.mark.skipif(not native.library().targets, reason=native.library().reason)
def test_a_cpu_chooses_between_its_own_products_and_those_of_xla(monkeypatch) -> None:
    def program(x, w):
        return layer_gemm(x, w, 0), plain_gemm(x[:2], w[0])

    x, w = jnp.ones((40, 16)), jnp.ones((3, 8, 16))
    with tuned.recording() as found:
        jax.eval_shape(program, x, w)
    stack, alone = found.values()
    assert (stack.shape, stack.default) == ((40, 8, 16, "float32", "of a stack"), "XLA")
    assert (alone.shape, alone.default) == ((2, 8, 16, "float32", "alone"), "C++")
    tried = play_timer(monkeypatch, lambda i: (2.0, 1.0)[i % 2])
    chosen, outcomes, untried = plans.tune_plans([stack, alone], lambda: 1.0)
    assert chosen == {stack.name: "C++", alone.name: "XLA"} and untried == 0
    assert [each[stack.name] for each in tried[:2]] == ["XLA", "C++"] and tuned.plans() == {}
    assert [each.gain for each in outcomes] == [2.0, 2.0]

    tuned.set_plans(chosen)
    assert jax.jit(program).lower(x, w).as_text().count("LayerProduct") == 1
    with invariance.batch_invariant():
        assert jax.jit(program).lower(x, w).as_text().count("LayerProduct") == 2
    assert jnp.allclose(program(x, w)[0], x @ w[0].T)


def test_results_that_are_wrong_are_not_used_and_a_budget_ends_the_measurements(monkeypatch) -> None:
    choice = tuned.PlanChoice(native.PRODUCT, (2, 8, 16, "float32", "of a stack"), "C++", ("C++", "XLA"))
    play_timer(monkeypatch, lambda i: 1.0 / (i + 1))
    monkeypatch.setattr(plans.checks, "check", lambda *_: SimpleNamespace(passed=False))
    left = iter([1.0, 0.0])
    found, outcomes, untried = plans.tune_plans([choice, choice], lambda: next(left))
    assert (found, [each.chosen for each in outcomes], untried) == ({}, ["C++"], 1)


def test_hopper_products_are_traced_under_each_plan_and_with_their_multiprocessors(monkeypatch) -> None:
    monkeypatch.setattr(arrays, "STACK_BYTES", 1)
    monkeypatch.setattr(plans, "_MOST_PLANS", 2)
    monkeypatch.setattr(plans, "resolve_backend", lambda: Backend.MOSAIC)
    monkeypatch.setattr(plans.checks, "check", lambda *_: SimpleNamespace(passed=True))
    with tuned.recording() as found:
        plan_dense(16, 64, 128, 2, num_sms=108)
        plan_contiguous(256, 128, 64, 128, 2)
    play_timer(monkeypatch, lambda i: 1.0 / (i + 1))
    chosen, _, _ = plans.tune_plans(found.values(), lambda: 1.0)
    assert [*chosen] == [*found]
    tuned.set_plans(chosen)
    dense, grouped = found.values()
    assert str(plan_dense(16, 64, 128, 2, num_sms=108)) == chosen[dense.name] != str(dense.default)
    assert str(plan_contiguous(256, 128, 64, 128, 2)) == chosen[grouped.name] != str(grouped.default)
    assert plan_dense(16, 64, 128, 2) == plan_dense(16, 64, 128, 2)  # on all multiprocessors: not measured
    tuned.set_plans({dense.name: "TilePlan(wide=True, tile_m=7)"})
    assert plan_dense(16, 64, 128, 2, num_sms=108) == dense.default  # no legal plan


def test_triton_tiles_begin_with_the_table_and_fit_the_shared_memory() -> None:
    for number in (80, 89, 100):
        gpu = by_number(number)
        tiles = list(product_tiles(gpu, 64, 1))
        assert tiles[0] == product_tile(gpu, 64, 1) and len({*tiles}) == len(tiles) > 2
        assert all((t.rows + t.columns) * t.depth * t.stages <= gpu.shared_memory for t in tiles)
