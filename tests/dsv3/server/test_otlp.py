"""Traces on their way to a collector: what OpenTelemetry's own decoder reads of them, and collectors that fail."""

import contextlib
import gzip
import logging
import queue
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from dsv3.server import otlp
from dsv3.server.otlp import Span, TraceContext, TraceSender, encode_head, encode_trace
from dsv3.server.tracing import Tracer, make_tracer
from tests.dsv3.server.collector import in_order, read_spans

HEAD = encode_head({"service.name": "dsv3", "dsv3.role": "both"}, "dsv3")
CONTEXT = TraceContext(b"t" * 16, b"s" * 8, b"p" * 8, 1, "vendor=x")
VALUES = st.one_of(st.text(max_size=300), st.integers(-(2**63), 2**63 - 1), st.booleans(),
                   st.floats(allow_nan=False), st.lists(st.text(max_size=9), max_size=3))  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(st.text(max_size=200), VALUES, max_size=9), st.lists(st.text(max_size=5), max_size=3))
def test_a_trace_is_what_opentelemetry_reads(attributes, names) -> None:
    parts = tuple(Span(name, 1.5, 1.25, children=(Span("below", 1, 2),)) for name in names)
    whole = Span("request", 1.0, 3.0, attributes, (("first", 2.0),), parts)
    encoded = encode_trace(whole, CONTEXT, 10**18, "status 500")
    body = HEAD(len(encoded)) + encoded
    (depth, root), *rows = in_order(list(read_spans(body)))
    assert (depth, root.trace_id, root.span_id, root.parent_id) == (0, *(part.hex() for part in CONTEXT[:3]))
    assert root.attributes == attributes and root.events == {"first": 1e9 + 2} and root.process == "both"
    assert [(depth, span.name) for depth, span in rows] == [
        each for name in names for each in ((1, name), (2, "below"))
    ]
    assert all(span.start == span.stop for _, span in rows if span.name in names)  # never ends before it begins
    [scope] = ExportTraceServiceRequest.FromString(body).resource_spans[0].scope_spans
    spans = scope.spans
    assert len({span.span_id for span in spans}) == len(spans) and {span.trace_state for span in spans} == {"vendor=x"}
    first = (spans[0].kind, spans[0].flags, spans[0].status.code, spans[0].status.message)
    assert first == (2, 0x301, 2, "status 500") and {span.flags for span in spans[1:]} <= {0x101}
    alone = encode_trace(whole, TraceContext(b"t" * 16, b"s" * 8), 0)
    [scope] = ExportTraceServiceRequest.FromString(HEAD(len(alone)) + alone).resource_spans[0].scope_spans
    assert (scope.scope.name, scope.spans[0].parent_span_id, scope.spans[0].flags) == ("dsv3", b"", 0x100)


@contextlib.contextmanager
def collecting(*statuses: int) -> Iterator[tuple[str, "queue.Queue[tuple[Mapping[str, str], bytes]]"]]:
    """A collector that answers with these statuses in turn, then 200; yields its URL, and what it gets."""
    left, found = list(statuses), queue.Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.put((dict(self.headers), self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(left.pop(0) if left else 200)
            self.send_header("Content-Length", "0")
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", found
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def short_delays(monkeypatch) -> None:
    monkeypatch.setattr(otlp, "_DELAY_S", 0.02)
    monkeypatch.setattr(otlp, "_LONGEST_DELAY_S", 0.05)


def send(url: str, encoded: bytes, **settings) -> TraceSender:
    sender = TraceSender(url, lambda size: b"", {"x-key": "secret"}, 5.0, **settings)
    sender.add(encoded)
    return sender


def test_a_collector_that_is_busy_gets_the_batch_again_and_one_that_refuses_does_not(caplog) -> None:
    with collecting(503, 429, 400, 302) as (url, found):
        sender = send(url, b"first", compression="gzip")
        headers, body = [found.get(timeout=5) for _ in range(3)][-1]
        assert gzip.decompress(body) == b"first"
        assert (headers["X-Key"], headers["Content-Encoding"]) == ("secret", "gzip")
        assert headers["Content-Type"] == "application/x-protobuf"
        for content in (b"moved", b"taken"):
            sender.add(content)
            assert gzip.decompress(found.get(timeout=5)[1]) == content
        sender.close()
        sender._thread.join(5)
        assert sender.is_closed and found.empty()
    lines = [record.getMessage() for record in caplog.records if record.name == "dsv3.traces"]
    assert len(lines) == 2 and "takes no traces (HTTP Error 503" in lines[0] and "again; 2 were dropped" in lines[1]


def test_without_a_collector_traces_wait_up_to_a_bound_and_the_newest_are_kept(monkeypatch, caplog) -> None:
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr(otlp, "MAX_QUEUED_BYTES", 100)
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    sender = send(f"http://127.0.0.1:{port}/", b"0" * 40)
    deadline = time.monotonic() + 5
    while not sender._is_failing and time.monotonic() < deadline:
        time.sleep(0.005)
    for i in range(1, 9):
        sender.add(b"%d" % i * 40)
    time.sleep(0.1)  # in which it tries again
    assert b"".join(sender._waiting) == b"7" * 40 + b"8" * 40 and sender._size == 80
    sender.close()
    sender._thread.join(5)
    assert sender.is_closed


TRACEPARENT = f"00-{'a' * 32}-{'b' * 16}"


@pytest.mark.parametrize(
    ("sampler", "headers", "is_sampled"),
    [
        ("", {}, True),
        ("always_off", {}, False),
        ("parentbased_always_off", {"traceparent": f"{TRACEPARENT}-03"}, True),
        ("parentbased_always_on", {"traceparent": f"{TRACEPARENT}-02"}, False),
        ("traceidratio", {"traceparent": f"{TRACEPARENT}-01"}, False),
        ("no such sampler", {}, True),
    ],
)
def test_the_sdks_sampler_decides_before_anything_is_made(monkeypatch, sampler, headers, is_sampled) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "1e-6")
    trace = Tracer("http://127.0.0.1:9", "dsv3", {}).start("request", headers | {"tracestate": "v=1"})
    assert trace.is_sampled == is_sampled
    version, trace_id, span_id, flags = trace.headers["traceparent"].split("-")
    given = headers.get("traceparent", "")
    assert (version, trace_id == "a" * 32, span_id == "b" * 16) == ("00", bool(given), False)
    assert flags == f"{is_sampled | (int(given[-2:] or '0', 16) & 2):02x}"
    assert trace.headers.get("tracestate") == ("v=1" if given else None)


@pytest.mark.parametrize(
    "traceparent",
    ["", "rubbish", "00-" + "0" * 32 + "-" + "b" * 16 + "-01", TRACEPARENT.upper() + "-01", TRACEPARENT + "-01-more",
     "ff" + TRACEPARENT[2:] + "-01", TRACEPARENT + "-01" * 500, TRACEPARENT + "-\u0660\u0661", TRACEPARENT + "-01\n"],
)  # fmt: skip
def test_a_sender_that_cannot_be_read_begins_a_trace(traceparent) -> None:
    headers = {"traceparent": traceparent, "tracestate": "x" * 10_000 + "\x00"}
    trace = Tracer("http://127.0.0.1:9", "dsv3", {}).start("request", headers)
    assert trace.is_sampled and trace.trace_id != "a" * 32 and "tracestate" not in trace.headers


def test_variables_that_cannot_be_used_are_named(monkeypatch, tmp_path) -> None:
    for name, value, url in (
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon", "http://127.0.0.1:9"),
        ("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "zip", "http://127.0.0.1:9"),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", str(tmp_path / "none.pem"), "https://127.0.0.1:9"),
    ):
        with monkeypatch.context() as changed, pytest.raises(ValueError, match=name):
            changed.setenv(name, value)
            Tracer(url, "dsv3", {})
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert make_tracer("http://127.0.0.1:9", "dsv3", {}) is None
