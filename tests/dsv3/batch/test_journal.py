"""The output file across kills: torn lines, other inputs, other writers, a full disk."""

import contextlib
import errno
import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv3.batch.journal import BatchError, Journal, model_identity, summarize_input


def line(number, text="x"):
    return json.dumps({"id": f"batch_req_{number}", "custom_id": str(number), "text": text}).encode() + b"\n"


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(f'{{"custom_id": "{i}"}}\n' for i in range(1, 9)))
    return path


def open_journal(source, output, model="m"):
    return Journal.open(output, summarize_input(source), model)


@pytest.mark.parametrize("config", ["config.json", "params.json"])
def test_a_model_is_identified_by_its_content(tmp_path, config):
    """Weights trained further have the same names, sizes and configuration; a copy elsewhere is the same model."""
    names = {}
    for folder, weights, text in (("a", b"12", "{}"), ("b", b"12", "{}"), ("c", b"13", "{}"), ("d", b"12", "[]")):
        directory = tmp_path / folder
        directory.mkdir()
        (directory / config).write_text(text)
        (directory / "model.safetensors").write_bytes(weights)
        names[folder] = model_identity(directory, "m")
    assert names["a"] == names["b"] and len(set(names.values())) == 3
    assert model_identity(tmp_path / "a") not in names.values()


def test_input_summary(tmp_path):
    path = tmp_path / "in"
    path.write_bytes(b"a\n\nb")
    summary = summarize_input(path)
    assert (summary.lines, summary.last_line, summary.bytes) == (2, 3, 4)
    path.write_bytes(b"")
    assert summarize_input(path).lines == 0


def test_a_reopened_journal_has_its_answers(source, tmp_path):
    output = tmp_path / "out.jsonl"
    journal = open_journal(source, output)
    for number in (3, 1, 8):
        journal.append(number, line(number))
    journal.close()
    again = open_journal(source, output)
    assert again.answered == 3
    assert [number for number in range(1, 9) if again.is_answered(number)] == [1, 3, 8]
    again.close()
    assert output.read_bytes() == line(3) + line(1) + line(8)


@settings(max_examples=40)
@given(cut=st.data())
def test_a_torn_write_loses_only_that_line(tmp_path_factory, cut):
    folder = tmp_path_factory.mktemp("torn")
    source, output = folder / "in", folder / "out"
    source.write_bytes(b"1\n2\n3\n")
    journal = open_journal(source, output)
    whole = [line(1, "é"), line(2), line(3, "\n")]
    for number, text in enumerate(whole, 1):
        journal.append(number, text)
    journal.close()
    size = cut.draw(st.integers(0, len(b"".join(whole))))
    os.truncate(output, size)
    again = open_journal(source, output)
    kept = b""
    for number, text in enumerate(whole, 1):
        expected = len(kept + text) <= size and kept == b"".join(whole[: number - 1])
        assert again.is_answered(number) == expected
        kept += text if expected else b""
    assert output.read_bytes() == kept
    again.append(3, line(3)) if not again.is_answered(3) else None
    again.close()
    assert output.read_bytes().startswith(kept)


def test_another_input_is_refused_and_the_output_stays(source, tmp_path):
    output = tmp_path / "out.jsonl"
    journal = open_journal(source, output)
    journal.append(1, line(1))
    journal.close()
    source.write_text("other\n")
    with pytest.raises(BatchError, match=r"another input.*restore that input to resume, or name another output"):
        open_journal(source, output)
    assert output.read_bytes() == line(1)


def test_another_model_is_refused(source, tmp_path):
    output = tmp_path / "out.jsonl"
    journal = open_journal(source, output, "one")
    journal.append(1, line(1))
    journal.close()
    with pytest.raises(BatchError, match="'one', not 'two'"):
        open_journal(source, output, "two")


@pytest.mark.parametrize("state", [None, "", "{}", '{"version": 1}'])
def test_a_file_of_unknown_origin_is_refused(source, tmp_path, state):
    output = tmp_path / "out.jsonl"
    output.write_text("precious\n")
    if state is not None:
        (tmp_path / "out.jsonl.state.json").write_text(state)
    with pytest.raises(BatchError, match="move the file away"):
        open_journal(source, output)
    assert output.read_text() == "precious\n"


def test_a_batch_of_another_version_is_refused(source, tmp_path):
    output, state = tmp_path / "out.jsonl", tmp_path / "out.jsonl.state.json"
    journal = open_journal(source, output)
    journal.append(1, line(1))
    journal.close()
    state.write_text(state.read_text().replace('"version":1', '"version":2'))
    with pytest.raises(BatchError, match="version 2, not 1"):
        open_journal(source, output)


def test_deleting_the_output_starts_over(source, tmp_path):
    output = tmp_path / "out.jsonl"
    journal = open_journal(source, output)
    journal.append(1, line(1))
    journal.close()
    output.unlink()
    source.write_text("other\n")
    journal = open_journal(source, output)
    assert journal.answered == 0
    journal.close()


def test_one_writer_at_a_time(source, tmp_path):
    journal = open_journal(source, tmp_path / "out")
    with pytest.raises(BatchError, match="another process"):
        open_journal(source, tmp_path / "out")
    journal.close()
    open_journal(source, tmp_path / "out").close()


@pytest.mark.parametrize("change", ["unlink", "replace"])
def test_a_deleted_or_replaced_output_ends_the_run_and_stays_locked(source, tmp_path, change):
    output = tmp_path / "out"
    journal = open_journal(source, output)
    journal.append(1, line(1))
    output.unlink()
    if change == "replace":
        output.write_bytes(line(5))
    with pytest.raises(BatchError, match="another process"):
        open_journal(source, output)
    with pytest.raises(BatchError, match="deleted, moved or replaced"):
        journal.append(2, line(2))
    assert not journal.is_answered(2)
    journal.close()
    assert output.read_bytes() == (line(5) if change == "replace" else b"")


def test_only_the_owner_may_read_answers(source, tmp_path):
    before = os.umask(0)
    try:
        open_journal(source, tmp_path / "out").close()
    finally:
        os.umask(before)
    assert {file.name: file.stat().st_mode & 0o777 for file in tmp_path.glob("out*")} == {
        "out": 0o600,
        "out.state.json": 0o600,
    }


@pytest.mark.parametrize("name", ["out", "out.state.json", "out.state.json.tmp"])
def test_links_are_not_followed(source, tmp_path, name):
    victim = tmp_path / "victim"
    victim.write_text("")
    (tmp_path / name).symlink_to(victim)
    with contextlib.suppress(BatchError):
        journal = open_journal(source, tmp_path / "out")
        journal.append(1, line(1))
        journal.close()
    assert victim.read_text() == ""


@pytest.mark.parametrize("name", ["out", "out.state.json"])
def test_pipes_are_refused(source, tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(BatchError, match="not a regular file"):
        open_journal(source, tmp_path / "out")


@pytest.mark.parametrize("damage", [b"\0\0\n", b'{"id": "batch_req_99"}\n', line(1), b"{}\n"])
def test_a_damaged_line_is_reported_with_its_offset(source, tmp_path, damage):
    output = tmp_path / "out.jsonl"
    journal = open_journal(source, output)
    journal.append(1, line(1))
    journal.close()
    with output.open("ab") as file:
        file.write(damage)
    with pytest.raises(BatchError, match=f"at byte {len(line(1))} is damaged"):
        open_journal(source, output)


def test_a_full_disk_leaves_whole_lines(source, tmp_path, monkeypatch):
    output = tmp_path / "out.jsonl"
    journal = open_journal(source, output)
    journal.append(1, line(1))
    write = os.write

    def fills_up(descriptor, data):
        if len(data) < len(line(2)):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[:10])

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", fills_up)
        with pytest.raises(BatchError, match="No space left"):
            journal.append(2, line(2))
    assert output.read_bytes() == line(1) and not journal.is_answered(2)
    journal.append(2, line(2))
    journal.close()
    assert output.read_bytes() == line(1) + line(2)


@pytest.mark.parametrize("name", ["nowhere", "."])
def test_inputs_that_are_not_files(tmp_path, name):
    with pytest.raises(BatchError):
        summarize_input(tmp_path / name)


def test_an_output_that_cannot_be_created(source, tmp_path):
    with pytest.raises(BatchError, match="No such file"):
        open_journal(source, tmp_path / "nowhere" / "out")
