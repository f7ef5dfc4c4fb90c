"""Tables as requests and answers as columns: formats, compression, nulls, nested values, errors."""

import datetime
import decimal
import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv3.batch import formats, tables
from dsv3.batch.formats import FileFormat, detect_format, open_input, open_output
from dsv3.batch.journal import BadLine, BatchError, Journal, RequestLine, summarize_input
from dsv3.batch.options import BatchOptions
from dsv3.batch.run import Reply, run, sorted_in_windows
from dsv3.batch.tables import stage

arrow = pytest.importorskip("pyarrow", reason="needs the extra `batch`")
parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra `batch`")

PROMPTS = ["one", None, 'drei, "x"\nzwei', "", "vier"]


class Echo:
    """Answers with the last message or the prompt, in capitals; refuses an empty one."""

    concurrency = 1

    async def complete(self, url, body):
        fields = json.loads(body)
        text = fields["prompt"] if "prompt" in fields else fields["messages"][-1]["content"]
        if not isinstance(text, str) or not text:
            return Reply(400, "", {"error": {"message": "empty"}})
        choice = {"finish_reason": "stop"}
        choice |= {"text": text.upper()} if "prompt" in fields else {"message": {"content": text.upper()}}
        usage = {"prompt_tokens": len(text), "completion_tokens": fields.get("max_tokens", 1)}
        return Reply(200, "r", {"choices": [choice], "usage": usage})


def answer(source, target, *, stop_after=None, **options):
    """Runs a batch with `Echo`, to its end or until `stop_after` lines are answered; returns its progress."""
    import asyncio

    staged = stage(str(source), str(target), BatchOptions(**options))
    journal = Journal.open(staged.answers, summarize_input(staged.lines), "m")

    async def batch():
        task = asyncio.current_task()

        def on_progress(progress):
            if stop_after is not None and progress.answered >= stop_after:
                task.cancel()

        return await run(staged.lines, journal, Echo(), on_progress=on_progress)

    try:
        progress = asyncio.run(batch())
        if progress.answered == progress.total:
            staged.finish()
        return progress
    finally:
        journal.close()


def write(name, rows):
    """Writes rows of plain values in the format that a name says."""
    if str(name).endswith("parquet"):
        parquet.write_table(arrow.Table.from_pylist(rows), name)
        return
    with open_output(str(name)) as file:
        if ".csv" in str(name):
            from pyarrow import csv

            csv.write_csv(arrow.Table.from_pylist(rows), file)
        else:
            file.write(b"".join(json.dumps(row).encode() + b"\n" for row in rows))


@pytest.mark.parametrize("target", ["out.parquet", "out.csv.gz", "out.csv.zst", "out.jsonl.zst", "out.jsonl"])
@pytest.mark.parametrize("source", ["in.parquet", "in.csv", "in.csv.zst", "in.jsonl.gz", "in.ndjson"])
def test_rows_keep_their_order_and_get_their_answers(tmp_path, source, target):
    write(tmp_path / source, [{"id": i, "question": prompt} for i, prompt in enumerate(PROMPTS)])
    answer(tmp_path / source, tmp_path / target, prompt_column="question", body={"max_tokens": 7})
    rows = list(tables.iter_rows(str(tmp_path / target)))
    assert [str(row["id"]) for row in rows] == [str(i) for i in range(5)]
    assert [row["answer"] or None for row in rows] == ["ONE", None, PROMPTS[2].upper(), None, "VIER"]
    assert [row["answer_error"] for row in rows][2::2] == [None, None]
    assert rows[1]["answer_error"] == "the row has no prompt"
    assert rows[3]["answer_error"] in ("empty", "the row has no prompt")
    assert [str(row["answer_completion_tokens"] or "") for row in rows[::2]] == ["7"] * 3
    assert rows[0]["answer_finish_reason"] == "stop" and not rows[0]["answer_reasoning"]


def test_column_types_are_kept(tmp_path):
    rows = [
        {"when": datetime.datetime(2026, 1, 2), "price": decimal.Decimal("1.50"), "tags": ["a"], "prompt": "x"},
        {"when": None, "price": None, "tags": [], "prompt": "y"},
    ]
    table = arrow.Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "in.parquet")
    answer(tmp_path / "in.parquet", tmp_path / "out.parquet", prompt_column="prompt", answer_column="said")
    found = parquet.read_table(tmp_path / "out.parquet")
    assert found.select(table.column_names).equals(table)
    assert found["said"].to_pylist() == ["X", "Y"]
    answer(tmp_path / "in.parquet", tmp_path / "out.csv", prompt_column="prompt")
    assert next(tables.iter_rows(str(tmp_path / "out.csv")))["tags"] == '["a"]'


def test_rows_of_csv_may_be_as_long_as_lines(tmp_path):
    long = "line\n" * 400_000
    write(tmp_path / "in.csv", [{"question": text} for text in ("one", long, "two")])
    assert [row["question"] for row in tables.iter_rows(str(tmp_path / "in.csv"))] == ["one", long, "two"]


def test_conversations_are_nested_or_json(tmp_path):
    messages = [{"role": "system", "content": "s", "name": None}, {"role": "user", "content": "hi", "name": "bob"}]
    write(tmp_path / "nested.parquet", [{"messages": messages}, {"messages": None}])
    write(tmp_path / "text.csv", [{"messages": json.dumps(messages[1:])}, {"messages": "rubbish"}])
    asked = list(tables.requests(str(tmp_path / "nested.parquet"), BatchOptions()))
    assert json.loads(asked[0])["body"]["messages"] == [{"role": "system", "content": "s"}, messages[1]]
    assert json.loads(asked[0])["custom_id"] == "row-1" and asked[1] == b"\n"
    asked = list(tables.requests(str(tmp_path / "text.csv"), BatchOptions()))
    assert [json.loads(each)["body"]["messages"] for each in asked] == [messages[1:], "rubbish"]


@pytest.mark.parametrize("body", [{"error": "no such model"}, {"choices": None}, {"choices": [{"text": 7}]}])
def test_an_answer_of_another_form_costs_no_other_row(tmp_path, monkeypatch, body):
    """Servers of other engines have errors of their own."""

    async def complete(self, url, asked):
        return Reply(400, "", body) if b"two" in asked else await echo(self, url, asked)

    echo = Echo.complete
    monkeypatch.setattr(Echo, "complete", complete)
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"q": "one"}\n{"q": "two"}\n')
    answer(source, target, prompt_column="q")
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert [(row["answer"], row["answer_error"]) for row in rows] == [("ONE", None), (None, "no answer")]


def test_a_conversation_that_is_nested_too_deep_is_left_to_the_server():
    deep = "[" * 100_000
    assert tables._messages(deep) == deep


def test_lines_with_messages_are_a_table_and_batch_lines_are_not(tmp_path):
    write(tmp_path / "in.jsonl", [{"messages": [{"role": "user", "content": "hi"}], "more": [1]}])
    answer(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    [row] = tables.iter_rows(str(tmp_path / "out.jsonl"))
    assert row["answer"] == "HI" and row["more"] == [1]
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "messages": 1}}
    write(tmp_path / "lines.jsonl.gz", [line])
    answer(tmp_path / "lines.jsonl.gz", tmp_path / "answers.jsonl.zst")
    [row] = tables.iter_rows(str(tmp_path / "answers.jsonl.zst"))
    assert row["custom_id"] == "a" and row["response"]["body"]["choices"][0]["text"] == "X"
    with pytest.raises(BatchError, match="jsonl"):
        answer(tmp_path / "lines.jsonl.gz", tmp_path / "answers.parquet")


def test_an_interrupted_table_is_resumed(tmp_path):
    source, target = tmp_path / "in.parquet", tmp_path / "out.parquet"
    write(source, [{"prompt": f"text {i}"} for i in range(20)])
    assert answer(source, target, prompt_column="prompt", stop_after=7).answered == 7
    assert not target.exists()
    done = answer(source, target, prompt_column="prompt")
    assert done.resumed >= 7 and done.resumed + done.succeeded == 20
    assert parquet.read_table(target)["answer"].to_pylist() == [f"TEXT {i}" for i in range(20)]
    before = target.read_bytes()
    assert answer(source, target, prompt_column="prompt").succeeded == 0
    assert target.read_bytes() == before
    with pytest.raises(BatchError, match="another input"):
        answer(source, target, prompt_column="prompt", body={"max_tokens": 3})


def test_an_output_of_unknown_origin_is_not_overwritten(tmp_path):
    write(tmp_path / "in.csv", [{"prompt": "x"}])
    (tmp_path / "out.csv").write_text("precious")
    with pytest.raises(BatchError, match="exists"):
        answer(tmp_path / "in.csv", tmp_path / "out.csv", prompt_column="prompt")
    assert (tmp_path / "out.csv").read_text() == "precious"


def test_a_change_of_the_table_during_a_run_is_an_error(tmp_path):
    write(tmp_path / "in.csv", [{"prompt": "x"}])
    staged = stage(str(tmp_path / "in.csv"), str(tmp_path / "out.csv"), BatchOptions(prompt_column="prompt"))
    write(tmp_path / "in.csv", [{"prompt": "x"}, {"prompt": "y"}])
    with pytest.raises(BatchError, match="changed"):
        staged.finish()


@pytest.mark.parametrize("target", ["out.parquet", "out.csv", "out.jsonl"])
def test_a_table_without_rows(tmp_path, target):
    parquet.write_table(arrow.table({"prompt": arrow.array([], arrow.string())}), tmp_path / "in.parquet")
    answer(tmp_path / "in.parquet", tmp_path / target, prompt_column="prompt")
    assert list(tables.iter_rows(str(tmp_path / target))) == []


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        ([{"a": "x"}], {}, "no column 'messages' among a; name the one to ask with --prompt_column"),
        ([{"a": "x"}], {"prompt_column": "b"}, "no column 'b'"),
        ([{"a": "x", "answer": "y"}], {"prompt_column": "a"}, "another --answer_column"),
    ],
)
def test_wrong_columns_are_refused_before_anything_runs(tmp_path, rows, options, words):
    write(tmp_path / "in.parquet", rows)
    with pytest.raises(BatchError, match=words):
        answer(tmp_path / "in.parquet", tmp_path / "out.parquet", **options)


@pytest.mark.parametrize("name", ["in.parquet", "in.csv.gz", "in.jsonl.zst", "nowhere.csv"])
def test_unreadable_files_are_named_in_the_error(tmp_path, name):
    if "nowhere" not in name:
        (tmp_path / name).write_bytes(b"\x00\xffrubbish" * 9)
    with pytest.raises(BatchError, match=name):
        answer(tmp_path / name, tmp_path / "out.jsonl", prompt_column="x")


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_a_compressed_file_that_was_cut_off_is_an_error(tmp_path, ending):
    """It ends in the middle of its rows, for example after a download that was interrupted."""
    name = tmp_path / f"in.jsonl.{ending}"
    with open_output(str(name)) as file:
        file.write(b"".join(b'{"prompt": "%d"}\n' % i for i in range(1000)))
    assert len(list(tables.iter_rows(str(name)))) == 1000
    name.write_bytes(name.read_bytes()[:-20])
    with pytest.raises(BatchError, match=rf"{name}: "):
        list(tables.iter_rows(str(name)))


def test_the_error_for_a_missing_library_has_the_install_command(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "in.parquet").write_bytes(b"")
    with pytest.raises(BatchError, match=r"pip install 'dsv3\[batch\]'"):
        answer(tmp_path / "in.parquet", tmp_path / "out.jsonl", prompt_column="x")


def test_urls_are_read_and_written(tmp_path):
    from fsspec.implementations.memory import MemoryFileSystem

    MemoryFileSystem.store.clear()
    with open_output("memory://folder/in.csv.gz") as file:
        file.write(b"prompt\nx\ny\n")
    answer("memory://folder/in.csv.gz", "memory://out.jsonl.zst", prompt_column="prompt", work_dir=str(tmp_path / "w"))
    assert [row["answer"] for row in tables.iter_rows("memory://out.jsonl.zst")] == ["X", "Y"]
    with pytest.raises(BatchError, match="--work_dir"):
        answer("memory://folder/in.csv.gz", "memory://other.jsonl", prompt_column="prompt")
    with pytest.raises(BatchError, match="nowhere"):
        answer("memory://nowhere.csv", str(tmp_path / "o.csv"), prompt_column="prompt")


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("a.parquet", FileFormat("parquet", None, False)),
        ("s3://b/a.CSV.GZ", FileFormat("csv", "gzip", True)),
        ("https://h/a.jsonl.zst?x=1.csv", FileFormat("lines", "zstd", True)),
        ("requests", FileFormat("lines", None, False)),
        ("x.gz", FileFormat("lines", "gzip", False)),
    ],
)
def test_names_determine_formats(name, form):
    assert detect_format(name) == form


def test_invalid_options_are_refused():
    for wrong in ({"body": {"prompt": 1}}, {"concurrency": 3}, {"priority": 2**31, "server": ("http://x",)}):
        with pytest.raises(ValueError):
            BatchOptions(**wrong)


@settings(max_examples=50)
@given(st.lists(st.binary(max_size=6), max_size=40))
def test_sorting_in_windows_keeps_every_line(bodies):
    lines = [RequestLine(i, str(i), "u", body) for i, body in enumerate(bodies, 1)]
    lines.insert(len(lines) // 2, BadLine(99, None, "c", "m"))
    found = list(sorted_in_windows(iter(lines)))
    assert sorted(each.number for each in found) == sorted(each.number for each in lines)
    asked = [each.body for each in found if isinstance(each, RequestLine)]
    assert asked == sorted(bodies)


def test_outputs_are_replaced_atomically(tmp_path):
    target = tmp_path / "out.jsonl.gz"
    with open_output(str(target)) as file:
        file.write(b"old")
    with pytest.raises(RuntimeError), open_output(str(target)) as file:
        file.write(b"new")
        raise RuntimeError
    with open_input(str(target)) as file:
        assert file.read() == b"old"
    assert formats.exists(str(target)) and not formats.exists(str(tmp_path / "no"))
