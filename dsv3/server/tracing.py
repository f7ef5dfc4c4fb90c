"""Traces of requests over OpenTelemetry: its SDK decides which are sampled and names the process.

A trace is made from records when its request has ended, and then encoded at once (`dsv3.server.otlp`). The SDK is
imported only where a server has `--otlp_traces_endpoint`; the extra `otel` installs it.
"""

import asyncio
import os
import re
import ssl
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

from dsv3.server.otlp import COMPRESSIONS, Attributes, Span, TraceContext, TraceSender, encode_head, encode_trace

_VALUE = re.compile(r"[\x20-\x7e]{1,512}")
_CLOSE_S, _POLL_S = 2.0, 0.02
_TIMEOUT_S = 10.0
_IS_SAMPLED, _IS_RANDOM = 1, 2  # W3C's flags


def trace_context(headers: Mapping[str, str]) -> dict[str, str]:
    """Returns the headers of W3C's Trace Context, the span of the sender; without values that are no such text."""
    found = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
    return {name: value for name, value in found.items() if _VALUE.fullmatch(value)}


def make_tracer(endpoint: str | None, service: str, attributes: Attributes) -> "Tracer | None":
    """Returns a `Tracer`, or None without an endpoint, or where OTEL_SDK_DISABLED says so; raises as `Tracer`."""
    is_disabled = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    return None if endpoint is None or is_disabled else Tracer(endpoint, service, attributes)


class Tracer:
    """Sends traces to the collector at `endpoint`, an OTLP URL over HTTP; without a path `/v1/traces` is meant.

    `service` and `attributes` name this process; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES take precedence. The
    SDK's OTEL_TRACES_SAMPLER* hold, and so do OTLP's variables for headers, timeout, compression and certificates.
    Raises ValueError for a variable that cannot be used, and where the packages that traces need are not installed.
    """

    def __init__(self, endpoint: str, service: str, attributes: Attributes) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
            from opentelemetry.util.re import parse_env_headers
        except ImportError as error:
            raise ValueError(
                f"otlp_traces_endpoint: {endpoint!r} needs OpenTelemetry ({error}); install it with "
                "pip install 'dsv3[otel]', or leave the option out"
            ) from None
        if urlsplit(endpoint).path in ("", "/"):
            endpoint = endpoint.rstrip("/") + "/v1/traces"
        resource = Resource.create({"service.name": service, **attributes}).merge(OTELResourceDetector().detect())
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._sampler, self._ids, self._kind = provider.sampler, provider.id_generator, trace.SpanKind.SERVER
        self._extract, self._span_of = TraceContextTextMapPropagator().extract, trace.get_current_span
        self._sender = TraceSender(
            endpoint,
            encode_head(resource.attributes, "dsv3"),
            parse_env_headers(_variable("HEADERS")[1], liberal=True),
            _timeout_s(),
            _compression(),
            _tls_context() if endpoint.startswith("https:") else None,
        )

    def start(self, name: str, headers: Mapping[str, str]) -> "RequestTrace":
        """Returns the trace of a request, which continues that in `headers`, and is sampled as that is."""
        context = self._extract(trace_context(headers))
        sender = self._span_of(context).get_span_context()
        trace_id = sender.trace_id or self._ids.generate_trace_id()
        sampled = self._sampler.should_sample(context, trace_id, name, self._kind)
        found = TraceContext(
            trace_id.to_bytes(16),
            self._ids.generate_span_id().to_bytes(8),
            sender.span_id.to_bytes(8) if sender.trace_id else b"",
            sampled.decision.is_sampled() | (sender.trace_flags & _IS_RANDOM),
            sampled.trace_state.to_header() if sampled.trace_state else "",
        )
        return RequestTrace(self._sender, found, sampled.attributes)

    async def close(self) -> None:
        """Sends what is queued, for at most 2 s."""
        self._sender.close()
        deadline = time.monotonic() + _CLOSE_S
        while not self._sender.is_closed and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)


class RequestTrace:
    """A request's place in its trace, until `end`; `attributes` are the sampler's."""

    def __init__(self, sender: TraceSender, context: TraceContext, attributes: Attributes) -> None:
        self._sender, self._context, self._attributes = sender, context, attributes

    @property
    def is_sampled(self) -> bool:
        """Whether it is sent: its sender, or the SDK's sampler, may have decided against it."""
        return bool(self._context.flags & _IS_SAMPLED)

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits."""
        return self._context.trace_id.hex()

    @property
    def headers(self) -> dict[str, str]:
        """The headers that make it the parent of another process's span."""
        trace_id, span_id, _, flags, state = self._context
        headers = {"traceparent": f"00-{trace_id.hex()}-{span_id.hex()}-{flags:02x}"}
        return headers | {"tracestate": state} if state else headers

    def end(self, whole: Span, error: str | None = None) -> None:
        """Sends it, if it is sampled, with the span of the request."""
        if self.is_sampled:
            if self._attributes:
                whole = whole._replace(attributes={**self._attributes, **whole.attributes})
            offset_ns = time.time_ns() - time.monotonic_ns()  # now: Unix time may have been set
            self._sender.add(encode_trace(whole, self._context, offset_ns, error))


def _variable(name: str) -> tuple[str, str]:
    """Returns the name of OTLP's variable that holds, that of traces or of all signals, and its value."""
    names = (f"OTEL_EXPORTER_OTLP_TRACES_{name}", f"OTEL_EXPORTER_OTLP_{name}")
    return next(((each, value) for each in names if (value := os.environ.get(each, "").strip())), (names[1], ""))


def _timeout_s() -> float:
    name, text = _variable("TIMEOUT")
    try:
        seconds = float(text or _TIMEOUT_S)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 600:
        raise ValueError(f"otlp_traces_endpoint: {name} is {text!r}, not a number of seconds up to 600")
    return seconds


def _compression() -> str:
    name, text = _variable("COMPRESSION")
    if (found := text.lower() or "none") not in COMPRESSIONS:
        raise ValueError(f"otlp_traces_endpoint: {name} is {text!r}, not one of {', '.join(COMPRESSIONS)}")
    return found


def _tls_context() -> ssl.SSLContext:
    (name, authorities), (mine, certificate) = _variable("CERTIFICATE"), _variable("CLIENT_CERTIFICATE")
    try:
        context = ssl.create_default_context(cafile=authorities or None)
        if certificate:
            name = mine
            context.load_cert_chain(certificate, _variable("CLIENT_KEY")[1] or None)
    except OSError as error:
        raise ValueError(f"otlp_traces_endpoint: the file of {name} cannot be used ({error})") from None
    return context
