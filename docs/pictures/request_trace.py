"""Draws the trace of a request through a router, a prefill and a decode instance of the bundled model.

  python -m docs.pictures.request_trace     writes docs/request_trace.svg

All three processes send their spans to a collector in this one, as they would to Jaeger. The picture has a row per
span, over the time since the router got the request.
"""

import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

import httpx

from benchmarks.instances import flags, free_port, is_healthy, key_file, running, serving
from benchmarks.record import ROOT
from tests.dsv3.server.collector import Collector, ReceivedSpan, in_order

PROMPT = "def quicksort(items):\n    " * 16
_COLORS = {"dsv3-router": "#c9a0dc", "prefill": "#f2c75c", "decode": "#6fa8dc"}
_ROW, _LEFT, _WIDTH, _RIGHT = 18, 300, 620, 80


def draw(spans: Sequence[ReceivedSpan]) -> str:
    """Returns a trace as SVG: a row per span, over time; events are ticks."""
    rows = list(in_order(spans))
    first, last = min(span.start for span in spans), max(span.stop for span in spans)
    width, height = _LEFT + _WIDTH + _RIGHT, _ROW * (len(rows) + 3)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12" fill="#202124">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for i, (name, color) in enumerate(_COLORS.items()):
        parts.append(f'<rect x="{_LEFT + 130 * i}" y="6" width="12" height="12" fill="{color}"/>')
        parts.append(f'<text x="{_LEFT + 130 * i + 17}" y="16">{name.removeprefix("dsv3-")}</text>')
    for tick in range(5):
        x, ms = _LEFT + _WIDTH * tick / 4, 1e3 * (last - first) * tick / 4
        parts.append(f'<line x1="{x:g}" y1="24" x2="{x:g}" y2="{height - _ROW}" stroke="#dadce0"/>')
        parts.append(f'<text x="{x:g}" y="{height - 4}" text-anchor="middle" fill="#5f6368">{ms:.0f} ms</text>')
    for row, (depth, span) in enumerate(rows):
        y, scale = 30 + _ROW * row, _WIDTH / (last - first)
        x, length = _LEFT + (span.start - first) * scale, max(1.0, (span.stop - span.start) * scale)
        color = _COLORS.get(span.process, "#bbb")
        parts.append(f'<text x="{8 + 14 * depth}" y="{y + 11}">{escape(_label(span))}</text>')
        parts.append(f'<rect x="{x:.1f}" y="{y}" width="{length:.1f}" height="13" rx="2" fill="{color}"/>')
        parts.append(f'<text x="{x + length + 4:.1f}" y="{y + 11}">{1e3 * (span.stop - span.start):.1f} ms</text>')
        for at in span.events.values():
            mark = _LEFT + (at - first) * scale
            ends = f'x1="{mark:.1f}" y1="{y - 2}" x2="{mark:.1f}" y2="{y + 15}"'
            parts.append(f'<line {ends} stroke="#c5221f" stroke-width="2"/>')
    return "\n".join([*parts, "</svg>", ""])


def _label(span: ReceivedSpan) -> str:
    """Returns a span's name, with the tokens that it has computed, or found by tier."""
    tokens = {name.split(".")[-1]: n for name, n in span.attributes.items() if name.startswith("dsv3.") and n}
    about = [f"{n} {name}" for name, n in tokens.items() if name in ("tokens", "device", "host", "store", "peer")]
    return f"{span.name} ({', '.join(about)})" if about else span.name


@contextlib.contextmanager
def fleet(endpoint: str) -> Iterator[str]:
    """Starts a router with a prefill and a decode instance, which send their spans to `endpoint`; yields its URL."""
    traces = f"--otlp_traces_endpoint={endpoint}"
    with contextlib.ExitStack() as stack:
        key = key_file(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        limits = ["--max_num_batched_tokens=64"]
        urls = [stack.enter_context(serving(*limits, *flags(role, key), traces)).url for role in ("prefill", "decode")]
        url = f"http://127.0.0.1:{(port := free_port())}"
        command = [sys.executable, "-m", "launch.router", f"--port={port}", f"--prefill={urls[0]}"]
        stack.enter_context(running([*command, f"--decode={urls[1]}", traces], lambda: is_healthy(url)))
        yield url


def main() -> None:
    """Draws the second of two requests; the first one opens the connections."""
    collector = Collector()
    with fleet(collector.url) as url:
        for i in range(2):
            collector.spans.clear()
            body = {"prompt": f"# {i}\n{PROMPT}", "max_tokens": 48, "stream": True, "temperature": 0}
            httpx.post(f"{url}/v1/completions", json=body, timeout=120).raise_for_status()
            spans = collector.trace(["relay", "llm_request", "llm_request"])
    (ROOT / "docs" / "request_trace.svg").write_text(draw(spans))
    collector.close()


if __name__ == "__main__":
    main()
