"""Traces as OTLP over HTTP: encoded when a request has ended, and sent by a thread.

The messages are those of `opentelemetry/proto/trace/v1/trace.proto`. The SDK's spans and its exporter take several
times as long per trace, in the same process; and bytes that wait cost the collector of garbage nothing.
"""

import collections
import functools
import gzip
import http.client
import logging
import random
import ssl
import struct
import threading
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

Attributes = Mapping[str, str | int | float | bool | Sequence[str]]

MAX_QUEUED_BYTES = 2**25
"""Bytes of encoded traces that wait to be sent; above it the oldest are dropped."""
COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {"none": bytes, "gzip": gzip.compress, "deflate": zlib.compress}
_BATCH_BYTES = 2**20
_DELAY_S, _LONGEST_DELAY_S = 1.0, 30.0  # between two batches; it doubles while the collector fails
_RETRIED = (429, 502, 503, 504)  # by the protocol
_log = logging.getLogger("dsv3.traces")


class Span(NamedTuple):
    """A part of a request's time, in seconds of `time.monotonic`.

    `events` are names and times inside it, `children` are its parts.
    """

    name: str
    start: float
    stop: float
    attributes: Attributes = {}  # noqa: RUF012  # a NamedTuple's default, never changed
    events: tuple[tuple[str, float], ...] = ()
    children: "tuple[Span, ...]" = ()


class TraceContext(NamedTuple):
    """A request's place in its trace: the ids of 16 and 8 bytes, and W3C's flags and `tracestate`.

    `parent` is the id of the sender's span, empty where the trace begins here.
    """

    trace_id: bytes
    span_id: bytes
    parent: bytes = b""
    flags: int = 0
    state: str = ""


_TIMES = struct.Struct("<BQBQ2sI")  # start_time_unix_nano, end_time_unix_nano, flags
_EVENT = struct.Struct("<BQ")
_DOUBLE = struct.Struct("<d")
_SERVER, _INTERNAL = b"\x30\x02", b"\x30\x01"  # SpanKind
_REMOTE_IS_KNOWN, _IS_REMOTE = 0x100, 0x200  # flags about the parent


def encode_trace(whole: Span, context: TraceContext, offset_ns: int, error: str | None = None) -> bytes:
    """Returns a request's span and its parts, as fields of the message ScopeSpans.

    `offset_ns` is Unix time less `time.monotonic`. `error` is what a failed request is marked with.
    """
    shared = b"\n\x10" + context.trace_id + (_text(0x1A, context.state) if context.state else b"") + b"\x12\x08"
    flags = (context.flags & 0xFF) | _REMOTE_IS_KNOWN
    encoded: list[bytes] = []

    def add(span: Span, span_id: bytes, before_times: bytes, flags: int, status: bytes = b"") -> None:
        name, started, stopped, attributes, events, children = span
        start, stop = int(started * 1e9) + offset_ns, int(stopped * 1e9) + offset_ns
        times = _TIMES.pack(0x39, start, 0x41, stop if stop > start else start, b"\x85\x01", flags)
        content = shared + span_id + before_times + _text(0x2A, name) + times + status
        if attributes:
            content += b"".join([_attribute(0x4A, key, value) for key, value in attributes.items()])
        for what, at in events:
            content += _field(0x5A, _EVENT.pack(0x09, int(at * 1e9) + offset_ns) + _text(0x12, what))
        encoded.append(_field(0x12, content))
        for child in children:
            add(child, random.randbytes(8), b"\x22\x08" + span_id + _INTERNAL, _REMOTE_IS_KNOWN | context.flags)

    parent = b"\x22\x08" + context.parent if context.parent else b""
    status = b"" if error is None else _field(0x7A, _text(0x12, error) + b"\x18\x02")
    add(whole, context.span_id, parent + _SERVER, flags | _IS_REMOTE if parent else flags, status)
    return b"".join(encoded)


def encode_head(resource: Mapping[str, object], scope: str) -> Callable[[int], bytes]:
    """Returns a function of the size of encoded traces, which returns what comes before them in a request."""
    about = _field(0x0A, b"".join(_attribute(0x0A, name, value) for name, value in resource.items()))
    named = _field(0x0A, _text(0x0A, scope))

    def head(size: int) -> bytes:
        scope_spans = b"\x12" + _varint(len(named) + size) + named
        return b"\n" + _varint(len(about) + len(scope_spans) + size) + about + scope_spans

    return head


def _varint(n: int) -> bytes:
    if n < 0x80:
        return _SMALL[n]
    found = bytearray()
    while n > 0x7F:
        found.append(n & 0x7F | 0x80)
        n >>= 7
    found.append(n)
    return bytes(found)


_SMALL = [bytes((n,)) for n in range(0x80)]


def _field(tag: int, content: bytes) -> bytes:
    size = len(content)
    return _HEADS[tag][size] + content if size < 0x80 else _SMALL[tag] + _varint(size) + content


_HEADS = {tag: [bytes((tag, n)) for n in range(0x80)] for tag in (0x0A, 0x12, 0x1A, 0x2A, 0x4A, 0x5A, 0x7A)}


@functools.lru_cache(1024)
def _text(tag: int, text: str) -> bytes:
    """Returns a field of one of the few texts that names are."""
    return _field(tag, text.encode("utf-8", "replace"))


def _attribute(tag: int, name: str, value: object) -> bytes:
    """Returns a field with a KeyValue."""
    if isinstance(value, float):  # not kept: few are the same
        return _double_head(tag, name) + _DOUBLE.pack(value)
    if not isinstance(value, str | int):
        assert isinstance(value, Iterable)
        value = tuple(value)
    return _kept(tag, name, value)


@functools.lru_cache(1024)
def _double_head(tag: int, name: str) -> bytes:
    """Returns what comes before the eight bytes of an attribute's number."""
    return _field(tag, _text(0x0A, name) + b"\x12\x09\x21" + bytes(8))[:-8]


@functools.lru_cache(1024, typed=True)  # else 1 would be true
def _kept(tag: int, name: str, value: object) -> bytes:
    return _field(tag, _text(0x0A, name) + _field(0x12, _any(value)))


def _any(value: object) -> bytes:
    """Returns an AnyValue."""
    if isinstance(value, str):
        return _field(0x0A, value.encode("utf-8", "replace"))
    if isinstance(value, bool):
        return b"\x10\x01" if value else b"\x10\x00"
    if isinstance(value, int):
        return b"\x18" + _varint(value & 0xFFFF_FFFF_FFFF_FFFF)
    assert isinstance(value, tuple)
    return _field(0x2A, b"".join(_field(0x0A, _any(each)) for each in value))


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Fails where a POST would become a GET of another page."""

    def redirect_request(self, *_: object) -> None:
        return None


class TraceSender:
    """Sends encoded traces to the collector at `url` in batches, by a thread that ends with the process.

    `head` is `encode_head`'s. While the collector fails traces wait, at most `MAX_QUEUED_BYTES`; a batch that it
    refuses is dropped. The log has one line when traces begin to fail, and one when they are taken again.
    """

    def __init__(
        self,
        url: str,
        head: Callable[[int], bytes],
        headers: Mapping[str, str],
        timeout_s: float,
        compression: str = "none",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._url, self._head, self._timeout_s, self._compress = url, head, timeout_s, COMPRESSIONS[compression]
        self._headers = {**headers, "Content-Type": "application/x-protobuf"}
        if compression != "none":
            self._headers["Content-Encoding"] = compression
        self._opener = urllib.request.build_opener(_NoRedirect, urllib.request.HTTPSHandler(context=tls))
        self._opener.addheaders = [("User-Agent", "dsv3")]
        self._lock, self._wakes = threading.Lock(), threading.Event()
        self._waiting: collections.deque[bytes] = collections.deque()
        self._size = self._dropped = 0  # bytes that wait; traces
        self._is_closing = self._is_failing = False
        self._thread = threading.Thread(target=self._run, name="send-traces", daemon=True)
        self._thread.start()

    def add(self, encoded: bytes) -> None:
        """Queues a trace, in place of the oldest ones where too many wait."""
        with self._lock:
            self._waiting.append(encoded)
            self._size += len(encoded)
            self._drop_oldest()
        if self._size >= _BATCH_BYTES and not self._is_failing:
            self._wakes.set()

    def close(self) -> None:
        """Asks the thread to send what waits, once, and to end; does not wait for that."""
        self._is_closing = True
        self._wakes.set()

    @property
    def is_closed(self) -> bool:
        """Whether the thread has ended, after `close`."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        delay_s, is_closing = _DELAY_S, False
        while not is_closing:
            self._wakes.wait(delay_s)
            self._wakes.clear()
            is_closing = self._is_closing
            delay_s = self._send_waiting(delay_s)

    def _send_waiting(self, delay_s: float) -> float:
        """Sends until nothing waits or the collector fails; returns the seconds until the next time."""
        while batch := self._take():
            try:
                self._post(b"".join(batch))
            except (OSError, http.client.HTTPException, ValueError) as error:
                refusal = error if isinstance(error, urllib.error.HTTPError) else None
                self._on_failure(error, batch, is_retried=refusal is None or refusal.code in _RETRIED)
                if refusal is None or refusal.code in _RETRIED:
                    wanted = (refusal.headers.get("Retry-After") or "") if refusal is not None else ""
                    least_s = float(wanted) if wanted.isdecimal() else 0.0
                    return min(max(2 * delay_s, least_s), _LONGEST_DELAY_S)
            else:
                self._on_success()
        return _DELAY_S

    def _take(self) -> list[bytes]:
        batch: list[bytes] = []
        with self._lock:
            size = 0
            while self._waiting and size < _BATCH_BYTES:
                batch.append(self._waiting.popleft())
                size += len(batch[-1])
            self._size -= size
        return batch

    def _post(self, traces: bytes) -> None:
        """Sends traces; raises OSError for no answer, and HTTPError for a status that is not 2xx."""
        body = self._compress(self._head(len(traces)) + traces)
        request = urllib.request.Request(self._url, body, self._headers, method="POST")
        with self._opener.open(request, timeout=self._timeout_s) as answer:
            answer.read(_BATCH_BYTES)

    def _on_failure(self, error: Exception, batch: list[bytes], *, is_retried: bool) -> None:
        with self._lock:
            if is_retried:
                self._waiting.extendleft(reversed(batch))
                self._size += sum(map(len, batch))
                self._drop_oldest()
            else:
                self._dropped += len(batch)
        if not self._is_failing:
            kept = f"they wait, at most {MAX_QUEUED_BYTES >> 20} MiB" if is_retried else "these are dropped"
            _log.warning("the collector at %s takes no traces (%s); %s", urlsplit(self._url).netloc, error, kept)
        self._is_failing = True

    def _on_success(self) -> None:
        if self._is_failing:
            _log.warning("the collector takes traces again; %d were dropped", self._dropped)
        self._is_failing, self._dropped = False, 0

    def _drop_oldest(self) -> None:
        while self._size > MAX_QUEUED_BYTES:
            self._size -= len(self._waiting.popleft())
            self._dropped += 1
