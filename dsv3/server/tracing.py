"""Traces of requests over OpenTelemetry: spans are made from records when a request has ended, and sent by a thread.

OpenTelemetry is imported only where a server has `--otlp_traces_endpoint`; the extra `otel` installs it. Times of spans
are seconds of `time.monotonic`.
"""

import asyncio
import re
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import SpanContext

Attributes = Mapping[str, str | int | float | bool | Sequence[str]]

MAX_QUEUED_SPANS = 2**14
"""Spans that wait to be sent; while the collector is away the oldest are dropped."""
_VALUE = re.compile(r"[\x20-\x7e]{1,512}")
_BATCH, _DELAY_MS, _CLOSE_S = 512, 1000, 2.0


def trace_context(headers: Mapping[str, str]) -> dict[str, str]:
    """Returns the headers of W3C's Trace Context, the span of the sender; without values that are no such text."""
    found = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
    return {name: value for name, value in found.items() if _VALUE.fullmatch(value)}


class TracingUnavailable(ValueError):
    """The packages that traces need are not installed."""


class Span(NamedTuple):
    """A part of a request's time; `events` are names and times inside it, `children` are its parts."""

    name: str
    start: float
    stop: float
    attributes: Attributes = {}  # noqa: RUF012  # a NamedTuple's default, never changed
    events: tuple[tuple[str, float], ...] = ()
    children: "tuple[Span, ...]" = ()


class Tracer:
    """Sends spans to the collector at `endpoint`, an OTLP URL over HTTP; without a path `/v1/traces` is meant.

    `service` and `attributes` name this process; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES take precedence, and
    the SDK's other variables hold too. A thread sends; a collector that does not answer costs spans, never a request.
    Raises TracingUnavailable.
    """

    def __init__(self, endpoint: str, service: str, attributes: Attributes) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.util.instrumentation import InstrumentationScope
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise TracingUnavailable(
                f"otlp_traces_endpoint: {endpoint!r} needs OpenTelemetry ({error}); install it with "
                "pip install 'dsv3[otel]', or leave the option out"
            ) from None
        if urlsplit(endpoint).path in ("", "/"):
            endpoint = endpoint.rstrip("/") + "/v1/traces"
        resource = Resource.create({"service.name": service, **attributes}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._processor = BatchSpanProcessor(OTLPSpanExporter(endpoint), MAX_QUEUED_SPANS, _DELAY_MS, _BATCH)
        self._provider.add_span_processor(self._processor)
        self._tracer, self._scope = self._provider.get_tracer("dsv3"), InstrumentationScope("dsv3")
        self._propagator = TraceContextTextMapPropagator()

    def start(self, name: str, headers: Mapping[str, str], began: float) -> "RequestTrace":
        """Starts the span of a request, a child of the one that `headers` name, and sampled as that is."""
        from opentelemetry.trace import SpanKind

        parent = self._propagator.extract(trace_context(headers))
        offset_s = time.time() - time.monotonic()
        span = self._tracer.start_span(name, parent, SpanKind.SERVER, start_time=_ns(began + offset_s))
        return RequestTrace(self, span, offset_s)

    def headers_of(self, span: "OtelSpan") -> dict[str, str]:
        """Returns the headers that make a span the parent of another process's."""
        from opentelemetry.trace import set_span_in_context

        headers: dict[str, str] = {}
        self._propagator.inject(headers, set_span_in_context(span))
        return headers

    def add(self, parent: "SpanContext", span: Span, offset_s: float) -> None:
        """Sends an ended span, and its parts, as a child of `parent`.

        The SDK's `start_span` would take four times as long: it samples, locks and validates.
        """
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.trace import SpanContext

        number = self._provider.id_generator.generate_span_id()
        context = SpanContext(parent.trace_id, number, False, parent.trace_flags, parent.trace_state)
        for child in span.children:
            self.add(context, child, offset_s)
        ended = ReadableSpan(
            span.name,
            context,
            parent,
            self._provider.resource,
            span.attributes,
            [Event(name, timestamp=_ns(at + offset_s)) for name, at in span.events],
            start_time=_ns(span.start + offset_s),
            end_time=_ns(max(span.start, span.stop) + offset_s),
            instrumentation_scope=self._scope,
        )
        self._processor.on_end(ended)

    async def close(self) -> None:
        """Sends what is queued, for at most 2 s."""
        closing = threading.Thread(target=self._provider.shutdown, name="close-traces", daemon=True)
        closing.start()
        deadline = time.monotonic() + _CLOSE_S
        while closing.is_alive() and time.monotonic() < deadline:
            await asyncio.sleep(0.02)


class RequestTrace:
    """The span of a request in this process, until `end`."""

    def __init__(self, tracer: Tracer, span: "OtelSpan", offset_s: float) -> None:
        self._tracer, self._span, self._offset_s = tracer, span, offset_s

    @property
    def is_recording(self) -> bool:
        """Whether it is sampled: its sender, or the SDK's sampler, may have decided against it."""
        return self._span.is_recording()

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits."""
        return f"{self._span.get_span_context().trace_id:032x}"

    @property
    def headers(self) -> dict[str, str]:
        """The headers that make it the parent of another process's span."""
        return self._tracer.headers_of(self._span)

    def end(self, whole: Span, error: str | None = None) -> None:
        """Ends the span at the end of `whole`, with its attributes, events and children."""
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attributes(whole.attributes)
        for name, at in whole.events:
            self._span.add_event(name, timestamp=_ns(at + self._offset_s))
        for child in whole.children:
            self._tracer.add(self._span.get_span_context(), child, self._offset_s)
        if error is not None:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(_ns(whole.stop + self._offset_s))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
