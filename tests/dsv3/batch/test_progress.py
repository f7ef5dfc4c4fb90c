"""A batch's progress: a bar on a terminal, lines in a log."""

import io

from rich.console import Console

from dsv3.batch import progress as display
from dsv3.batch.run import BatchProgress


def shown(monkeypatch, *, terminal, interval=0.0):
    monkeypatch.setattr(display, "LOG_SECONDS", interval)
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120, color_system=None)
    with display.progress_display(console) as show:
        show(BatchProgress(total=40, resumed=10, succeeded=8, failed=2, output_tokens=600, seconds=2.0))
    return console.file.getvalue()


def test_a_terminal_gets_a_bar(monkeypatch):
    text = shown(monkeypatch, terminal=True)
    assert "20/40" in text and "300 tokens/s" in text and "2 failed" in text


def test_a_log_gets_a_line_per_interval(monkeypatch):
    assert shown(monkeypatch, terminal=False) == "20 of 40 lines, 2 failed, 300 tokens/s\n"
    assert shown(monkeypatch, terminal=False, interval=1e9) == ""
