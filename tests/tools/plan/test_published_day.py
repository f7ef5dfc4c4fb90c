"""The published day: with the nodes of its picture, with planned nodes, and with a plan's rates."""

import dataclasses
import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from tools.plan import published_day
from tools.plan.published_day import CHART, CONTEXT, LOADS, PUBLISHED, per_second, plan_day, size_instances

PREFILL, DECODE = published_day.PUBLISHED_RATES["fleet"]


def figures(prefill, decode, day=None) -> dict:
    return published_day.figures(day or size_instances(prefill, decode), prefill, decode, 70_272, 2.0)


CHARTED, PLANNED = figures(PREFILL, DECODE, CHART), figures(PREFILL, DECODE)


def test_the_published_day_with_the_nodes_of_the_picture() -> None:
    """226.75 nodes at the mean, 278 at the peak, $87,072, $562,027, 545 %, 73.7k and 14.8k tokens/s per node."""
    assert (CHARTED["nodes"], CHARTED["peak_nodes"]) == (226.75, 278)
    assert CHARTED["cost"] == pytest.approx(87_072)
    assert CHARTED["income"] == pytest.approx(562_027, rel=2e-4)
    assert CHARTED["margin"] == pytest.approx(5.45, rel=2e-3)
    assert CHARTED["input_per_node"] == pytest.approx(73_700, rel=3e-4)
    assert CHARTED["output_per_node"] == pytest.approx(14_800, rel=2e-3)
    prices = {"input": 0.0603, "computed": 0.138, "output": 0.300}
    assert {name: CHARTED["dollars_per_million"][name] for name in prices} == pytest.approx(prices, rel=2e-3)


def test_the_published_day_planned() -> None:
    """Whole instances need 4 % more nodes than published, fractions 0.05 %."""
    assert PLANNED["bare_nodes"] == pytest.approx(226.75, rel=1e-3)
    assert PLANNED["nodes"] == pytest.approx(226.75, rel=0.04)
    assert PLANNED["peak_nodes"] == pytest.approx(278, rel=0.015)
    assert [prefill for _, prefill, _ in size_instances(PREFILL, DECODE)[:2]] == [30, 23]


def test_batches_and_bytes_of_the_published_day() -> None:
    """88 requests per GPU; pages read for hits at 2.7 GiB/s per prefill node, the mean of 3FS's published picture."""
    assert DECODE.batch == pytest.approx(88, abs=0.2)
    assert CHARTED["requests_at_once"] == pytest.approx(9 * 12_700, rel=0.01)
    read = CHARTED["bytes_per_second"]["cached"] / CHARTED["nodes_of"]["prefill"]
    assert read / 2**30 == pytest.approx(2.7, abs=0.05)
    assert pytest.approx(CONTEXT) == published_day.PROMPT + published_day.ANSWER / 2
    assert sum(hours * load for (hours, _, _), load in zip(CHART, LOADS, strict=True)) == pytest.approx(24)


@pytest.mark.parametrize("rates", published_day.PUBLISHED_RATES)
def test_reports_show_every_figure(rates: str) -> None:
    planned = plan_day(*published_day.PUBLISHED_RATES[rates], 70_272, 2.0)
    assert json.loads(json.dumps(planned)) == planned
    assert planned["as_charted"] == CHARTED  # whatever the plan's instances are
    assert PUBLISHED.keys() <= planned["figures"].keys()
    odd = dataclasses.replace(DECODE, source="plan of [/odd] [red]name")
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(published_day.render(plan_day(PREFILL, odd, 70_272, 2.0)))
    assert "plan of [/odd] [red]name" in console.export_text()


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(1, 20), st.floats(1, 1e6), st.floats(1, 1e6))
def test_every_span_has_enough_instances_and_none_too_many(prefill_nodes, decode_nodes, computed, output) -> None:
    prefill = dataclasses.replace(PREFILL, nodes=prefill_nodes, tokens_per_node=computed)
    decode = dataclasses.replace(DECODE, nodes=decode_nodes, tokens_per_node=output)
    day = size_instances(prefill, decode)
    for (hours, *counts), load, charted in zip(day, LOADS, CHART, strict=True):
        assert hours == charted[0]
        for count, field, rate in zip(counts, ("computed", "output"), (prefill, decode), strict=True):
            asked = per_second(field) * load
            assert count * rate.tokens_per_second >= asked * (1 - 1e-6)
            assert count == 1 or (count - 1) * rate.tokens_per_second < asked
    found = figures(prefill, decode, day)
    assert found["bare_nodes"] <= found["nodes"] * (1 + 1e-6) and found["nodes"] <= found["peak_nodes"] * (1 + 1e-6)
    assert found["cost"] == pytest.approx(found["nodes"] * 8 * 24 * 2)


def written_plan(**changes) -> dict:
    """The fields of `launch.plan decode_ep144 --json` that a fleet's plan reads."""
    sizes = {"name": "mine", "nodes": 18, "gpus_per_node": 8, "prefill_tokens": 0, "decode_requests": 128}
    return {
        "model": "deepseek_v3",
        "deployment": sizes | {"tensor_parallel": 1, "context_length": 4989},
        "memory": {"tokens_left": 662_931, "token": 40_016},
        "steps": [{"phase": "decode", "tokens_per_node": 13_123.0}],
        "verdict": {"fits": True, "why": "fits"},
    } | changes


def test_an_instance_from_a_plan(tmp_path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(written_plan()))
    decode = published_day.read_rate("decode", path, "deepseek_v3")
    assert (decode.nodes, decode.tokens_per_node, decode.batch, decode.token_bytes) == (18, 13_123, 128, 40_016)
    assert decode.per_batch == pytest.approx(13_123 / 8 / 128)
    assert published_day.check_context(decode) == ()
    assert "--decode_plan" in published_day.check_context(dataclasses.replace(decode, context=2000))[0]
    with pytest.raises(published_day.RateError, match="decode_requests 100 and context_length 4989"):
        published_day.check_context(dataclasses.replace(decode, room=500_000))
    assert figures(PREFILL, decode)["nodes_of"]["decode"] > PLANNED["nodes_of"]["decode"]


def test_ranks_of_several_gpus_share_batch_and_cache(tmp_path) -> None:
    plan = written_plan()
    plan["deployment"] |= {"tensor_parallel": 4}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan))
    decode = published_day.read_rate("decode", path, "deepseek_v3")
    assert (decode.batch, decode.room, decode.tokens_per_node) == (32, 662_931 // 4, 13_123)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (written_plan(model="kimi_k2"), "is a plan of kimi_k2, not of --model deepseek_v3"),
        (written_plan(steps=[]), "has no decode step: its deployment needs decode_requests"),
        (written_plan(verdict={"fits": False, "why": "needs 146.9 GB"}), "needs 146.9 GB"),
        (written_plan(steps=[{"phase": "decode", "tokens_per_node": 0}]), "numbers that are not positive and finite"),
        (written_plan(memory={}), "not what launch.plan --json writes: KeyError 'tokens_left'"),
        ([], "not what launch.plan --json writes"),
    ],
)
def test_unusable_plans_are_refused(tmp_path, plan, message: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan))
    with pytest.raises(published_day.RateError) as raised:
        published_day.read_rate("decode", path, "deepseek_v3")
    assert message in str(raised.value) and str(path) in str(raised.value)
