"""The recorded plans of the published deployments are those of today's formulas, and err by what the plan states."""

import re

import pytest

from benchmarks import pages, plan_published, plan_transports
from benchmarks.plan_published import decode_step, low_latency_transfers
from benchmarks.record import rounded
from configs.deepseek_v3 import DEEPSEEK_V3
from configs.deployments import H800
from tools.plan import roofline
from tools.plan.deployment import kernel_rates


def test_the_errors_are_fresh_and_those_that_plans_state() -> None:
    [table, *_] = pages.result_of("plan_published")["tables"]
    found = list(plan_published.errors())
    assert [[rounded(cell) for cell in row] for row in found] == table["rows"]
    stated = [int(re.findall(r"([+-]?\d+) %", text)[-1]) for text in roofline.KNOWN_ERRORS]
    assert stated == [round(row[3]) for row in found[:4]]


def test_the_recorded_rates_are_those_of_one_plan() -> None:
    """The tables are recorded by commands of their own."""
    [_, rates, drafts] = pages.result_of("plan_published")["tables"]
    tables = pages.result_of("plan_transports")["tables"]
    [plans] = [table["rows"] for table in tables if table["columns"] == plan_transports.COLUMNS["plans"]]
    plain = {row[0]: row[6] for row in plans if row[2] == "auto"}
    assert rates["rows"][0][2] == pytest.approx(plain["decode_ep144"], rel=1e-3)
    assert rates["rows"][3][2] == pytest.approx(plain["prefill_ep32"], rel=1e-3)
    gains = [row[3] for row in drafts["rows"]]
    assert gains == sorted(gains) and gains[0] < 1 < gains[-1]


def test_decode_profile_of_deepseek() -> None:
    """EP128, 128 tokens a micro-batch, 4K: measured dispatch 187, experts 128, combine 394 us."""
    stages, _, _ = decode_step(128, 4096)
    dispatch, combine = low_latency_transfers(DEEPSEEK_V3, kernel_rates(H800, DEEPSEEK_V3), 128)
    assert [dispatch * 1e6, combine * 1e6] == pytest.approx([189, 382], abs=1)
    assert stages["experts"] * 1e6 == pytest.approx(106, abs=1)


def test_decode_fleet_of_deepseek() -> None:
    """One constant of the model is fitted to it."""
    _, layer, _ = decode_step(44, 4989)
    assert layer * 1e6 == pytest.approx(729, rel=0.02)
