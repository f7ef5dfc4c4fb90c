"""The recipes for Ray Data and DuckDB in `examples/`, run as users do, and `dsv3.map`; they need the extra `batch`."""

import importlib.util
import os
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import pytest

import dsv3
from tests.dsv3.server import serving
from tests.dsv3.text import tiny

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
PROMPTS = ["hello there", "def add", "hello you"]


def needs(*modules):
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs the extra `batch`: no {', '.join(missing)}")


@pytest.fixture
def questions(tmp_path):
    import pyarrow as arrow
    from pyarrow import parquet

    path = tmp_path / "questions.parquet"
    parquet.write_table(arrow.table({"id": list(range(len(PROMPTS))), "prompt": PROMPTS}), path)
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving.running(tiny.write(tmp_path_factory.mktemp("model"))) as server:
        yield server


def asked_alone(server, prompt):
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 32}
    return server.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]


BOTH_FORMS = """
import sys
import ray.cloudpickle
sys.path.insert(0, sys.argv[1])
sys.modules["httpx"] = None  # the extra `batch` does not bring it
import ray_data
ray.cloudpickle.register_pickle_by_value(ray_data)
ray.init(num_cpus=4, include_dashboard=False, logging_level="error")
for form in ("", "--actors"):
    ray_data.main(*sys.argv[2:4], sys.argv[4] + form, form)
"""


@needs("ray", "pyarrow", "pandas")
def test_ray_data(server, questions, tmp_path):
    """Both forms in one process: Ray takes most of the time to start."""
    from pyarrow import parquet

    command = [sys.executable, "-c", BOTH_FORMS, str(EXAMPLES), server.url, str(questions), str(tmp_path / "out")]
    # Ray's workers give way to everybody (niceness 15): beside four busy processes they get next to nothing.
    environment = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=os.environ | environment)
    assert done.returncode == 0, done.stderr[-3000:]
    for form in ("out", "out--actors"):
        rows = sorted(parquet.read_table(tmp_path / form).to_pylist(), key=lambda row: row["id"])
        assert [(row["id"], row["prompt"]) for row in rows] == list(enumerate(PROMPTS))
        assert [row["answer"] for row in rows] == [asked_alone(server, prompt) for prompt in PROMPTS]


@needs("duckdb", "pyarrow")
def test_duckdb(server, questions, tmp_path, monkeypatch):
    import duckdb
    from pyarrow import parquet

    monkeypatch.chdir(tmp_path)
    between = "-- python -m launch.batch requests.jsonl answers.jsonl"
    before, after = (EXAMPLES / "duckdb_batch.sql").read_text().split(between)
    duckdb.connect().execute(before)
    command = [sys.executable, "-m", "launch.batch", "requests.jsonl", "answers.jsonl", f"--server={server.url}"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": str(serving.ROOT)}
    )
    assert done.returncode == 0, done.stderr
    duckdb.connect().execute(after)
    rows = parquet.read_table("answers.parquet").to_pylist()
    assert [(row["prompt"], row["status"], row["error"]) for row in rows] == [(p, 200, None) for p in PROMPTS]
    assert all(row["answer"] for row in rows)


class Parrot:
    """A model that repeats; it notes the order in which it was asked."""

    def __init__(self):
        self.asked = []

    def generate(self, prompts, params=None, errors="raise"):
        self.asked += prompts
        return [self._output(prompt) for prompt in prompts]

    def chat(self, conversations, params=None, errors="raise"):
        self.asked += [messages[-1]["content"] for messages in conversations]
        return [self._output(messages[-1]["content"]) for messages in conversations]

    def _output(self, text):
        if text == "bad":
            return SimpleNamespace(outputs=[SimpleNamespace(text="", error="not finite", finish_reason="error")])
        return SimpleNamespace(outputs=[SimpleNamespace(text=text.upper(), error=None, finish_reason="stop")])


CELLS = ["b", None, "a", "bad", ""]


def tables():
    yield "list", lambda: [{"prompt": cell} for cell in CELLS]
    yield "pyarrow", lambda: importlib.import_module("pyarrow").table({"prompt": CELLS})
    yield "pandas", lambda: importlib.import_module("pandas").DataFrame({"prompt": CELLS})


@needs("pyarrow", "pandas")
@pytest.mark.parametrize(("kind", "make"), list(tables()), ids=lambda value: value if isinstance(value, str) else "")
def test_map_keeps_type_and_order(kind, make):
    llm, table = Parrot(), make()
    found = dsv3.map(table, llm=llm)
    assert type(found) is type(table)
    rows = found if kind == "list" else found.to_pylist() if kind == "pyarrow" else found.to_dict("records")
    assert [row["answer"] if isinstance(row["answer"], str) else None for row in rows] == ["B", None, "A", None, ""]
    assert [row["answer_error"] for row in rows][3] == "not finite"
    assert llm.asked == sorted(llm.asked), "rows that begin alike come after each other"


def test_map_says_what_is_wrong():
    rows = [{"prompt": "x", "answer": "y"}]
    for wrong, error in (({}, ValueError), ({"column": "z"}, KeyError)):
        with pytest.raises(error):
            dsv3.map(rows, llm=Parrot(), **wrong)
    with pytest.raises(TypeError):
        dsv3.map(7, llm=Parrot())


def test_map_takes_conversations_and_raw_prompts():
    conversation = [{"role": "system", "content": "s", "name": None}, {"role": "user", "content": "hi"}]
    [row] = dsv3.map([{"c": conversation}], "c", llm=Parrot(), into="said")
    assert row["said"] == "HI" and row["c"] == conversation
    [row] = dsv3.map([{"c": "continue"}], "c", llm=Parrot(), raw=True)
    assert row["answer"] == "CONTINUE"
