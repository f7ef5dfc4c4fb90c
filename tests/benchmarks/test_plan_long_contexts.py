"""The recorded plans of long contexts have today's memory, and reach their goal; the command runs at toy size."""

import dataclasses
import sys

import pytest

from benchmarks import pages, plan_long_contexts
from benchmarks.record import Cell, Report, rounded
from configs.deepseek_v3 import DEEPSEEK_V3

GOAL = 2.0
"""Times the tokens per second of replicated pages, at 128K."""


@pytest.fixture(scope="module")
def recorded() -> dict[str, list[list[Cell]]]:
    tables = pages.result_of("plan_long_contexts")["tables"]
    assert {tuple(table["columns"]) for table in tables} == {tuple(plan_long_contexts.COLUMNS)}
    return dict(zip(plan_long_contexts.MODELS, (table["rows"] for table in tables), strict=True))


@pytest.mark.aot
def test_memory_is_todays(recorded: dict[str, list[list[Cell]]]) -> None:
    for model, rows in recorded.items():
        for context, cache, name, token, longest, requests, *_ in rows:
            given = plan_long_contexts.MODELS[model], name, cache, plan_long_contexts.CONTEXTS[context]
            memory, of_rank = plan_long_contexts.fitting(*given)
            ranks = 8 // plan_long_contexts.LAYOUTS[name][0]
            assert [rounded(each) for each in (memory.token, memory.tokens_left, ranks * of_rank)] == [
                token, longest, requests
            ]  # fmt: skip


def test_divided_pages_reach_the_goal(recorded: dict[str, list[list[Cell]]]) -> None:
    for model, rows in recorded.items():
        found = {tuple(row[:3]): row[3:] for row in rows}
        for cache in {cache for _, cache, _ in found}:
            assert found["128K", cache, "pages divided"][-1] > GOAL
            each = found["128K", cache, "pages divided"][0], found["128K", cache, "tensor parallel"][0]
            assert 0 <= 8 * each[0] - each[1] < 8, "bytes are rounded up"
            if model != "DeepSeek-V4-Flash":  # a device holds its weights and a request
                assert found["1M", cache, "8 ranks"][2] == 0 < found["1M", cache, "pages divided"][2]


@pytest.mark.aot
def test_the_command_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer."""
    changes = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "n_routed_experts": 16}
    monkeypatch.setattr(plan_long_contexts, "MODELS", {"small": dataclasses.replace(DEEPSEEK_V3, **changes)})
    small = {"CONTEXTS": {"64M": 2**26}, "CACHES": ("fp8",), "LAYOUTS": {"pages divided": (8, 8)}}
    for name, value in small.items():
        monkeypatch.setattr(plan_long_contexts, name, value)
    monkeypatch.setattr(sys, "argv", ["plan_long_contexts"])
    report = Report()
    plan_long_contexts.main(report)
    [table] = report.tables
    assert len(table.rows) == 1 and table.rows[0][-2]
