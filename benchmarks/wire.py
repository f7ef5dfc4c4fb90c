"""Measures what a request costs to parse: `python benchmarks/wire.py`; ours (llhttp, in C) and h11 in turns.

Processor time per head of 12 headers, and per chunk of one byte, the smallest that a hostile client can send.
"""

import time
from collections.abc import Callable

import h11

from dsv3.server.http.wire import ChunkedBody, find_head, parse_head

_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + b"".join(b"x-%d: some value\r\n" % i for i in range(10))
_CHUNKED = _HEAD + b"transfer-encoding: chunked\r\n\r\n"
_NUM_CHUNKS, _NUM_HEADS, _NUM_TURNS = 10_000, 1000, 5
_CHUNKS = b"1\r\na\r\n" * _NUM_CHUNKS


def _our_heads() -> None:
    for _ in range(_NUM_HEADS):
        parse_head(_CHUNKED[: find_head(bytearray(_CHUNKED), 0)])


def _our_chunks() -> None:
    body, buffer = ChunkedBody(), bytearray(_CHUNKS)
    while buffer:
        body.consume(buffer)


def _h11_heads() -> None:
    for _ in range(_NUM_HEADS):
        connection = h11.Connection(h11.SERVER)
        connection.receive_data(_CHUNKED)
        connection.next_event()


def _h11_chunks() -> None:
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(_CHUNKED + _CHUNKS)
    while connection.next_event() is not h11.NEED_DATA:
        pass


def _us(work: Callable[[], None], count: int) -> float:
    before = time.process_time()
    work()
    return (time.process_time() - before) / count * 1e6


def main() -> None:
    """Prints a line per turn."""
    for _ in range(_NUM_TURNS):
        heads = _us(_our_heads, _NUM_HEADS), _us(_h11_heads, _NUM_HEADS)
        chunks = _us(_our_chunks, _NUM_CHUNKS), _us(_h11_chunks, _NUM_CHUNKS)
        print(f"head {heads[0]:.1f} us, h11 {heads[1]:.1f} us; chunk {chunks[0]:.2f} us, h11 {chunks[1]:.2f} us")


if __name__ == "__main__":
    main()
