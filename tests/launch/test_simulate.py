"""`python -m launch.simulate` on the command line, with given step times in place of compiled ones."""

import json
import subprocess
import sys

import msgspec
import pytest

from configs.deepseek_v3 import DEEPSEEK_V3
from configs.deployments import NODE_8XH200
from tests.tools.simulate.tables import table
from tools.simulate.from_plan import times_digest
from tools.simulate.times import write_times


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launch.simulate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture
def times(tmp_path) -> str:
    known = msgspec.structs.replace(table(ranks=2), digest=times_digest(DEEPSEEK_V3, NODE_8XH200))
    write_times(tmp_path / "times.json", {"node_8xh200": known})
    return f"--times={tmp_path / 'times.json'}"


def test_a_trace_is_replayed_and_drawn(tmp_path, times) -> None:
    trace, figures, picture = (tmp_path / name for name in ("trace.jsonl", "out.json", "day.svg"))
    line = {"timestamp": 100, "input_length": 600, "output_length": 7, "hash_ids": [1, 2]}
    trace.write_text("\n".join(json.dumps(line | {"timestamp": 1000 * i}) for i in range(30)))
    arguments = [f"--trace={trace}", f"--json={figures}", f"--plot={picture}", "--max_model_len=1024"]
    result = simulate("--instances=node_8xh200", times, *arguments, "--goodput=ttft:60000")
    assert result.returncode == 0, result.stderr
    assert "30 arrived, 0 unfinished, 30 answered" in result.stdout and "modelled: step times" in result.stdout
    found = json.loads(figures.read_text())
    assert found["requests"] == {"arrived": 30, "answered": 30, "unfinished": 0}
    assert found["goodput"]["share"] == 1.0
    assert "<svg" in picture.read_text()


def test_an_error_is_one_line_with_status_2(tmp_path, times) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 1, "input_length": "x"}')
    result = simulate("--instances=node_8xh200", times, f"--trace={trace}")
    assert result.returncode == 2
    assert "line 1: Expected `int`, got `str`" in result.stderr and "Traceback" not in result.stderr
