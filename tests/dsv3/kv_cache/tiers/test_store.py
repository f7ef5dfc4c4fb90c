"""KV stores: all kinds behave alike; directories also tolerate other processes."""

import contextlib
import http.server
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from dsv3.kv_cache.page_keys import ALIGNMENT
from dsv3.kv_cache.tiers import store
from dsv3.kv_cache.tiers.store import PageStore, check_address, open_store

SIZE = 5000
FILE = ALIGNMENT + 8192
ALL = 10 * FILE


def key(i: int) -> bytes:
    return i.to_bytes(32, "big")


def keys(*numbers: int) -> list[bytes]:
    return [key(i) for i in numbers]


def payloads(*numbers: int) -> np.ndarray:
    return np.stack([np.random.default_rng(i).integers(0, 256, SIZE, np.uint8) for i in numbers])


def got(store: PageStore, *numbers: int) -> int:
    """Returns how many leading pages are stored; checks their payloads."""
    out = np.zeros((len(numbers), SIZE), np.uint8)
    count = store.get(keys(*numbers), out)
    np.testing.assert_array_equal(out[:count], payloads(*numbers)[:count])
    return count


class Bucket(http.server.BaseHTTPRequestHandler):
    """An S3 server; accepts every signature."""

    objects: ClassVar[dict[str, bytes]] = {}
    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        self.objects[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200)

    def do_GET(self) -> None:
        found = self.objects.get(self._object_path())
        if found is None:
            self._answer(404)
        elif span := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            first, last = int(span[1]), min(int(span[2]), len(found) - 1)
            self._answer(206, found[first : last + 1], f"bytes {first}-{last}/{len(found)}")
        else:
            self._answer(200, found)

    def do_DELETE(self) -> None:
        self.objects.pop(self._object_path(), None)
        self._answer(204)

    def _object_path(self) -> str:
        return self.path.partition("?")[0]

    def _answer(self, status: int, body: bytes = b"", span: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"tag"')
        self.send_header("x-goog-generation", "1")
        if span:
            self.send_header("Content-Range", span)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Stays silent."""


class GoogleBucket(Bucket):
    """A Google Cloud Storage server; accepts every token."""

    objects: ClassVar[dict[str, bytes]] = {}

    def do_POST(self) -> None:
        path, _, query = self.path.partition("?")
        name = re.search(r"name=([^&]+)", query)
        assert name is not None
        self.objects[f"{path.removeprefix('/upload')}/{name[1]}"] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200, b'{"name": "an object", "generation": "1", "metageneration": "1", "size": "1"}')


@contextlib.contextmanager
def served(bucket: type[Bucket]) -> Iterator[str]:
    """Yields the URL of a local server of this kind."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), bucket) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """The address of an S3 bucket on this machine."""
    with served(Bucket) as url:
        yield f"s3://pages/some/where?endpoint={url}&region=eu-central-1"


@pytest.fixture(scope="module")
def google() -> Iterator[str]:
    """The address of a local Google bucket, for the rest of the process."""
    with served(GoogleBucket) as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORSTORE_GCS_HTTP_URL", url)
        patch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "token")
        yield "gs://pages/some/where"


@pytest.fixture(params=["directory", "memory", "s3", "gs"])
def make(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], PageStore]:
    addresses = {"directory": lambda: str(tmp_path / "pages"), "memory": lambda: "memory://bucket"}
    addresses |= {"gs": lambda: request.getfixturevalue("google")}
    if request.param == "s3":
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "name")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    address = addresses.get(request.param, lambda: request.getfixturevalue("bucket"))()
    return lambda: open_store(address, "print", SIZE, ALL)


def test_pages_are_read_back_by_key(make: Callable[[], PageStore]):
    store = make()
    assert store.put(keys(1, 2, 3), payloads(1, 2, 3)) == 3
    assert store.count(keys(1, 2, 4, 3)) == 2
    assert got(store, 1, 2, 3) == 3
    assert got(store, 3, 9, 1) == 1
    store.delete(keys(1))
    assert got(store, 1) == 0 and got(store, 2, 3) == 2
    assert store.bytes_held > 0 and store.damaged == 0


def test_a_damaged_object_is_deleted(bucket: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "name")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    store = open_store(bucket, "damage", SIZE, ALL)
    store.put(keys(1), payloads(1))
    path = f"/pages/some/where/damage/{key(1).hex()}.kv"
    Bucket.objects[path] = Bucket.objects[path][:-1] + b"?"
    assert got(store, 1) == 0
    assert store.damaged == 1 and path not in Bucket.objects


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "pages"


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def opened(root: Path, limit: int = ALL, namespace: str = "print") -> PageStore:
    return open_store(f"file://{root}", namespace, SIZE, limit)


def test_a_later_process_finds_the_pages_and_another_model_does_not(root: Path):
    opened(root).put(keys(1, 2), payloads(1, 2))
    assert got(opened(root), 1, 2) == 2
    assert got(opened(root, namespace="other"), 1) == 0


@pytest.mark.parametrize("damage", ["byte", "header", "truncated", "empty", "swapped", "link"])
def test_damage_is_a_miss_and_is_deleted(root: Path, damage: str):
    store = opened(root)
    store.put(keys(1, 2), payloads(1, 2))
    path, other = files(root)
    content = bytearray(path.read_bytes())
    if damage == "byte":
        content[ALIGNMENT + 4000] ^= 1
    elif damage == "header":
        content[30] ^= 1
    elif damage == "swapped":
        content = bytearray(other.read_bytes())
    path.write_bytes(content[: {"truncated": ALIGNMENT + 10, "empty": 0}.get(damage, len(content))])
    if damage == "link":
        path.unlink()
        path.symlink_to(other)
        with pytest.raises(OSError):
            got(store, 1)
        return
    assert got(store, 1) == 0
    assert store.damaged == 1 and not path.exists()
    assert store.put(keys(1), payloads(1)) == 1 and got(store, 1, 2) == 2


def test_the_least_recently_used_pages_are_evicted(root: Path):
    store = opened(root, limit=3 * FILE)
    for i in (1, 2, 3):
        store.put(keys(i), payloads(i))
    assert got(store, 1) == 1
    store.put(keys(4), payloads(4))
    assert [got(store, i) for i in (1, 2, 3, 4)] == [1, 0, 1, 1]
    assert store.evictions == 1 and store.bytes_held == 3 * FILE == sum(p.stat().st_size for p in files(root))


def test_the_lru_order_survives_a_restart(root: Path):
    store = opened(root)
    store.put(keys(1, 2, 3), payloads(1, 2, 3))
    for i, path in enumerate(files(root)):
        os.utime(path, (1000 - i, 1000 - i))
    again = opened(root, limit=3 * FILE)
    assert got(again, 3) == 1  # the oldest, and used now
    again.put(keys(4, 5), payloads(4, 5))
    assert [got(again, i) for i in (1, 2, 3, 4, 5)] == [0, 0, 1, 1, 1]


def test_two_processes_may_share_a_directory(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store, "_RESCAN_S", 0.0)
    one, two = opened(root), opened(root)
    one.put(keys(1, 2), payloads(1, 2))
    assert got(two, 1, 2) == 2
    two.delete(keys(1))
    assert got(one, 1) == 0
    two.put(keys(3), payloads(3))
    one.put(keys(4), payloads(4))
    assert one.bytes_held == 3 * FILE, "files of the other process count"


def test_unfinished_files_of_a_crash_are_removed_once_they_are_old(root: Path):
    opened(root).put(keys(1), payloads(1))
    fresh, torn = (files(root)[0].with_name(f"ab.{i}.tmp") for i in (1, 2))
    fresh.write_bytes(b"x")
    torn.write_bytes(b"x")
    os.utime(torn, (1, 1))
    opened(root)
    assert fresh.exists() and not torn.exists()


def test_a_failed_write_leaves_nothing(root: Path, monkeypatch: pytest.MonkeyPatch):
    store = opened(root)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            store.put(keys(1), payloads(1))
    assert not files(root) and store.bytes_held == 0
    assert store.put(keys(1), payloads(1)) == 1


def test_a_directory_that_was_deleted_is_made_again(root: Path, monkeypatch: pytest.MonkeyPatch):
    store = opened(root)
    shutil.rmtree(root)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 3600.0)
    assert store.put(keys(1), payloads(1)) == 1 and got(store, 1) == 1


def test_concurrent_reads_writes_and_deletes(root: Path):
    store, other = opened(root, limit=6 * FILE), opened(root, limit=6 * FILE)
    wrong: list[BaseException] = []

    def work(mine: PageStore, seed: int) -> None:
        draw = np.random.default_rng(seed)
        try:
            for i in draw.integers(0, 12, 40).tolist():
                mine.put(keys(i), payloads(i))
                got(mine, i, (i + 1) % 12)
                if i == 5:
                    mine.delete(keys(i))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(each, i)) for i, each in enumerate((store, store, other, other))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong
    assert all(path.suffix == ".kv" for path in files(root))


@pytest.mark.parametrize("address", ["pages", "ftp://x/y", "s3://", "file://host/x", ""])
def test_unknown_addresses_are_refused(address: str):
    with pytest.raises(ValueError, match=r"is neither an absolute directory|names no bucket"):
        check_address(address)


@pytest.mark.parametrize("address", ["gs://b/p?endpoint=http://x", "s3://b/p?key=1", "s3://b?endpoint", "s3://b?x"])
def test_unknown_settings_of_a_bucket_are_refused(address: str):
    with pytest.raises(ValueError, match="and no more"):
        check_address(address)


def test_an_endpoint_without_a_scheme_is_refused():
    with pytest.raises(ValueError, match=r"endpoint 'minio:9000'; it must start with http"):
        check_address("s3://b/p?endpoint=minio:9000")
