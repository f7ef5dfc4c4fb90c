"""Batches through running servers: load balancing, retries, and kills of either side."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import msgspec
import pytest

from dsv3.batch import servers as servers_module
from dsv3.batch.journal import BatchError
from dsv3.batch.options import BatchOptions
from dsv3.batch.servers import remote_completer
from dsv3.scheduler.request import BATCH_PRIORITY
from tests.dsv3.server import serving
from tests.dsv3.text import tiny

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return tiny.write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pair(model_dir):
    """Two replicas, slow enough to be killed while they work, with short queues."""
    slow = {"engine": {"max_num_seqs": 4, "max_num_queued_reqs": 2}, "factory_options": {"step_s": 0.002}}
    with serving.running(model_dir, **slow) as one, serving.running(model_dir, **slow) as two:
        yield one, two


class Replies:
    """A server of canned answers, one per request: (status, body), or None to hang up. It records the bodies."""

    def __init__(self, *answers, models=None):
        self.answers, self.bodies = list(answers), []
        self.models = models or [{"id": "m", "owned_by": "other"}]

    async def serve(self, reader, writer):
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
                body = await reader.readexactly(length)
                status, content = 200, {"data": self.models}
                if head.startswith(b"POST"):
                    self.bodies.append(json.loads(body))
                    answer = self.answers.pop(0)
                    if answer is None:
                        break
                    status, content = answer
                text = content if isinstance(content, bytes) else json.dumps(content).encode()
                writer.write(b"HTTP/1.1 %d x\r\nContent-Length: %d\r\n\r\n%b" % (status, len(text), text))
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()


def ask(replies, *bodies, **options):
    """Sends bodies one by one to a server of canned answers."""
    options = {"server_timeout": 30.0} | options

    async def run():
        server = await asyncio.start_server(replies.serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, remote_completer(BatchOptions(server=(url,), **options)) as completer:
            return [await completer.complete(COMPLETIONS, body) for body in bodies]

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch):
    monkeypatch.setattr(servers_module, "_BACKOFF_S", (0.01, 0.05))


OK = 200, {"id": "r", "usage": {"completion_tokens": 5}}


def test_temporary_failures_are_retried():
    replies = Replies((503, {"error": {}}), (429, b"slow down"), None, (502, b"<html>"), OK)
    [reply] = ask(replies, b'{"prompt": "x"}')
    assert (reply.status, reply.request_id, reply.output_tokens) == (200, "r", 5)
    assert len(replies.bodies) == 5 and not replies.answers


def test_a_4xx_is_recorded_and_a_5xx_after_three_tries():
    replies = Replies((400, {"error": {"message": "no"}}), *[(500, {"error": {}})] * 3)
    first, second = ask(replies, b'{"prompt": 1}', b'{"prompt": 2}')
    assert (first.status, second.status) == (400, 500)
    assert json.loads(bytes(first.body))["error"]["message"] == "no"


PAGE = b"<html>\n<title>Request Entity Too Large</title></html>"
LARGE = {"error": {"message": "x" * 100_000}}


def test_a_proxys_refusal_is_recorded():
    """Pages that are not JSON, long JSON, JSON on several lines: each becomes one line of the output."""
    indented = json.dumps({"error": {"message": "no"}}, indent=2).encode()
    replies = Replies((413, PAGE), (422, LARGE), (400, indented), (404, b'"no"'), (400, {"id": 7}), *[(504, PAGE)] * 3)
    found = ask(replies, *[b"{}"] * 6)
    assert [reply.status for reply in found] == [413, 422, 400, 404, 400, 504] and not replies.answers
    bodies = [msgspec.json.encode(reply.body) for reply in found]
    assert not any(b"\n" in body for body in bodies)
    page, large, plain, text, _, slow = map(json.loads, bodies)
    assert "Request Entity Too Large" in page["error"]["message"] and "413" in page["error"]["message"]
    assert large == LARGE and plain == {"error": {"message": "no"}} and "404" in text["error"]["message"]
    assert slow["error"]["type"] == "server_error"


def test_a_line_with_stream_is_refused():
    replies = Replies(OK)
    stream, fine = ask(replies, b'{"stream": true}', b"{}")
    assert (stream.status, fine.status) == (400, 200) and not replies.answers


def test_a_wrong_key_ends_the_batch():
    with pytest.raises(BatchError, match="API key"):
        ask(Replies((401, {"error": {}})), b"{}")
    with pytest.raises(BatchError, match="API key"):
        ask(Replies(OK, (403, PAGE), (403, PAGE)), b"{}", b"{}")
    with pytest.raises(BatchError, match="redirects"):
        ask(Replies((302, PAGE)), b"{}")


def test_a_403_of_one_line_is_recorded():
    """An empty request shows whether the key or the line is refused."""
    replies = Replies((403, {"error": {"message": "not you"}}), (400, {"error": {}}), OK)
    first, second = ask(replies, b'{"prompt": 1}', b'{"prompt": 2}')
    assert (first.status, second.status) == (403, 200) and b"not you" in bytes(first.body)
    assert replies.bodies == [{"prompt": 1}, {}, {"prompt": 2}]


def test_every_wait_ends():
    with pytest.raises(BatchError, match="no server has answered"):
        ask(Replies(*[(503, b"{}")] * 1000), b"{}", server_timeout=0.3)
    with pytest.raises(BatchError, match="cannot be reached"):
        asyncio.run(asyncio.wait_for(_enter(("http://127.0.0.1:9",), server_timeout=0.2), 30))
    with pytest.raises(BatchError, match="HOST:PORT"):
        asyncio.run(_enter(("nonsense",)))


async def _enter(urls, **options):
    async with remote_completer(BatchOptions(server=urls, **options)):
        pass


def test_our_servers_get_the_batch_priority_unless_the_body_has_one():
    ours = [{"id": "m", "owned_by": "dsv3", "max_num_seqs": 3}]
    bodies = b'{"a": 1}', b" {}", b'{"priority": 7}'
    replies = Replies(OK, OK, OK, models=ours)
    ask(replies, *bodies)
    assert [body["priority"] for body in replies.bodies] == [BATCH_PRIORITY, BATCH_PRIORITY, 7]
    replies = Replies(OK, OK, OK)
    ask(replies, *bodies)
    assert ["priority" in body for body in replies.bodies] == [False, False, True]
    replies = Replies(OK)
    ask(replies, b"{}", priority=3)
    assert replies.bodies == [{"priority": 3}]


def test_replicas_of_different_models_are_refused(pair, tmp_path_factory):
    other = tiny.write(tmp_path_factory.mktemp("other"))
    with (
        serving.running(other, model_names=["big"]) as third,
        pytest.raises(BatchError, match="different models: big, tiny"),
    ):
        asyncio.run(_enter((pair[0].url, third.url)))


def test_lines_with_a_common_prefix_prefer_one_server(pair):
    async def run():
        async with remote_completer(BatchOptions(server=tuple(each.url for each in pair))) as completer:
            assert completer.concurrency == 16 and completer.model == "tiny"
            chosen = [[(await completer._next_server(b"%d" % i)).url for _ in range(3)] for i in range(40)]
            assert all(len(set(each)) == 1 for each in chosen)
            assert {each[0] for each in chosen} == {each.url for each in pair}
            first = await completer._next_server(b"0")
            first.running = first.limit
            return first, await completer._next_server(b"0")

    first, second = asyncio.run(run())
    assert first is not second


def lines(count):
    for i in range(count):
        body = {"prompt": [7 + i % 5, 8 + i % 400], "max_tokens": 20, "return_token_ids": True}
        yield {"custom_id": f"q{i}", "method": "POST", "url": COMPLETIONS, "body": body}


def batch_command(source, output, *servers):
    urls = ",".join(server.url for server in servers)
    return [sys.executable, "-m", "launch.batch", str(source), str(output), f"--server={urls}"]


def test_kills_of_client_and_server_lose_and_double_nothing(pair, model_dir, tmp_path):
    """The client is killed, then a third replica while it works; the other two finish the batch."""
    source, output, count = tmp_path / "in.jsonl", tmp_path / "out.jsonl", 400
    source.write_text("".join(json.dumps(line) + "\n" for line in lines(count)))
    slow = {"engine": {"max_num_seqs": 4}, "factory_options": {"step_s": 0.002}}
    with serving.running(model_dir, **slow) as third:
        command = batch_command(source, output, *pair, third)
        client = subprocess.Popen(command, cwd=serving.ROOT, stderr=subprocess.PIPE)
        grown(client, output, 40)
        client.kill()
        client.communicate(timeout=60)
        before = output.read_bytes().splitlines()[:-1]
        client = subprocess.Popen(command, cwd=serving.ROOT, stderr=subprocess.PIPE)
        grown(client, output, len(before) + 40)
        os.kill(third.process.pid, signal.SIGKILL)
        third.process.wait(30)
        third.stop = lambda: None
        _, errors = client.communicate(timeout=240)
    assert client.returncode == 0, errors.decode()
    found = [json.loads(line) for line in output.read_bytes().splitlines()]
    assert sorted(each["custom_id"] for each in found) == sorted(f"q{i}" for i in range(count))
    assert output.read_bytes().startswith(b"\n".join(before))
    for each in found:
        number = int(each["custom_id"][1:])
        assert each["response"]["body"]["choices"][0]["token_ids"] == [7 + number % 5, 8 + number % 400] * 10
    for server in pair:
        server.wait_for(server.is_idle)
        assert server.metric("vllm:request_success_total") > 0


def grown(client, output, count, seconds=120):
    deadline = time.monotonic() + seconds
    while not output.exists() or output.read_bytes().count(b"\n") < count:
        assert client.poll() is None, client.stderr.read().decode()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_key_is_read_from_a_file(model_dir, tmp_path):
    key = "sk-0123456789abcdef"
    (tmp_path / "key").write_text(f"{key}\n")
    (tmp_path / "key").chmod(0o600)
    with serving.running(model_dir, options={"api_key": key}, ready=False) as server:

        async def run(**options):
            async with remote_completer(BatchOptions(server=(server.url,), **options)) as completer:
                return await completer.complete(COMPLETIONS, msgspec.json.encode({"prompt": [5], "max_tokens": 1}))

        assert asyncio.run(run(server_api_key_file=str(tmp_path / "key"))).status == 200
        with pytest.raises(BatchError, match="401"):
            asyncio.run(run())
