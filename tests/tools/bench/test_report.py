"""The tables of a report: every figure is in them, and so is what makes them doubtful."""

import io

import pytest
from rich.console import Console

from tools.bench.loops import LoopResult
from tools.bench.metrics import Limit, summarize
from tools.bench.report import notes, render
from tools.bench.stream import Arrival, Record

OPTIONS = {"model": "m", "url": "http://h", "concurrency": 4, "request_rate": None}


def record(index, **fields):
    arrivals = (Arrival(1.0, 1), Arrival(3.5, 1))
    defaults = {"prompt_tokens": 1500, "cached_tokens": 64, "output_tokens": 2, "arrivals": arrivals}
    return Record(index=index, scheduled_s=0.0, sent_s=0.0, finished_s=4.0, **(defaults | fields))


def report(*records, options=OPTIONS, cpu_s=0.1, interrupted=False):
    result = LoopResult(records, wall_s=1.0, cpu_s=cpu_s, interrupted=interrupted)
    return summarize(result, [Limit("ttft", 500)]) | {"options": options, "drafts": None}


def shown(found, width=80):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(render(found))
    return console.export_text()


def test_the_figures_are_shown_in_full_on_a_narrow_terminal():
    text = shown(report(record(0), record(1, error="timeout", detail="not finished 5 s after it was sent")))
    for figure in (
        "closed loop, 4 at a time",
        "1 / 1",
        "4.00 s",
        "1,500 (64)",
        "2,500",
        "1,000",
        "timeout",
        "0.0% of all",
    ):
        assert figure in text, figure
    assert "…" not in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"request_rate": 2.5, "concurrency": None}, "open loop, 2.5 requests/s"),
        ({"request_rate": "inf", "concurrency": 8}, "open loop, inf requests/s, at most 8 at a time"),
    ],
)
def test_the_kind_of_load_is_named(options, words):
    assert words in shown(report(record(0), options=OPTIONS | options))


def test_doubts_are_named():
    assert notes(report(record(0))) == []
    assert "interrupted" in notes(report(record(0), interrupted=True))[0]
    assert "no token counts" in notes(report(record(0, output_tokens=None)))[0]
    assert "per chunk" in notes(report(record(0, arrivals=(Arrival(1.0, None),))))[0]
    assert "93%" in notes(report(record(0), cpu_s=0.93))[0]


def test_a_report_without_a_completed_request_is_shown():
    text = shown(report(record(0, error="connect", arrivals=(), output_tokens=None)))
    assert "0 / 1" in text and "connect" in text
