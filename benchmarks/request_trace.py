"""One request through a router, a prefill and a decode instance of the bundled model, as a picture of its trace.

  python -m benchmarks.request_trace [FILE.svg]

All three processes send their spans to a collector in this one, as they would to Jaeger. The picture has a row per
span, over the time since the router got the request; the table has the same spans.
"""

import argparse
import contextlib
import gzip
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

import httpx
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from benchmarks.instances import flags, free_port, is_healthy, key_file, running, serving
from benchmarks.record import Report, run

PROMPT = "def quicksort(items):\n    " * 16
_COLORS = {"dsv3-router": "#c9a0dc", "prefill": "#f2c75c", "decode": "#6fa8dc"}
_ROW, _LEFT, _WIDTH, _RIGHT = 18, 300, 620, 80


class ReceivedSpan(NamedTuple):
    """A span as the collector got it; times in seconds since 1970, events with theirs. `process` is its service."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start: float
    stop: float
    attributes: dict[str, Any]
    events: dict[str, float]
    process: str


class Collector:
    """An OTLP collector that keeps what it gets; `url` is where spans are sent."""

    def __init__(self) -> None:
        spans: list[ReceivedSpan] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
                spans.extend(read_spans(body) if self.path == "/v1/traces" else [])
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Says nothing."""

        self.spans = spans
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def hang(self) -> None:
        """Answers no more; connections are still opened."""
        self._server.shutdown()

    def close(self) -> None:
        """Ends the server."""
        self._server.shutdown()
        self._server.server_close()

    def trace(self, names: Sequence[str], trace_id: str | None = None, seconds: float = 30.0) -> list[ReceivedSpan]:
        """Waits for a trace, that of an id or any, that has a span for each of `names`; raises TimeoutError.

        A process sends the parts of a span before the span itself.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for known in {span.trace_id for span in self.spans} if trace_id is None else {trace_id}:
                mine = [span for span in self.spans if span.trace_id == known]
                if sorted(span.name for span in mine if span.name in names) == sorted(names):
                    return sorted(mine, key=lambda span: span.start)
            time.sleep(0.05)
        raise TimeoutError(f"no trace has the spans {names}: {sorted({span.name for span in self.spans})}")


def read_spans(body: bytes) -> Iterator[ReceivedSpan]:
    """Yields the spans of an OTLP request in protobuf."""
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        about = {each.key: _value(each.value) for each in resource.resource.attributes}
        service = about["service.name"]
        process = about.get("dsv3.role", service) if service == "dsv3" else service
        for span in (span for scope in resource.scope_spans for span in scope.spans):
            yield ReceivedSpan(
                span.name,
                span.trace_id.hex(),
                span.span_id.hex(),
                span.parent_span_id.hex(),
                span.start_time_unix_nano / 1e9,
                span.end_time_unix_nano / 1e9,
                {each.key: _value(each.value) for each in span.attributes},
                {event.name: event.time_unix_nano / 1e9 for event in span.events},
                process,
            )


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind or "")


def in_order(spans: Sequence[ReceivedSpan]) -> Iterator[tuple[int, ReceivedSpan]]:
    """Yields the spans of a trace below their parents, with their depth; a span without a parent in it is a root."""
    known = {span.span_id for span in spans}

    def below(parent: str, depth: int) -> Iterator[tuple[int, ReceivedSpan]]:
        for span in spans:
            if span.parent_id == parent or (not parent and span.parent_id not in known):
                yield depth, span
                yield from below(span.span_id, depth + 1)

    yield from below("", 0)


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
            parts.append(
                f'<line x1="{_LEFT + (at - first) * scale:.1f}" y1="{y - 2}" x2="{_LEFT + (at - first) * scale:.1f}" '
                f'y2="{y + 15}" stroke="#c5221f" stroke-width="2"/>'
            )
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


def main(report: Report) -> int:
    """Draws the second of two requests; the first one opens the connections."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", help="write the picture here")
    arguments = parser.parse_args()
    collector = Collector()
    with fleet(collector.url) as url:
        for i in range(2):
            collector.spans.clear()
            body = {"prompt": f"# {i}\n{PROMPT}", "max_tokens": 48, "stream": True, "temperature": 0}
            httpx.post(f"{url}/v1/completions", json=body, timeout=120).raise_for_status()
            spans = collector.trace(["relay", "llm_request", "llm_request"])
    if arguments.file:
        Path(arguments.file).write_text(draw(spans))
    rows = [[f"{'· ' * depth}{_label(span)}", span.process, 1e3 * (span.start - spans[0].start),
             1e3 * (span.stop - span.start)] for depth, span in in_order(spans)]  # fmt: skip
    report.table("One request", ["span", "process", "begins (ms)", "takes (ms)"], rows)
    collector.close()
    return 0


if __name__ == "__main__":
    run(main)
