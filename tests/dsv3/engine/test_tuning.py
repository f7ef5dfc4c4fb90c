"""The file of `launch.tune`: an engine uses it where it was made, and starts with any other file too."""

import json
import logging

import pytest

from dsv3.config.options import EngineOptions
from dsv3.engine.build import bundled_model
from dsv3.engine.tuning import Tuning, apply_tuning, made_for, write_tuning
from pallas_kernels import tuned

MODEL = bundled_model()
PLANS = {"product on a CPU 1 x 2 x 3 x float32 x alone": "XLA"}


@pytest.fixture(autouse=True)
def _no_plans_later(caplog):
    caplog.set_level(logging.INFO)
    yield
    tuned.set_plans({})


def written(path, options=None, **changes) -> str:
    tuning = Tuning(made_for(MODEL) | changes, options or {}, PLANS)
    write_tuning(path, tuning)
    return str(path)


def test_a_file_adds_what_was_not_given(tmp_path, caplog) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 8, 3]]}
    found = {"decode_batch_sizes": "1,8", "max_num_batched_tokens": 512, "speculative_config": drafts}
    path = written(tmp_path / "t.json", found)
    options = apply_tuning(EngineOptions(tuning=path, max_num_batched_tokens=256), MODEL)
    assert (options.decode_sizes, options.max_num_batched_tokens) == ((1, 8), 256)
    assert options.speculative_config is None and tuned.plans() == PLANS
    assert f"tuning: {path} sets decode_batch_sizes 1,8; its 1 plans of kernels are used" in caplog.messages

    asked = {"method": "ngram", "prompt_lookup_max": 4}
    options = apply_tuning(EngineOptions(tuning=path, speculative_config=asked), MODEL)
    assert options.speculative_config == {**drafts, **asked}
    for other in ({"method": "ngram", "num_speculative_tokens": 1}, {"method": "mtp"}):
        assert apply_tuning(EngineOptions(tuning=path, speculative_config=other), MODEL).speculative_config == other

    apply_tuning(EngineOptions(tuning=path, batch_invariant=True), MODEL)
    assert caplog.messages[-1].endswith("are not used, because of batch_invariant")
    apply_tuning(EngineOptions(), MODEL)
    assert tuned.plans() == {}  # an engine without a file has none of an earlier one


@pytest.mark.parametrize("name", ["device", "code", "jax", "model config"])
def test_a_file_for_another_machine_model_or_version_is_ignored(tmp_path, caplog, name) -> None:
    asked = EngineOptions(tuning=written(tmp_path / "t.json", {"decode_batch_sizes": "2"}, **{name: "other"}))
    assert apply_tuning(asked, MODEL) == asked and tuned.plans() == {}
    assert f"is ignored: it was made for {name} other (here " in caplog.messages[-1]


RUBBISH = {
    "nothing": b"",
    "no JSON": b"\x00\xff\x80",
    "a list": b"[]",
    "deep": b'{"made_for": {}, "plans": {}, "options": {"a": ' + b"[" * 100_000,
    "a plan that is no text": b'{"made_for": {}, "options": {}, "plans": {"a": 1}}',
    "more": b'{"made_for": {}, "options": {}, "plans": {}, "more": 1}',
    "large": b" " * ((1 << 24) + 1),
}
VALUES = {
    "no option": {"model": "x"},
    "no size": {"decode_batch_sizes": "1,zero"},
    "no text": {"decode_batch_sizes": 4},
    "too small": {"max_num_batched_tokens": 0},
    "no method": {"speculative_config": {"method": "guess"}},
    "no object": {"speculative_config": [1]},
}


@pytest.mark.parametrize("case", [*RUBBISH, *VALUES, "a folder", "no file"])
def test_an_engine_starts_with_any_file(tmp_path, caplog, case) -> None:
    path = tmp_path / "t.json"
    if case in RUBBISH:
        path.write_bytes(RUBBISH[case])
    elif case in VALUES:
        written(path, VALUES[case])
    elif case == "a folder":
        path.mkdir()
    asked = EngineOptions(tuning=str(path), speculative_config={"method": "ngram"})
    assert apply_tuning(asked, MODEL) == asked and tuned.plans() == {}
    assert caplog.messages[-1].startswith(f"tuning: {path} is ignored: ")


def test_a_file_is_complete_or_absent(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "tunings"
    folder.mkdir()
    path = folder / "t.json"
    written(path)
    assert json.loads(path.read_text())["plans"] == PLANS
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        written(path)
    assert [each.name for each in folder.iterdir()] == ["t.json"]
