"""Files of a model directory and secrets: what is read, what is refused."""

import errno
import os

import pytest

from dsv3 import files


def test_only_regular_files_and_links_to_them_are_opened(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    with files.open_regular(tmp_path / "link") as file:
        assert file.read() == b"x"
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(OSError, match="not a regular file"):
            files.open_regular(path)
    with pytest.raises(IsADirectoryError):
        files.open_regular(tmp_path)


@pytest.mark.parametrize("text", [b"{", b"[" * 200_000, b"9" * 5000, b"\xff"])
def test_bad_json_is_one_kind_of_error(tmp_path, text):
    (tmp_path / "file").write_bytes(text)
    with pytest.raises(ValueError, match=r"."):
        files.read_json(tmp_path / "file")


def test_json_is_read_up_to_a_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_JSON_BYTES", 6)
    (tmp_path / "file").write_text("[1, 2]")
    assert files.read_json(tmp_path / "file") == [1, 2]
    (tmp_path / "file").write_text("[1, 2] ")
    with pytest.raises(ValueError, match="larger than 6 bytes"):
        files.read_json(tmp_path / "file")


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640, 0o644, 0o604, 0o660, 0o666, 0o602])
def test_a_secret_is_its_owners(mode):
    assert files.is_exposed(mode, is_own=True) == (mode not in (0o600, 0o400))
    assert files.is_exposed(mode, is_own=False) == (mode not in (0o600, 0o400, 0o640))


def test_secrets(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(b"k" * 4096)
    path.chmod(0o600)
    assert files.read_secret(path) == b"k" * 4096
    path.write_bytes(b"k" * 4097)
    with pytest.raises(ValueError, match="more than 4096"):
        files.read_secret(path)
    path.chmod(0o644)
    with pytest.raises(ValueError, match="chmod go-rwx"):
        files.read_secret(path)


def test_an_error_about_an_api_key_has_no_part_of_it(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(b"sk-\xc3\xa9")
    path.chmod(0o600)
    with pytest.raises(ValueError, match=r"^--key: expected one key, of printable ASCII without blanks$"):
        files.read_api_key(path, "--key")


def test_a_file_is_replaced_whole_or_stays(tmp_path, monkeypatch):
    path = tmp_path / "file"
    for content in (b"first", b"second"):
        files.replace_file(path, content, mode=0o600)
        assert path.read_bytes() == content and path.stat().st_mode & 0o777 == 0o600

    def full(descriptor: int) -> None:
        assert os.fstat(descriptor).st_size == 5
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        files.replace_file(path, b"third", synced=True)
    assert path.read_bytes() == b"second" and list(tmp_path.iterdir()) == [path]
