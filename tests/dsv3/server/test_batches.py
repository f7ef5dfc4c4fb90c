"""Files and batches over OpenAI's own client: states, isolation, limits, kills."""

import asyncio
import contextlib
import itertools
import json
import os
import resource
import time

import httpx
import msgspec
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv3.batch.journal import Journal, model_identity, summarize_input
from dsv3.server.batches import runner, store
from dsv3.server.batches.store import Batch, BatchStore, NotFound, Record
from dsv3.server.http.batches import Form, _Content
from dsv3.server.protocol.errors import ApiError
from tests.dsv3.server import serving
from tests.dsv3.server.collector import Collector
from tests.dsv3.server.test_api_servers import Pair
from tests.dsv3.text import tiny

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ACME, ZETA, OPERATOR = (f"sk-{name}-0123456789abcdef" for name in ("acme", "zeta", "operator"))
ENDED = ("completed", "failed", "expired", "cancelled")


def line(custom_id, url=COMPLETIONS, **body):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"prompt": [7, 8], "max_tokens": 3} | body}


def as_file(lines):
    text = "".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines)
    return ("in.jsonl", text.encode())


def client_of(server, key="none", **settings):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, **settings)


@pytest.fixture(scope="module")
def batch_server(model_dir, tmp_path_factory):
    """A server that keeps batches, for two tenants."""
    folder = tmp_path_factory.mktemp("batches")
    keys = folder / "keys"
    keys.write_text(f"acme {ACME}\nzeta {ZETA}\noperator {OPERATOR}\n")
    keys.chmod(0o600)
    options = {"batch_dir": str(folder / "batches"), "api_key_file": str(keys)}
    with contextlib.closing(Collector()) as collector:
        options["otlp_traces_endpoint"] = collector.url
        with serving.running(model_dir, options=options) as server:
            server.collector = collector
            yield server


@pytest.fixture
def client(batch_server):
    with client_of(batch_server, ACME) as client:
        yield client


def finished(client, batch, seconds=60):
    deadline = time.monotonic() + seconds
    while batch.status not in ENDED:
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    return batch


def run(client, lines, endpoint=COMPLETIONS, **fields):
    file = client.files.create(file=as_file(lines), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields)
    return finished(client, batch)


def answers(client, file_id):
    return {each["custom_id"]: each for each in map(json.loads, client.files.content(file_id).text.splitlines())}


def test_a_batch_has_an_output_and_an_error_file_and_its_lines_have_traces(client, batch_server):
    lines = [line(f"q{i}", prompt=[7, 8 + i]) for i in range(20)]
    lines += [line("bad", temperature="hot"), line("long", prompt=[7] * 3000)]
    batch = run(client, lines, metadata={"night": "7"})
    assert batch.status == "completed" and batch.metadata == {"night": "7"}
    assert batch.request_counts.model_dump() == {"total": 22, "completed": 20, "failed": 2}
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    good, bad = answers(client, batch.output_file_id), answers(client, batch.error_file_id)
    assert set(good) == {f"q{i}" for i in range(20)} and set(bad) == {"bad", "long"}
    assert all(each["response"]["status_code"] == 200 for each in good.values())
    assert good["q0"]["response"]["body"]["object"] == "text_completion"
    ids = {each["response"]["body"]["id"] for each in good.values()}
    tenants = {None: "refused", **dict.fromkeys(ids, "acme")}  # a refused line has a trace without an id
    wait_for(lambda: traced(batch_server.collector, "refused").items() >= tenants.items())
    assert {each["response"]["status_code"] for each in bad.values()} == {400}
    shown = client.files.retrieve(batch.output_file_id)
    assert shown.purpose == "batch_output" and shown.bytes == len(client.files.content(shown.id).content)


def test_conversations_are_answered(client):
    body = {"messages": [{"role": "user", "content": "hello"}], "prompt": None}
    batch = run(client, [line("c", CHAT, **body)], CHAT)
    [answer] = answers(client, batch.output_file_id).values()
    assert answer["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert batch.error_file_id is None


@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        ([], "empty_file", None),
        (["{"], "invalid_json", 1),
        ([line("a"), line("a")], "duplicate_custom_id", 2),
        ([line("a"), "", line("b", CHAT)], "mismatched_url", 3),
        ([line("a") | {"method": "GET"}], "invalid_method", 1),
    ],
)
def test_an_invalid_file_fails_the_batch(client, lines, code, number):
    batch = run(client, lines)
    assert batch.status == "failed" and batch.failed_at and batch.output_file_id is None
    assert [(each.code, each.line) for each in batch.errors.data] == [(code, number)]


def test_lists_are_paginated(client):
    made = [client.files.create(file=as_file([line(str(i))]), purpose="batch").id for i in range(3)]
    listed = [file.id for file in client.files.list()]
    assert set(made) <= set(listed)
    paged = [file.id for file in client.files.list(limit=1)]
    assert paged == listed
    assert [f.id for f in client.files.list(order="asc")] == listed[::-1]
    assert {file.purpose for file in client.files.list(purpose="batch_output")} <= {"batch_output"}
    assert all(client.files.delete(each).deleted for each in made)
    assert not set(made) & {file.id for file in client.files.list()}
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(made[0])
    assert [b.id for b in client.batches.list(limit=2)] == [b.id for b in client.batches.list()]


def test_tenants_do_not_see_each_others_files_and_batches(batch_server, client):
    file = client.files.create(file=as_file([line("a")]), purpose="batch")
    batch = run(client, [line("a")])
    with client_of(batch_server, ZETA) as other:
        assert file.id not in {each.id for each in other.files.list()}
        assert not list(other.batches.list())
        for ask in (
            lambda: other.files.retrieve(file.id),
            lambda: other.files.content(file.id),
            lambda: other.files.delete(file.id),
            lambda: other.batches.retrieve(batch.id),
            lambda: other.batches.cancel(batch.id),
            lambda: other.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h"),
        ):
            with pytest.raises(openai.NotFoundError):
                ask()
    assert client.files.content(file.id).content


@pytest.mark.parametrize(("key", "priority", "status"), [(ACME, -1, 403), (ACME, 1, 200), (OPERATOR, -1, 200)])
def test_only_the_operator_may_use_priorities_below_0(batch_server, key, priority, status):
    body = {"prompt": [5], "max_tokens": 1, "priority": priority}
    headers = {"authorization": f"Bearer {key}"}
    assert httpx.post(batch_server.url + COMPLETIONS, headers=headers, json=body, timeout=30).status_code == status


def test_without_the_option_the_error_names_it(server):
    for method, path in (("POST", "/v1/files"), ("GET", "/v1/batches"), ("GET", "/v1/files/file-1/content")):
        answer = server.http.request(method, path)
        assert answer.status_code == 404 and "--batch_dir" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"files": {"file": ("x", b"{}")}}, 400),
        ({"data": {"purpose": "batch"}, "files": {"other": ("x", b"{}")}}, 400),
        ({"data": {"purpose": "fine-tune"}, "files": {"file": ("x", b"{}")}}, 400),
        ({"data": {"purpose": "batch", "expires_after[seconds]": "9"}, "files": {"file": ("x", b"{}")}}, 400),
        ({"data": {"purpose": "b" * 5000}, "files": {"file": ("x", b"{}")}}, 400),
        ({"content": b"--x\r\nrubbish", "headers": {"content-type": "multipart/form-data; boundary=x"}}, 400),
        ({"content": b"--x\r\n\r\n", "headers": {"content-type": "multipart/form-data"}}, 415),
        ({"content": b"{}", "headers": {"content-type": "application/json"}}, 415),
    ],
)
def test_invalid_uploads(batch_server, change, status):
    headers = {"authorization": f"Bearer {ACME}"} | change.pop("headers", {})
    answer = httpx.post(f"{batch_server.url}/v1/files", headers=headers, timeout=30, **change)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 400),
        ({"input_file_id": "file-1", "endpoint": "/v1/embeddings", "completion_window": "24h"}, 400),
        ({"input_file_id": "file-1", "endpoint": COMPLETIONS, "completion_window": "1h"}, 400),
        ({"input_file_id": "../../keys", "endpoint": COMPLETIONS, "completion_window": "24h"}, 404),
        ({"input_file_id": "file-" + "0" * 24, "endpoint": COMPLETIONS, "completion_window": "24h"}, 404),
        ({"input_file_id": "f", "endpoint": COMPLETIONS, "completion_window": "24h", "metadata": {"a": 1}}, 400),
    ],
)
def test_invalid_batches(batch_server, body, status):
    headers = {"authorization": f"Bearer {ACME}"}
    answer = httpx.post(f"{batch_server.url}/v1/batches", headers=headers, json=body, timeout=30)
    assert answer.status_code == status, answer.text


def test_a_batch_that_would_block_the_event_loop_is_refused(batch_server):
    """Decoded there, 32 MiB of lists take 0.2 s."""
    headers = {"authorization": f"Bearer {ACME}", "content-type": "application/json"}
    body = b'{"x": [' + b"[]," * 2**20 + b"0]}"
    answer = httpx.post(f"{batch_server.url}/v1/batches", headers=headers, content=body, timeout=30)
    assert answer.status_code == 400 and "brackets" in answer.json()["error"]["message"]


def test_the_error_for_another_endpoint_lists_the_valid_ones(batch_server):
    body = {"input_file_id": "f", "endpoint": "/v1/responses", "completion_window": "24h"}
    answer = httpx.post(
        f"{batch_server.url}/v1/batches", headers={"authorization": f"Bearer {ACME}"}, json=body, timeout=30
    )
    expected = "endpoint: this value is not known; it may be /v1/chat/completions or /v1/completions"
    assert answer.json()["error"]["message"] == expected and answer.json()["error"]["param"] == "endpoint"


@pytest.mark.parametrize("name", ["..%2f..%2fkeys", "%2e%2e", "file-%00", "file-" + "0" * 25, "batch_" + "0" * 24])
def test_ids_do_not_escape_the_directory(batch_server, name):
    headers = {"authorization": f"Bearer {ACME}"}
    for path in (f"/v1/files/{name}", f"/v1/files/{name}/content", f"/v1/batches/{name}"):
        assert httpx.get(f"{batch_server.url}{path}", headers=headers, timeout=30).status_code == 404


def test_kills_lose_and_double_nothing(model_dir, tmp_path):
    """The API server that accepted the batch is killed, then the whole server; in the end every line has one answer."""
    options = {"batch_dir": str(tmp_path / "batches"), "api_server_count": 2}
    total = 300
    lines = [line(f"q{i}", prompt=[7, 8 + i % 400], max_tokens=20) for i in range(total)]
    slow = {"options": options, "engine": {"max_num_seqs": 4}, "factory_options": {"step_s": 0.002}}
    with serving.running(model_dir, **slow) as server:
        pair = Pair(server)
        with client_of(server, http_client=pair.http[pair.other.pid]) as client:
            file = client.files.create(file=as_file(lines), purpose="batch")
            fields = {"endpoint": COMPLETIONS, "completion_window": "24h"}
            batch_id = client.batches.create(input_file_id=file.id, **fields).id
        [journal] = wait_for(lambda: list(tmp_path.glob("batches/tenants/*/batches/*.answers")))
        for kill in (pair.other.kill, server.process.kill):
            wanted = journal.read_bytes().count(b"\n") + 20
            wait_for(lambda n=wanted: journal.read_bytes().count(b"\n") > n)
            kill()
        server.process.wait(30)
        before = journal.read_bytes().splitlines()
        server.stop = lambda: None
    with serving.running(model_dir, **slow) as server, client_of(server) as client:
        batch = finished(client, client.batches.retrieve(batch_id))
        found = client.files.content(batch.output_file_id).text.splitlines()
    assert batch.status == "completed"
    kept = [path for path in (tmp_path / "batches").rglob("*") if path.is_file()]
    assert len(kept) > 4 and all(path.stat().st_mode & 0o77 == 0 for path in kept)
    assert sorted(json.loads(each)["custom_id"] for each in found) == sorted(each["custom_id"] for each in lines)
    assert batch.request_counts.completed == total
    kept = {json.loads(each)["id"]: each for each in before[:20]}
    assert all(each.encode() == kept[json.loads(each)["id"]] for each in found if json.loads(each)["id"] in kept)
    assert not list(tmp_path.glob("batches/open/*")) and not list(tmp_path.glob("batches/tenants/*/batches/*.answers"))


def traced(collector, missing):
    """Returns each traced response's tenant, by its id."""
    found = [span.attributes for span in collector.spans if span.name == "llm_request"]
    return {each.get("gen_ai.response.id"): each.get("dsv3.tenant", missing) for each in found}


def wait_for(found, seconds=60):
    deadline = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return value


def test_a_cancelled_batch_keeps_its_answers(model_dir, tmp_path):
    """A second server cannot use the directory, and a file in use cannot be deleted."""
    options = {"batch_dir": str(tmp_path / "batches")}
    slow = {"engine": {"max_num_seqs": 2}, "factory_options": {"step_s": 0.005}}
    with serving.running(model_dir, options=options, **slow) as server, client_of(server) as client:
        file = client.files.create(file=as_file([line(f"q{i}", max_tokens=50) for i in range(200)]), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")
        wait_for(lambda: client.batches.retrieve(batch.id).request_counts.completed > 1)
        with pytest.raises(openai.ConflictError):
            client.files.delete(file.id)
        with pytest.raises(ValueError, match="in use by another server"), BatchStore(tmp_path / "batches").lock():
            pass
        assert client.batches.cancel(batch.id).status == "cancelling"
        ended = finished(client, batch)
        assert ended.status == "cancelled" and ended.cancelling_at and ended.cancelled_at
        done = answers(client, ended.output_file_id)
        assert 1 < len(done) < 200 and len(done) == ended.request_counts.completed
        with pytest.raises(openai.ConflictError):
            client.batches.cancel(batch.id)
        assert client.files.delete(file.id).deleted
        server.wait_for(server.is_idle)


def test_the_state_that_a_server_finds_at_its_start(tmp_path):
    """An expired batch that is missing in open/, one begun with other weights, and one that was never made.

    The oldest batch has a damaged record, which does not block the others.
    """
    batch_store = BatchStore(tmp_path / "batches")
    model_dir = tiny.write(tmp_path)
    weights = model_dir / "model.safetensors"
    weights.write_bytes(b"1")
    files = []
    for name in ("late", "foreign"):
        path = batch_store.new_upload("")
        path.write_text(json.dumps(line(name)) + "\n")
        files.append(batch_store.add_file("", path, name).id)

    def begun(file, ends):
        return lambda batch_id, now: msgspec.structs.replace(
            make(batch_id, now), status="in_progress", input_file_id=file, expires_at=now + ends
        )

    damaged = batch_store.create_batch("", make)
    [record] = tmp_path.glob("batches/tenants/*/batches/*.json")
    record.write_bytes(record.read_bytes()[:50])
    late, foreign = (
        batch_store.create_batch("", begun(files[0], -1)),
        batch_store.create_batch("", begun(files[1], 900)),
    )
    summary = summarize_input(batch_store.content("", files[1]))
    journal = Journal.open(batch_store.answers("", foreign.id), summary, model_identity(model_dir, "tiny"))
    journal.append(1, b'{"id": "batch_req_1", "custom_id": "foreign", "response": {"status_code": 200}}\n')
    journal.close()
    unmade = tmp_path / "batches" / "open" / ("batch_" + "0" * 24)
    unmade.write_text("")
    os.utime(unmade, (1, 1))
    os.utime(unmade.with_name(damaged.id), (2, 2))
    unmade.with_name(late.id).unlink()
    weights.write_bytes(b"2")
    options = {"batch_dir": str(tmp_path / "batches")}
    with serving.running(model_dir, options=options) as server, client_of(server) as client:
        ended = finished(client, client.batches.retrieve(late.id))
        assert ended.status == "expired" and ended.expired_at and ended.output_file_id is None
        assert answers_of_errors(client, ended) == {"late": "batch_expired"}
        failed = finished(client, client.batches.retrieve(foreign.id))
        assert failed.status == "failed" and "answers of the model 'tiny " in failed.errors.data[0].message
        wait_for(lambda: not unmade.exists())
        assert damaged.id not in [batch.id for batch in client.batches.list()]
        assert "cannot be read" in server.log.read_text()


def answers_of_errors(client, batch):
    return {name: each["error"]["code"] for name, each in answers(client, batch.error_file_id).items()}


def make(batch_id, now):
    return Batch(
        id=batch_id, endpoint=COMPLETIONS, input_file_id="file-" + "0" * 24, created_at=now, expires_at=now + 9
    )


def put(batch_store, tenant="", text=b"x"):
    path = batch_store.new_upload(tenant)
    path.write_bytes(text)
    return batch_store.add_file(tenant, path, "x")


def test_counts_and_sizes_are_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "MAX_FILES", 2)
    monkeypatch.setattr(store, "MAX_OPEN_BATCHES", 2)
    monkeypatch.setattr(store, "MAX_TENANT_BYTES", 10)
    batch_store = BatchStore(tmp_path)
    put(batch_store, "a", b"12345678901")
    with pytest.raises(ApiError, match="bytes"):
        batch_store.new_upload("a")
    put(batch_store, "b"), put(batch_store, "b")
    with pytest.raises(ApiError, match="2 files"):
        batch_store.new_upload("b")
    for _ in range(2):
        batch_store.create_batch("a", make)
    with pytest.raises(ApiError, match="not ended"):
        batch_store.create_batch("a", make)
    batch_store.create_batch("b", make)


def test_a_full_disk_leaves_the_old_record(tmp_path):
    batch_store = BatchStore(tmp_path)
    batch = batch_store.create_batch("", make)
    before, limits = batch_store.record("", batch.id), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError):
            batch_store.save("", Record(batch=msgspec.structs.replace(batch, status="in_progress")))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert batch_store.record("", batch.id) == before
    assert not list(tmp_path.rglob(".batch*"))


@pytest.mark.parametrize("content", [b"", b'{"id": "', b"\xff", b"[" * 10_000, b'{"batch": {"id": 5}}'])
def test_a_damaged_record_is_skipped(tmp_path, content, caplog):
    batch_store = BatchStore(tmp_path)
    files, batches = [put(batch_store).id for _ in range(2)], [batch_store.create_batch("", make).id for _ in range(2)]
    for name in (files[0], batches[0]):
        [path] = tmp_path.rglob(f"{name}.json")
        path.write_bytes(content)
    for _ in range(2):
        assert [file.id for file in batch_store.files("")] == files[1:]
        assert [batch.id for batch in batch_store.batches("")] == batches[1:]
    with pytest.raises(NotFound):
        batch_store.record("", batches[0])
    assert sum("cannot be read" in each for each in caplog.messages) == 2
    batch_store.delete_file("", files[1])
    batch_store.create_batch("", make)


def test_lost_and_torn_entries_of_open_batches_are_restored(tmp_path):
    batch_store = BatchStore(tmp_path)
    lost, torn, whole, ended = (batch_store.create_batch("acme", make) for _ in range(4))
    batch_store.save("acme", Record(batch=msgspec.structs.replace(ended, status="completed")))
    (tmp_path / "open" / lost.id).unlink()
    (tmp_path / "open" / ended.id).unlink()
    (tmp_path / "open" / torn.id).write_bytes(b"ac\xff/")
    assert batch_store.open_batches() == [("acme", whole.id)]
    batch_store.mark_open()
    assert {name for _, name in batch_store.open_batches()} == {lost.id, torn.id, whole.id}
    (tmp_path / "cancel" / lost.id).write_bytes(b"")
    assert batch_store.batch("acme", lost.id).status == "cancelling"


def test_the_oldest_ended_batches_are_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "MAX_BATCHES", 5)
    monkeypatch.setattr(store, "MAX_OPEN_BATCHES", 2)
    times = itertools.count(100)
    batch_store = BatchStore(tmp_path, lambda: next(times))
    first = batch_store.create_batch("", make)
    for _ in range(8):
        batch = batch_store.create_batch("", make)
        batch_store.save("", Record(batch=msgspec.structs.replace(batch, status="completed")))
        batch_store.close_batch(batch.id)
    assert len(batch_store.batches("")) <= 5 and batch_store.batch("", first.id).status == "validating"
    assert batch_store.open_batches() == [("", first.id)]


def test_unfinished_files_of_killed_api_servers_are_deleted(tmp_path):
    """An abandoned upload, content without a record, and a temporary record; a recent upload stays."""
    batch_store = BatchStore(tmp_path)
    file, batch = put(batch_store), batch_store.create_batch("", make)
    folder = batch_store.content("", file.id).parent
    left = [batch_store.new_upload(""), folder / ("file-" + "0" * 24), folder / f".{file.id}.json.00112233"]
    going = batch_store.new_upload("")
    for path in (*left, going):
        path.write_text("x")
    for path in (*left, *folder.glob("file-*"), *folder.parent.glob("batches/*")):
        os.utime(path, (1, 1))
    batch_store.sweep()
    assert not any(path.exists() for path in left) and going.exists()
    assert batch_store.content("", file.id).read_text() == "x" and batch_store.batch("", batch.id).id == batch.id


@pytest.mark.parametrize("tenant", [".", "..", "a", "a.b", ""])
def test_each_tenant_has_its_own_folder(tmp_path, tenant):
    batch_store = BatchStore(tmp_path)
    file = put(batch_store, tenant)
    for other in {".", "..", "a", "a.b", "", "tenant-"} - {tenant}:
        with pytest.raises(NotFound):
            batch_store.file(other, file.id)
    assert batch_store.content(tenant, file.id).parent.parent.parent == tmp_path / "tenants"
    with pytest.raises(ValueError):
        batch_store.files("../x")


def test_lines_without_an_answer_expire(tmp_path):
    source, done, errors = tmp_path / "in", tmp_path / "answers", tmp_path / "errors"
    source.write_text("".join(json.dumps(line(name)) + "\n\n" for name in "abc"))
    done.write_text('{"id": "batch_req_3", "custom_id": "b", "response": {"status_code": 200}}\n')
    assert runner.sort_answers(done, tmp_path / "out", errors) == (1, 0)
    assert runner.append_expired(source, done, errors) == 2
    found = [json.loads(each) for each in errors.read_text().splitlines()]
    assert [(each["custom_id"], each["error"]["code"]) for each in found] == [
        ("a", "batch_expired"),
        ("c", "batch_expired"),
    ]


def test_only_open_batches_can_be_cancelled(tmp_path):
    batch_store = BatchStore(tmp_path)
    batch = batch_store.create_batch("", make)
    batch_store.save("", Record(batch=msgspec.structs.replace(batch, status="finalizing")))
    with pytest.raises(ApiError, match="the batch is"):
        batch_store.cancel("", batch.id)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200), st.lists(st.integers(1, 40), max_size=30))
def test_a_form_is_parsed_from_any_parts(content, cuts):
    body = b'--xyz\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--xyz\r\n'
    body += (
        b'Content-Disposition: form-data; name="file"; filename="a/b\\\\c.jsonl"\r\nContent-Type: text/plain\r\n\r\n'
        + content
        + b"\r\n--xyz--\r\n"
    )
    if b"--xyz" in content:
        return
    written = bytearray()
    form = Form(b"xyz", written.extend)
    for size in [*cuts, len(body)]:
        form.feed(body[:size])
        body = body[size:]
    assert bytes(written) == content and form.fields == {"purpose": b"batch"} and form.is_complete
    assert "/" not in form.filename and "\\" not in form.filename


def test_forms_are_limited():
    def feed(text):
        Form(b"x", lambda data: None).feed(text)

    for body in (
        b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n' + b"y" * 5000,
        b"--x\r\n" + b"".join(b"h%d: v\r\n" % i for i in range(99)),
        b"--x\r\nContent-Disposition: " + b"y" * 5000,
        b"".join(b'--x\r\nContent-Disposition: form-data; name="a%d"\r\n\r\ny\r\n' % i for i in range(40)),
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\ny\r\n' * 2,
    ):
        with pytest.raises(ApiError):
            feed(body)


def test_a_download_stops_when_its_client_disconnects(tmp_path):
    path, sent = tmp_path / "file", []
    path.write_bytes(b"x" * 50 * 2**18)

    async def receive():
        while len(sent) < 4:
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    asyncio.run(asyncio.wait_for(_Content(path)({"method": "GET"}, receive, send), 60))
    assert 4 <= len(sent) < 9
