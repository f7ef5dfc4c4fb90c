"""The engine with a program that expands cached tokens, as on a GPU: transformers' texts, chunk by chunk."""

import dataclasses

import pytest

from dsv3.config.options import EngineOptions
from dsv3.engine.build import build_engine
from dsv3.model import forms
from dsv3.model.batch import AttentionForm
from tests.dsv3.engine.driving import request, run
from tests.dsv3.engine.fewer import greedy_samplers, one_bucket
from tests.dsv3.model.golden import DIRECTORY, data


def test_chunks_take_the_program_that_the_host_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 16 tokens: without cached ones and after few absorbed, after more expanded, up to the room."""
    monkeypatch.setattr(forms, "LOOKING", ())
    costs = {"room": lambda *_: 256, "pays": lambda model, peaks, tokens, pairs, *_: pairs > 100}
    row = dataclasses.replace(forms.FORMS[AttentionForm.MATERIALIZED], **costs)
    monkeypatch.setitem(forms.FORMS, AttentionForm.MATERIALIZED, row)
    limits = {"dtype": "float32", "max_num_seqs": 2, "max_model_len": 128, "max_num_batched_tokens": 16}
    with one_bucket(), greedy_samplers():
        engine = build_engine(DIRECTORY / "glm4_moe_lite", EngineOptions(**limits), progress=False)
    golden, taken, programs = data("glm4_moe_lite"), [], engine.executor.devices.programs
    get = programs.get

    def noted(key):
        taken.append((key.kind, key.variant))
        return get(key)

    monkeypatch.setattr(programs, "get", noted)
    prompts = [row[row >= 0].tolist() for row in golden["prompts"][2:8]]
    assert max(map(len, prompts)) > 32
    found = run(engine, *(request(str(i), p, max_tokens=6, ignore_eos=True) for i, p in enumerate(prompts)))
    assert [found[str(i)].tokens for i in range(6)] == golden["greedy"][2:8, :6].tolist()
    assert {variant for kind, variant in taken if kind == "prefill"} == {
        AttentionForm.NEW,
        AttentionForm.ABSORBED,
        AttentionForm.MATERIALIZED,
    }
    assert (engine.stats().pages_in_use, engine.stats().recompilations) == (0, 0)
