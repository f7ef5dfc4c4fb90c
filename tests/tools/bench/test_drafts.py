"""Acceptance of drafts over a load, from the counters that servers export under vLLM's names."""

import pytest

from dsv3.server.answers.metrics import Metrics
from tools.bench.drafts import DraftCounts, parse, report


def vllm(*engines: tuple[int, int, int, list[int]]) -> str:
    """Metrics as vLLM writes them: one set of counters per engine."""
    lines = ["# TYPE vllm:spec_decode_num_drafts counter", "# TYPE python_info gauge", 'python_info{version="3"} 1.0']
    for number, (rows, tokens, accepted, at) in enumerate(engines):
        labels = f'engine="{number}",model_name="m"'
        lines += [
            f"vllm:spec_decode_num_drafts_total{{{labels}}} {rows}.0",
            f"vllm:spec_decode_num_drafts_created{{{labels}}} 1.7e9",
            f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} {tokens}.0",
            f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} {accepted}.0",
        ]
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        lines += [f'{name}{{{labels},position="{i}"}} {count}.0' for i, count in enumerate(at)]
    return "\n".join(lines) + "\n"


def test_counters_of_several_engines_are_added_up() -> None:
    assert parse(vllm((10, 20, 12, [8, 4]), (1, 2, 1, [1, 0]))) == DraftCounts(11, 22, 13, (9, 4))


def test_our_server_writes_what_is_read() -> None:
    metrics = Metrics("m")
    assert parse(metrics.text().decode()) is None
    metrics.update(
        {
            "draft_num_drafts": 10,
            "draft_num_draft_tokens": 20,
            "draft_num_accepted_tokens": 12,
            "draft_num_accepted_tokens_per_pos": [8, 4],
        }
    )
    assert parse(metrics.text().decode()) == DraftCounts(10, 20, 12, (8, 4))


def test_a_report_is_of_the_time_between() -> None:
    found = report(DraftCounts(10, 20, 12, (8, 4)), DraftCounts(110, 220, 152, (98, 54)))
    assert found == {
        "rows": 100,
        "draft_tokens": 200,
        "accepted_tokens": 140,
        "acceptance_rate": 0.7,
        "acceptance_length": 2.4,
        "acceptance_rate_per_position": [0.9, 0.5],
    }


def test_a_position_may_count_for_the_first_time() -> None:
    found = report(DraftCounts(0, 0, 0, ()), DraftCounts(4, 8, 3, (2, 1)))
    assert found is not None and found["acceptance_rate_per_position"] == [0.5, 0.25]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, DraftCounts(4, 8, 3, (2, 1))),
        (DraftCounts(4, 8, 3, (2, 1)), None),
        (DraftCounts(4, 8, 3, (2, 1)), DraftCounts(4, 8, 3, (2, 1))),
        (DraftCounts(40, 80, 30, (20, 10)), DraftCounts(4, 8, 3, (2, 1))),
    ],
    ids=["none before", "none after", "nothing drafted", "started anew"],
)
def test_no_acceptance_is_reported_rather_than_a_wrong_one(before, after) -> None:
    assert report(before, after) is None


@pytest.mark.parametrize("text", ["<html>", 'vllm:spec_decode_num_drafts_total{engine="0" 3\n'])
def test_text_of_another_kind_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        parse(text)
