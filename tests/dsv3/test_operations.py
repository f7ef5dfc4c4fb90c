"""Other weights while serving, pauses, and sleep: texts are those of a fresh model, and no prefix outlives its weights.

One model compiles what all tests use. `engine/test_replaced_weights.py` compares the leaves.
"""

import gc
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from dsv3 import LLM, SamplingParams
from dsv3.checkpoint.writer import save_hf
from dsv3.engine import control, weights
from dsv3.engine.operations import (
    ContinueGeneration,
    OperationRefused,
    PauseGeneration,
    Sleep,
    UpdateWeights,
    WeightsLost,
)
from dsv3.scheduler.request import NotServing
from tests.dsv3.engine.driving import Gathered, begin_update, drain, request, take
from tests.dsv3.engine.fewer import greedy_samplers, one_bucket
from tests.dsv3.model.golden import DIRECTORY, model

# Greedy tokens must be those of another engine.
pytestmark = [pytest.mark.optimised, pytest.mark.usefixtures("others_collected")]
PROMPT = [(7 * i) % 250 + 4 for i in range(100)]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
FIRST = DIRECTORY / "greedy"
LIMITS = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64}


def made(directory: Path) -> LLM:
    with one_bucket(), greedy_samplers():
        return LLM(directory, progress=False, **LIMITS)


def perturbed():
    rng, (params, cfg) = np.random.default_rng(0), model("greedy")
    return jax.tree.map(lambda leaf: np.asarray(leaf) + rng.normal(0, 0.02, leaf.shape).astype(leaf.dtype), params), cfg


@pytest.fixture(scope="module")
def second(tmp_path_factory) -> Path:
    """The greedy set's model with other weights."""
    directory, (params, cfg) = tmp_path_factory.mktemp("models") / "second", perturbed()
    save_hf(directory, cfg, params)
    return directory


@pytest.fixture(scope="module")
def texts(second) -> dict[str, list[int]]:
    """The tokens that fresh models continue the prompt with."""
    found = {}
    for name, directory in (("first", FIRST), ("second", second)):
        with made(directory) as llm:
            found[name] = tokens(llm)
    assert found["first"] != found["second"]
    return found


@pytest.fixture(scope="module")
def shared() -> Iterator[LLM]:
    with made(FIRST) as llm:
        yield llm


@pytest.fixture
def llm(shared) -> LLM:
    """The model with the weights of the start; a failed test leaves it usable."""
    shared.wake()
    shared.update_weights(FIRST, "default")
    return shared


def tokens(llm: LLM) -> list[int]:
    return llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids


def cached(llm: LLM) -> int:
    return llm.generate(PROMPT, GREEDY)[0].num_cached_tokens


def test_texts_are_those_of_a_fresh_model_and_prefixes_are_found_under_their_weights_alone(llm, second, texts) -> None:
    programs = dict(llm.engine.executor.devices.programs._compiled)
    sources = {"tree": perturbed()[0], "mapping": load_file(second / "model.safetensors"), "directory": str(second)}
    for version, source in sources.items():
        assert tokens(llm) == texts["first"] and cached(llm) == 64
        llm.update_weights(source, version)
        [output] = llm.generate(PROMPT, GREEDY)
        assert (output.outputs[0].token_ids, output.num_cached_tokens) == (texts["second"], 0)
        assert (output.weight_version, llm.weight_version) == (version, version)
        assert output.outputs[0].weight_versions == [(0, version)] and cached(llm) == 64
        llm.update_weights(FIRST)
        assert cached(llm) == 0
    assert llm.weight_version == str(llm.engine.control._num_updates)  # an update without a name has its number
    assert llm.engine.stats().recompilations == 0
    assert programs == llm.engine.executor.devices.programs._compiled


def test_prefix_keys_of_equal_directories_are_equal_on_every_instance(llm, second) -> None:
    """A decode instance finds the pages of a prefill instance that has read the same files."""
    llm.update_weights(second, "3")
    keys = llm.engine.rules.weights
    llm.update_weights(second, "4")
    assert llm.engine.rules.weights != keys
    llm.update_weights(second, "3")
    assert llm.engine.rules.weights == keys


def test_requests_finish_continue_end_or_are_computed_again(llm, second, texts) -> None:
    """Each begins with the first weights; another one arrives after the update was asked for."""
    engine, found = llm.engine, {}
    for mode in ("wait", "keep", "abort", "retract"):
        gathered: dict[str, Gathered] = {}
        engine.add(request(f"early {mode}", PROMPT, max_tokens=24, ignore_eos=True))
        while len(gathered.get(f"early {mode}", Gathered()).tokens) < 8:
            take(engine.step(), gathered)
        done = begin_update(engine, UpdateWeights(str(second), mode, mode), gathered)
        take(engine.step(), gathered)
        engine.add(request(f"late {mode}", PROMPT, max_tokens=24, ignore_eos=True))
        drain(engine, gathered)
        assert done.result(0) is None
        found[mode], late = gathered[f"early {mode}"], gathered[f"late {mode}"]
        versions = [output.weight_version for output in found[mode].outputs if output.weight_version]
        assert versions == (["default", mode] if mode in ("keep", "retract") else ["default"])
        assert [output.weight_version for output in late.outputs if output.weight_version] == [mode]
        assert late.tokens == texts["second"]
        llm.update_weights(FIRST, "default")
    assert found["wait"].tokens == texts["first"]
    ended = found["abort"]
    assert ended.finish_reason == "abort" and ended.tokens == texts["first"][: len(ended.tokens)]
    assert len(found["keep"].tokens) == 24 and engine.stats().pages_in_use == 0
    again, outputs = found["retract"].tokens, found["retract"].outputs
    changed = next(i for i, output in enumerate(outputs) if output.weight_version == "retract")
    before = sum(len(output.token_ids) for output in outputs[:changed])
    assert 8 <= before < 24 and again[:before] == texts["first"][:before]
    llm.update_weights(second)
    rest = SamplingParams(temperature=0, max_tokens=24 - before, ignore_eos=True)
    assert again[before:] == llm.generate([[*PROMPT, *again[:before]]], rest)[0].outputs[0].token_ids


def test_a_paused_engine_takes_requests_and_launches_none(llm, second, texts) -> None:
    engine, gathered = llm.engine, {}
    for name in ("kept", "aborted"):
        engine.add(request(name, PROMPT, max_tokens=24, ignore_eos=True))
    for _ in range(6):
        take(engine.step(), gathered)
    done = engine.operate(PauseGeneration("keep"))
    take(engine.step(), gathered)
    assert done.done() and engine.state.is_paused and not engine.has_work
    steps = engine.stats().steps
    engine.add(request("new", PROMPT, max_tokens=24, ignore_eos=True))
    engine.abort(request("aborted", PROMPT).request_id)
    drain(engine, gathered)
    assert engine.stats().steps == steps and gathered["aborted"].finish_reason == "abort" and "new" not in gathered
    with pytest.raises(OperationRefused, match="'wait', but the engine is paused and has requests"):
        llm._operate(Sleep(1, "wait"))
    llm.update_weights(second, "paused")  # it stays so
    assert engine.state.is_paused
    engine.operate(ContinueGeneration())
    drain(engine, gathered)
    assert gathered["new"].tokens == texts["second"] and len(gathered["kept"].tokens) == 24
    assert engine.stats().pages_in_use == 0


def test_an_update_reaches_a_generation_of_another_thread(llm, second, texts) -> None:
    outputs, before = [], llm.engine.scheduler.generated_tokens
    longer = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    thread = threading.Thread(target=lambda: outputs.extend(llm.generate([PROMPT] * 12, longer)))
    thread.start()
    while llm.engine.scheduler.generated_tokens == before:
        time.sleep(1e-3)
    llm.update_weights(second, "other", mode="retract")
    thread.join()
    versions = [output.outputs[0].weight_versions for output in outputs]
    assert any(len(each) == 2 for each in versions) and versions[-1] == [(0, "other")]
    assert outputs[-1].outputs[0].token_ids[:24] == texts["second"]


def test_steps_run_while_an_update_is_planned_and_files_that_are_gone_then_are_missed_before_anything_changes(
    llm, second, texts, tmp_path, monkeypatch
) -> None:
    engine, directory, may_plan, gathered = llm.engine, tmp_path / "changing", threading.Event(), {}
    plan = weights.plan_params
    monkeypatch.setattr(weights, "plan_params", lambda *a, **more: may_plan.wait(60) and plan(*a, **more))
    shutil.copytree(second, directory)
    engine.add(request("early", PROMPT, max_tokens=24, ignore_eos=True))
    done = engine.operate(UpdateWeights(str(directory), "gone"))
    while "early" not in gathered or gathered["early"].finish_reason is None:
        take(engine.step(), gathered)
    assert gathered["early"].tokens == texts["first"] and not done.done()
    engine.add(request("late", PROMPT, max_tokens=24, ignore_eos=True))
    take(engine.step(), gathered)
    may_plan.set()
    engine.control._planning[1].result(60)
    shutil.rmtree(directory)
    drain(engine, gathered)
    with pytest.raises(OperationRefused, match="changing"):
        done.result(0)
    assert gathered["late"].tokens == texts["first"] and llm.weight_version == "default"


def test_an_update_whose_files_vanish_last_of_all_is_refused(llm, second, texts, monkeypatch) -> None:
    monkeypatch.setattr(control, "_weights_key", Mock(side_effect=FileNotFoundError("model.safetensors")))
    with pytest.raises(OperationRefused, match=r"model\.safetensors"):
        llm.update_weights(second)
    assert tokens(llm) == texts["first"]


def test_scores_that_another_thread_ends_are_no_scores(llm) -> None:
    for operation in (PauseGeneration("abort"), ContinueGeneration()):
        llm.engine.operate(operation)
    with pytest.raises(RuntimeError, match="sequence 0 ended before it was scored: abort"):
        llm.score([PROMPT])


def test_a_failure_in_the_middle_serves_nothing_until_an_update_succeeds(llm, second, texts, monkeypatch) -> None:
    arrive, calls = weights._arrive, []

    def failing(*arguments, **more):
        calls.append(1)
        if len(calls) == 5:
            raise MemoryError("no room")
        return arrive(*arguments, **more)

    engine, gathered = llm.engine, {}
    engine.add(request("running", PROMPT, max_tokens=24, ignore_eos=True))
    for _ in range(6):
        take(engine.step(), gathered)
    with monkeypatch.context() as patch:
        patch.setattr(weights, "_arrive", failing)
        done = begin_update(engine, UpdateWeights(perturbed()[0], None, "keep"), gathered)
        drain(engine, gathered)
        with pytest.raises(WeightsLost, match="has failed \\(MemoryError\\); update them again"):
            done.result(0)
    assert gathered["running"].finish_reason == "error" and "has failed" in gathered["running"].last.error
    for _ in range(2):
        with pytest.raises(NotServing, match="update them again"):
            tokens(llm)
        with pytest.raises(OperationRefused, match="has neither model"):
            llm.update_weights(second.parent)
    with pytest.raises(OperationRefused, match="level: 1 keeps weights, but"):
        llm.sleep(1)
    llm.update_weights(second, "whole")
    assert tokens(llm) == texts["second"]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(weights, "_arrive", Mock(side_effect=KeyboardInterrupt))
        llm.update_weights(perturbed()[0])
    with pytest.raises(NotServing, match="KeyboardInterrupt"):
        tokens(llm)


def live() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def test_sleep_returns_the_memory_and_keeps_the_programs(llm, second, texts) -> None:
    assert tokens(llm) == texts["first"] and cached(llm) == 64
    weights_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(llm.engine.executor.devices.params))
    full = live()
    for level in (1, 2):
        llm.sleep(level)
        devices = llm.engine.executor.devices
        pages = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(devices.layout.pages))
        assert full - live() > weights_bytes + pages
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(devices.params))
        for refused in (lambda: tokens(llm), lambda: llm.inspect([1, 2]), lambda: llm.update_weights(second)):
            with pytest.raises((NotServing, OperationRefused), match="sleeps"):
                refused()
        with pytest.raises(OperationRefused, match=f"^level: {3 - level}, but the engine sleeps at level {level}"):
            llm.sleep(3 - level)
        llm.sleep(level)
        llm.wake()
        if level == 2:
            with pytest.raises(NotServing, match="dropped by sleep level 2; update them"):
                tokens(llm)
            llm.update_weights(second, "after sleep")
        assert cached(llm) == 0 and tokens(llm) == texts["first" if level == 1 else "second"]
        assert live() == full
    assert llm.engine.stats().recompilations == 0


def test_a_sleeping_model_can_be_closed(second, monkeypatch) -> None:
    monkeypatch.setattr("dsv3.engine.engine.Engine.warm_up", lambda *_: None)
    before = live()
    for level in (1, 2):
        with LLM(second, progress=False, **LIMITS) as sleeping:
            sleeping.sleep(level)
        assert live() == before
