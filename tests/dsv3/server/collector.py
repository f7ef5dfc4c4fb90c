"""A collector of traces: an OTLP server that keeps the spans it receives."""

import gzip
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue


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
