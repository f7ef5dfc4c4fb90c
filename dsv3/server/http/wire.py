"""Parses and validates HTTP/1.1 requests: heads, and the framing of bodies. The only user of httptools.

llhttp, httptools' C parser, rejects bare line feeds, folded lines, a length together with chunks, and misplaced spaces.
It has no limits, accepts any transfer coding that ends with "chunked", and treats some methods and upgrades specially.
So this module checks the request line and the limits, passes every method to llhttp as "POST", and parses a chunked
body with a new parser that has not seen the client's head.
"""

import dataclasses
import re
import types

import httptools

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 128
MAX_TARGET_BYTES = 8 * 1024
MAX_FRAMING_BYTES = 256 * 1024
"""Bytes of a chunked body besides its content: sizes, extensions, trailers. Enough for 50,000 chunks."""

_SLICE_BYTES = 32 * 1024
"""Bytes of a chunked body that one call parses: 0.6 ms for 1-byte chunks by llhttp, 60 times as long by h11."""

HEAD_END = b"\r\n\r\n"
_REQUEST_LINE = re.compile(
    rb"([!#$%%&'*+\-.^_`|~0-9A-Za-z]{1,32})( [\x21-\x7e]{1,%d} HTTP/1\.([01])\r\n)" % MAX_TARGET_BYTES
)
_BARE_LF = re.compile(rb"(?<!\r)\n")
_CLOSE = re.compile(rb"(?:^|,)[ \t]*close[ \t]*(?:,|$)", re.IGNORECASE)
_CHUNKED_HEAD = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"


class BadRequest(Exception):
    """The request is malformed or exceeds a limit; the text repeats nothing of it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Head:
    """The head of a request. Header names are in lower case; `length` is None for a chunked body."""

    method: str
    target: bytes
    version: str
    headers: list[tuple[bytes, bytes]]
    length: int | None

    @property
    def keeps_alive(self) -> bool:
        """Whether the connection stays open for another request."""
        return self.version == "1.1" and not any(map(_CLOSE.search, self.values(b"connection")))

    @property
    def expects_continue(self) -> bool:
        """Whether the client waits for `100 Continue` before it sends the body."""
        return self.version == "1.1" and any(value.lower() == b"100-continue" for value in self.values(b"expect"))

    def values(self, name: bytes) -> list[bytes]:
        return [value for given, value in self.headers if given == name]


def find_head(buffer: bytearray, searched: int) -> int:
    """Returns the length of the head at the start of `buffer`, 0 if it is incomplete; raises BadRequest.

    The first `searched` bytes were searched by an earlier call.
    """
    end = buffer.find(HEAD_END, max(0, searched - 3))
    size = len(buffer) if end < 0 else end + len(HEAD_END)
    if size > MAX_HEAD_BYTES:
        raise BadRequest(f"the head of the request is larger than {MAX_HEAD_BYTES} bytes")
    if end < 0 and _BARE_LF.search(buffer, searched):
        raise BadRequest("a line of the head does not end with CR LF")
    return 0 if end < 0 else size


def parse_head(data: bytes) -> Head:
    """Parses a head, including the empty line at its end; raises BadRequest if it is malformed."""
    line = _REQUEST_LINE.match(data)
    if line is None:
        raise BadRequest(f"the first line is not that of an HTTP/1 request, or longer than {MAX_TARGET_BYTES} bytes")
    if data.count(b"\n") > MAX_HEADERS + 2:
        raise BadRequest(f"there are more than {MAX_HEADERS} headers")
    headers: list[tuple[bytes, bytes]] = []
    collector = types.SimpleNamespace(
        on_header=lambda name, value: headers.append((name.lower(), value.rstrip(b" \t")))
    )
    try:
        httptools.HttpRequestParser(collector).feed_data(b"POST" + data[line.end(1) :])
    except httptools.HttpParserUpgrade:
        pass  # this server supports no upgrade, so it serves the request as it is
    except httptools.HttpParserError as error:
        raise BadRequest(f"the request is not HTTP/1.1: {error}") from None
    target = line[2].split(b" ")[1]
    version = "1." + line[3].decode()
    return Head(line[1].decode(), target, version, headers, _length(headers, version))


def _length(headers: list[tuple[bytes, bytes]], version: str) -> int | None:
    """Returns the body's length, None if it is chunked; llhttp has validated the number and rejected both together."""
    found = dict(headers)
    num_hosts = sum(name == b"host" for name, _ in headers)
    if num_hosts > 1 or (version == "1.1" and not num_hosts):
        raise BadRequest("there must be one Host header")
    coding = found.get(b"transfer-encoding")
    if coding is None:
        return int(found.get(b"content-length", b"0"))
    if version != "1.1" or coding.lower() != b"chunked":
        raise BadRequest("the only transfer coding is chunked, for HTTP/1.1")
    return None


class SizedBody:
    """Consumes a body of known length."""

    has_more = False

    def __init__(self, length: int):
        self._left = length

    @property
    def is_complete(self) -> bool:
        return not self._left

    def consume(self, buffer: bytearray) -> tuple[int, bytes]:
        """Takes bytes from the front of `buffer`; returns how many, and the content among them."""
        content = bytes(buffer[: self._left])
        del buffer[: len(content)]
        self._left -= len(content)
        return len(content), content


class ChunkedBody:
    """Decodes a chunked body. `has_more`: bytes followed it in its last slice and are lost."""

    def __init__(self) -> None:
        self.is_complete = False
        self.has_more = False
        self._content = bytearray()
        self._num_framing = 0
        self._parser = httptools.HttpRequestParser(self)
        self._parser.feed_data(_CHUNKED_HEAD)

    def consume(self, buffer: bytearray) -> tuple[int, bytes]:
        """Takes bytes from the front of `buffer`; returns how many, and the content among them."""
        data = bytes(buffer[:_SLICE_BYTES])
        del buffer[: len(data)]
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if not self.is_complete:
                raise BadRequest(f"the body's chunks are damaged: {error}") from None
        content = bytes(self._content)
        self._content.clear()
        self._num_framing += len(data) - len(content)
        if self._num_framing > MAX_FRAMING_BYTES:
            raise BadRequest(f"the chunks of the body have more than {MAX_FRAMING_BYTES} bytes of framing")
        return len(data), content

    def on_message_begin(self) -> None:
        """Stops parsing after the body. Called by httptools, like the next two methods."""
        if self.is_complete:
            self.has_more = True
            raise BadRequest("another request follows in the same slice")

    def on_body(self, content: bytes) -> None:
        self._content += content

    def on_message_complete(self) -> None:
        self.is_complete = True


Body = SizedBody | ChunkedBody


def make_body(head: Head) -> Body:
    """Returns the decoder of the body that follows `head`."""
    return ChunkedBody() if head.length is None else SizedBody(head.length)
