"""`launch.tune` on a toy model: what it measures, and the file that it writes and an engine reads."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from dsv3.config.options import EngineOptions
from dsv3.engine.build import bundled_model, load_components
from tests.dsv3.engine.conftest import parts
from tests.dsv3.engine.fewer import greedy_samplers
from tools.tune import run, steps
from tools.tune.selection import Outcome

ROOT = Path(__file__).parents[3]


@pytest.fixture
def toy_model(monkeypatch):
    monkeypatch.setattr(run, "load_components", lambda *_, **__: parts(num_ranks=1, num_pages=20))
    monkeypatch.setattr(steps, "_ROUNDS", 1)
    monkeypatch.setattr(steps, "_DECODE_STEPS", 2)


def test_steps_are_measured_and_an_engine_takes_what_was_chosen(tmp_path, toy_model, monkeypatch) -> None:
    timed: list[tuple[str, list[int]]] = []

    def choose(candidates, times, default, required):
        timed.append((str(times.shape), list(candidates)))
        return (1, 2, candidates[-1]), 1.5

    monkeypatch.setattr(steps, "choose_sizes", choose)
    lines: list[str] = []
    file = tmp_path / "tuning.json"
    with greedy_samplers():
        run.tune(bundled_model(), EngineOptions(), file, 1000.0, say=lines.append)
    assert timed == [("(1, 3)", [1, 2, 4]), ("(1, 3)", [32, 64, 100])]
    assert lines[0] == "max_num_batched_tokens: 100 stays"
    assert lines[1] == "decode_batch_sizes: 1,4 -> 1,2,4, 1.50 times as fast"
    written = json.loads(file.read_text())
    assert written["options"] == {"decode_batch_sizes": "1,2,4", "prefill_batch_sizes": "1,2,100"}
    assert written["measured"][1]["default"] == "1,4"
    options = EngineOptions(tuning=str(file), max_num_seqs=3, max_model_len=64)
    served = load_components(bundled_model(), options, shapes=True)
    assert (served.cfg.decode_buckets, served.cfg.prefill_buckets) == ((1, 2, 3), (1, 2, 100, 1024))


def test_sizes_that_do_not_compile_within_the_budget_are_not_tried() -> None:
    made = parts(num_ranks=1, num_pages=7, max_num_seqs=64, max_model_len=128)
    decode, prefill = run._affordable(made, 1000.0, 1.0)
    assert (decode, prefill) == ([1, 2, 4, 8, 16, 24, 32, 48, 64], [32, 64, 100])
    fewer = run._affordable(made, 20.0, 1.0)
    assert sum(map(len, fewer)) == 10
    assert {1, 4, 16, 64} <= {*fewer[0]} and {64, 100} <= {*fewer[1]}
    assert run._affordable(made, 1.0, 1.0) is None


def test_the_number_of_drafts_is_chosen_by_batch_size(tmp_path, monkeypatch) -> None:
    drafts = {"method": "ngram"}
    components = parts(num_ranks=1, num_pages=20, tokens_per_row=2, speculative_config=drafts)
    limits: list[tuple[int, object]] = []

    class Played:
        def __init__(self, components, cfg, tokens, requests):
            limits.append((cfg.tokens_per_row, cfg.speculative_config))
            self._drafts = cfg.tokens_per_row - 1

        def answer(self, prompts, tokens):
            return 4.0 - self._drafts if len(prompts) == 1 else 1.0 + self._drafts

        def close(self):
            pass

    monkeypatch.setattr(steps, "TimedEngine", Played)
    chosen, outcomes = steps.tune_drafts(components, [[1, 2, 3]])
    by_size = [[1, 1, 3], [2, 2**31 - 1, 0]]
    assert limits[0] == (1, None) and limits[3][0] == 4
    assert chosen == {"speculative_config": {**drafts, "num_speculative_tokens_per_batch_size": by_size}}
    assert outcomes == [Outcome("drafts of 1 requests", "1", "3", 3.0), Outcome("drafts of 4 requests", "1", "0", 2.0)]
    limited = run._limited(components, **chosen)
    assert limited.cfg.tokens_per_row == 4 and dataclasses.replace(limited.cfg).width(4) == 1


def test_prompts_come_from_a_file_of_lines(tmp_path) -> None:
    (tmp_path / "texts").write_text("def add(a, b):\n\nimport os\n")
    assert len(run._prompts(bundled_model(), tmp_path / "texts")) == 2
    assert len(run._prompts(bundled_model(), None)) == 16
    (tmp_path / "texts").write_text("\n")
    with pytest.raises(ValueError, match="has no text"):
        run._prompts(bundled_model(), tmp_path / "texts")


def test_the_command_refuses_what_it_cannot_write(tmp_path) -> None:
    """Each command has its own process, because commands share names of flags."""
    wrong = {f"--output={tmp_path}": "is not a file in a directory that exists", "--tuning=x": "name it with --output"}
    for argument, words in wrong.items():
        done = subprocess.run([sys.executable, "-m", "launch.tune", argument], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 2 and words in done.stderr
