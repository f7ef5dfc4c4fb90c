"""A connection whose client does not read."""

import asyncio

from dsv3.server.http.exchange import ResponseWriter


class Transport:
    """What a writer needs of one."""

    def __init__(self):
        self.written, self.aborted = b"", asyncio.Event()

    def write(self, data):
        self.written += data

    def is_closing(self):
        return self.aborted.is_set()

    def abort(self):
        self.aborted.set()


def with_writer(work, version="1.1", deadline_s=60):
    """Runs `work(writer, transport, told)` on a loop; `told` is what the response heard."""

    async def run():
        transport, told = Transport(), []
        writer = ResponseWriter(transport, deadline_s)
        writer.start_stream(version, lambda: told.append("pause"), lambda: told.append("resume"))
        await work(writer, transport, told)

    asyncio.run(run())


def test_events_are_chunks_unless_the_client_is_older():
    async def write(writer, transport, told):
        writer.write(b'data: {"a": 1}')
        expected[0] = transport.written

    expected = [b""]
    with_writer(write)
    assert expected == [b'10\r\ndata: {"a": 1}\n\n\r\n']
    with_writer(write, "1.0")
    assert expected == [b'data: {"a": 1}\n\n']


def test_a_client_that_reads_again_is_kept():
    async def work(writer, transport, told):
        writer.pause()
        writer.resume()
        writer.end_stream()
        writer.pause()
        writer.resume()
        await asyncio.sleep(0.05)
        assert told == ["pause", "resume"] and not transport.aborted.is_set()

    with_writer(work, deadline_s=0.01)


def test_a_client_that_does_not_read_is_cut_off():
    """Whether a stream or a whole answer waits for it."""

    async def work(writer, transport, told):
        writer.end_stream()
        writer.pause()
        await asyncio.wait_for(transport.aborted.wait(), 60)
        writer.write(b"late")
        assert transport.written == b""

    with_writer(work, deadline_s=0.01)
