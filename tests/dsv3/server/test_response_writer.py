"""`ResponseWriter`: chunks, flow control, and clients that do not read."""

import asyncio

from dsv3.server.http.exchange import ResponseWriter


class Transport:
    """The methods of a transport that a writer uses."""

    def __init__(self):
        self.written, self.aborted = b"", asyncio.Event()

    def write(self, data):
        self.written += data

    def is_closing(self):
        return self.aborted.is_set()

    def abort(self):
        self.aborted.set()


def with_writer(work, version="1.1", deadline_s=60):
    """Runs `work(writer, transport, calls)` on an event loop; `calls` are the callbacks made."""

    async def run():
        transport, calls = Transport(), []
        writer = ResponseWriter(transport, deadline_s)
        writer.start_stream(version, lambda: calls.append("pause"), lambda: calls.append("resume"))
        await work(writer, transport, calls)

    asyncio.run(run())


def test_events_are_chunks_for_http_1_1_clients():
    async def write(writer, transport, calls):
        writer.write(b'data: {"a": 1}')
        expected[0] = transport.written

    expected = [b""]
    with_writer(write)
    assert expected == [b'10\r\ndata: {"a": 1}\n\n\r\n']
    with_writer(write, "1.0")
    assert expected == [b'data: {"a": 1}\n\n']


def test_a_client_that_reads_in_time_stays_connected():
    async def work(writer, transport, calls):
        writer.pause()
        writer.resume()
        writer.end_stream()
        writer.pause()
        writer.resume()
        await asyncio.sleep(0.05)
        assert calls == ["pause", "resume"] and not transport.aborted.is_set()

    with_writer(work, deadline_s=0.01)


def test_a_client_that_does_not_read_is_cut_off():
    """Writes a stream and a whole body."""

    async def work(writer, transport, calls):
        writer.end_stream()
        writer.pause()
        await asyncio.wait_for(transport.aborted.wait(), 60)
        writer.write(b"late")
        assert transport.written == b""

    with_writer(work, deadline_s=0.01)
