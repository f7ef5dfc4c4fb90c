"""The recorded plans with NVIDIA's library are those of today's figures and formulas, and reach their goals."""

from collections.abc import Iterable

import pytest

from benchmarks import pages, plan_transports
from benchmarks.plan_published import five_stage_layer
from benchmarks.record import Cell, rounded
from configs.deepseek_v3 import DEEPSEEK_V3
from configs.deployments import DECODE_EP144, H800
from tools.plan import nccl_ep, roofline
from tools.plan.deployment import PlannedBatch, kernel_rates

TITLES = ("figures", "bytes", "plans", "errors", "v4")


@pytest.fixture(scope="module")
def tables() -> dict[str, list[list[Cell]]]:
    recorded = pages.result_of("plan_transports")["tables"]
    assert [table["columns"] for table in recorded] == [plan_transports.COLUMNS[name] for name in TITLES]
    return {name: table["rows"] for name, table in zip(TITLES, recorded, strict=True)}


def cells(rows: Iterable[list[Cell]]) -> list[list[Cell]]:
    return [[rounded(cell) for cell in row] for row in rows]


def test_tables_that_need_no_compiler_are_fresh(tables) -> None:
    assert cells(plan_transports.figures()) == tables["figures"]
    assert cells(plan_transports.sent()) == tables["bytes"]


@pytest.mark.aot
def test_plans_of_deepseek_v4_are_fresh(tables) -> None:
    assert cells(plan_transports.v4()) == tables["v4"]


def test_the_plans_reach_the_published_rates(tables) -> None:
    found = {tuple(row[:3]): row for row in tables["plans"]}
    for unit, step in plan_transports.GOALS:
        before, after = (found[unit, step, transport] for transport in ("auto", "nccl_ep"))
        assert before[-1] < 1 < after[-1]
    unhidden = {(row[0], row[1]): row for row in tables["errors"]}
    assert unhidden["decode_ep144, decode", "1.5 times as long"][2] > 14_800


def test_the_decode_plan_is_the_published_pipeline(tables) -> None:
    """The recorded step is that of today's stages and transfers in five stages, but for the schedule's ends."""
    unit = plan_transports.with_library(DECODE_EP144)
    batch = PlannedBatch(unit.decode_requests // 2, unit.context_length, experts=2)
    stages = roofline.decode_stages(DEEPSEEK_V3, kernel_rates(H800, DEEPSEEK_V3), batch)
    found = nccl_ep.exchange(DEEPSEEK_V3, unit, batch.tokens)
    assert found is not None
    layer = five_stage_layer(stages, found.dispatch.seconds, found.combine.seconds)
    dense = 2 * 3 * (stages["project"] + stages["attention"] + stages["mlp"])
    step = 58 * layer + dense + stages["head"] + roofline.HOST_S
    [recorded] = [row for row in tables["plans"] if row[0] == "decode_ep144" and row[2] == "nccl_ep"]
    assert recorded[3] == pytest.approx(1e3 * step, rel=0.02)
