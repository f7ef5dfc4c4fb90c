"""The notebook interface on a small random model, and the engine token for token against transformers."""

import dataclasses
import gc
import json
import subprocess
import sys
import weakref
from pathlib import Path
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest

import dsv3
from dsv3 import LLM, SamplingParams, StructuredOutputsParams
from dsv3.checkpoint.writer import save_hf
from dsv3.engine.device.programs import Key
from dsv3.kv_cache.tiers import host_pool
from dsv3.scheduler.request import InvalidRequest
from tests.dsv3.engine.fewer import one_bucket
from tests.dsv3.model.golden import DIRECTORY, model
from tests.dsv3.text import tiny

# Greedy text must be that of a server.
pytestmark = [pytest.mark.optimised, pytest.mark.usefixtures("others_collected")]


@pytest.fixture(scope="module")
def greedy() -> dict:
    """32 prompts and the 64 tokens transformers continues each with, greedily, in float32."""
    return json.loads((DIRECTORY / "greedy" / "greedy.json").read_text())


LIMITS = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """The greedy set's model with a tokenizer beside it, and its vocabulary made wide enough for that.

    The rows added are zero: their logits are 0, which is never the largest in the greedy set.
    """
    directory = tmp_path_factory.mktemp("models") / "model"
    params, cfg = model("greedy")
    rows = ((0, 512 - cfg.vocab_size), (0, 0))
    wide = dataclasses.replace(params, embed=np.pad(params.embed, rows), head=np.pad(params.head, rows))
    save_hf(directory, dataclasses.replace(cfg, vocab_size=512), wide)
    (directory / "generation_config.json").write_text('{"do_sample": false}')
    return tiny.write(directory)


@pytest.fixture(scope="module")
def llm(directory) -> LLM:
    with one_bucket():
        return LLM(directory, progress=False, enable_return_routed_experts=True, **LIMITS)


def test_greedy_text_is_transformers_token_for_token(llm, greedy):
    length = len(greedy["greedy"][0])
    outputs = llm.generate(greedy["prompts"], SamplingParams(temperature=0, max_tokens=length, ignore_eos=True))
    assert [o.outputs[0].token_ids for o in outputs] == greedy["greedy"]
    stats = llm.engine.stats()
    assert (stats.pages_in_use, stats.recompilations) == (0, 0)


def test_the_fields_of_an_output(llm):
    [output] = llm.generate("def add(x", SamplingParams(temperature=0, max_tokens=7, logprobs=2, ignore_eos=True))
    [answer] = output.outputs
    assert output.prompt == "def add(x"
    assert output.prompt_token_ids == llm.tokenizer.encode("def add(x")
    assert (answer.index, answer.finish_reason, len(answer.token_ids), len(answer.logprobs)) == (0, "length", 7, 7)
    assert answer.text == llm.tokenizer.decode(answer.token_ids)


def test_prompts_of_both_kinds_keep_their_order(llm):
    prompts = ["def", [1, 2, 3], "The quick"]
    params = [SamplingParams(max_tokens=n, seed=0, ignore_eos=True) for n in (9, 1, 4)]
    outputs = llm.generate(prompts, params)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [9, 1, 4]
    assert [o.prompt for o in outputs] == ["def", None, "The quick"]
    assert outputs[1].prompt_token_ids == [1, 2, 3]


def test_n_answers_differ_and_a_seed_brings_them_back(llm):
    params = SamplingParams(n=3, seed=5, max_tokens=12, ignore_eos=True)
    first, second = (llm.generate("def", params)[0] for _ in range(2))
    texts = [tuple(a.token_ids) for a in first.outputs]
    assert len(set(texts)) == 3
    assert texts == [tuple(a.token_ids) for a in second.outputs]


def test_a_stop_string_ends_the_text_before_the_engine_does(llm):
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    whole = llm.generate([3, 4, 5], params)[0].outputs[0]
    stop = whole.text[8:10]
    cut = llm.generate([3, 4, 5], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=(stop,)))
    answer = cut[0].outputs[0]
    assert answer.text == whole.text[: whole.text.index(stop)]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]
    assert llm.engine.stats().pages_in_use == 0


def test_chat_writes_the_template(llm):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    [output] = llm.chat(messages, SamplingParams(max_tokens=2, ignore_eos=True))
    assert output.prompt == f"{tiny.BOS}Be brief.{tiny.USER}hi{tiny.ASSISTANT}</think>"
    assert output.prompt_token_ids.count(llm.tokenizer.bos_token_id) == 1
    several = llm.chat([messages, messages[1:]], SamplingParams(max_tokens=1), chat_template_kwargs={"thinking": True})
    assert [o.prompt.endswith("<think>") for o in several] == [True, True]


def test_without_parameters_the_models_defaults_apply(llm):
    """Those of generation_config.json, as in a server: here greedy."""
    [silent] = llm.generate([250, 4, 5])
    greedy = SamplingParams(temperature=0, max_tokens=len(silent.outputs[0].token_ids))
    assert llm.generate([250, 4, 5], greedy)[0].outputs[0].token_ids == silent.outputs[0].token_ids


def test_chat_shows_tools_where_the_template_does(llm, monkeypatch):
    tools = [{"type": "function", "function": {"name": "find"}}]
    params, messages = SamplingParams(max_tokens=1), [{"role": "user", "content": "hi"}]
    monkeypatch.setattr(llm, "_template", None)
    monkeypatch.setattr(llm.tokenizer, "chat_template", "{{ messages[0].content }}")
    with pytest.raises(ValueError, match="tools: this model's chat template does not show them"):
        llm.chat(messages, params, tools=tools)
    monkeypatch.setattr(llm, "_template", None)
    monkeypatch.setattr(llm.tokenizer, "chat_template", "{{ tools[0].function.name }} {{ messages[0].content }}")
    assert llm.chat(messages, params, tools=tools)[0].prompt == "find hi"
    monkeypatch.setattr(llm, "_template", None)


def test_more_prompts_than_the_queue_holds(llm, monkeypatch):
    tight = dataclasses.replace(llm.engine.cfg, max_num_queued_reqs=1)
    monkeypatch.setattr(llm.engine, "cfg", tight)
    outputs = llm.generate([[i] for i in range(20)], SamplingParams(max_tokens=3, ignore_eos=True))
    assert [o.outputs[0].finish_reason for o in outputs] == ["length"] * 20


def test_one_bad_prompt_starts_nothing(llm):
    steps = llm.engine.stats().steps
    with pytest.raises(InvalidRequest, match=r"prompts\[1\]: the prompt has 300 tokens, but max_model_len"):
        llm.generate([[1], [1] * 300])
    with pytest.raises(InvalidRequest, match=r"^the prompt has 300 tokens"):
        llm.generate([1] * 300)
    with pytest.raises(ValueError, match="2 sampling parameters for 1 prompts"):
        llm.generate([[1]], [SamplingParams()] * 2)
    assert llm.engine.stats().steps == steps and not llm.engine.has_work


def test_invalid_prompts_are_returned_as_errors(llm):
    params = SamplingParams(max_tokens=2, ignore_eos=True, n=2)
    outputs = llm.generate([[1], [1] * 300, "x" * 600, [2]], params, errors="return")
    assert [[each.finish_reason for each in output.outputs] for output in outputs] == [
        *([[end] * 2 for end in ("length", "error", "error", "length")])
    ]
    assert "300 tokens" in outputs[1].outputs[0].error and outputs[2].prompt == "x" * 600


def test_a_table_keeps_its_answers_where_one_row_cannot_be_answered(llm):
    """A row that is too long, and rows that are no conversations."""
    rows = [{"prompt": prompt} for prompt in ("a", "x " * 5000, 7, {"role": "user", "content": "b"}, [1], "c")]
    found = dsv3.map(rows, "prompt", llm=llm, sampling_params=SamplingParams(max_tokens=2, ignore_eos=True))
    assert [row["answer"] is None for row in found] == [False, True, True, False, True, False]
    assert ["" if row["answer_error"] is None else row["answer_error"][:17] for row in found] == [
        "",
        "the prompt has 50",
        "not a conversatio",
        "",
        "not a conversatio",
        "",
    ]


@pytest.fixture
def another(directory, monkeypatch):
    """Makes models that compile nothing, for tests without a step."""
    monkeypatch.setattr("dsv3.engine.engine.Engine.warm_up", lambda *_: None)
    return lambda **options: LLM(directory, progress=False, **LIMITS, **options)


def test_a_closed_model_holds_no_array_whatever_refers_to_it(llm, another):
    before = jax.live_arrays()  # garbage of earlier tests among them stays
    with another() as model:
        assert len(jax.live_arrays()) > len(before)
        kept = model.engine.executor.devices.params
    gc.collect()
    assert len(jax.live_arrays()) == len(before) and kept is not None
    model.close()
    for ask in (model.generate, model.inspect, lambda _: model.chat([{"role": "user", "content": "x"}])):
        with pytest.raises(ValueError, match="closed"):
            ask([1, 2])


def test_a_closed_model_returns_host_memory(another, tmp_path, monkeypatch):
    """No cycle keeps it until garbage is collected."""
    monkeypatch.setattr(host_pool, "FOLDER", tmp_path)
    gc.disable()
    try:
        with another(kv_offloading_size=0.001) as model:
            engine, scheduler = weakref.ref(model.engine), weakref.ref(model.engine.scheduler)
        assert engine() is scheduler() is None
    finally:
        gc.enable()


def test_a_traceback_that_is_kept_holds_no_array(llm, another, monkeypatch):
    """Notebooks keep the last one: after `del llm` on a GPU the next model needs the memory."""
    gc.collect()
    before, model = len(jax.live_arrays()), another()

    def hook(values):
        del values  # which a user's frame would keep
        raise ZeroDivisionError

    with pytest.raises(InvalidRequest) as kept_refusal:
        model.generate([1] * 300)
    with pytest.raises(ZeroDivisionError) as kept_hook:
        model.inspect([1, 2], hook=hook)
    monkeypatch.setattr("dsv3.engine.engine.Engine.step", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt) as kept_interrupt:
        dsv3.map([{"prompt": "x"}], llm=model)
    monkeypatch.setattr("dsv3.engine.engine.Engine.warm_up", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt) as kept_start:
        another()
    kept = [each.value for each in (kept_refusal, kept_hook, kept_interrupt, kept_start)]
    del model
    gc.collect()
    assert len(jax.live_arrays()) == before and all(error.__traceback__ for error in kept)


def test_an_interrupt_leaves_nothing_behind(llm, monkeypatch):
    step, calls = llm.engine.step, []

    def interrupted():
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2]], SamplingParams(max_tokens=100, ignore_eos=True))
    assert not llm.engine.has_work and llm.engine.stats().pages_in_use == 0


def test_an_interrupt_while_the_last_step_runs_loses_no_step(llm, monkeypatch):
    params, interrupts, executor = SamplingParams(temperature=0, max_tokens=1), [KeyboardInterrupt], llm.engine.executor
    expected = llm.generate([[1, 2, 3]], params)

    def interrupted(*arguments):
        if interrupts:
            raise interrupts.pop()
        return type(executor).fetch(executor, *arguments)

    monkeypatch.setattr(executor, "fetch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2, 3]], params)
    assert not llm.engine.has_work and llm.engine.stats().pages_in_use == 0
    assert llm.generate([[1, 2, 3]], params)[0].outputs == expected[0].outputs


def test_an_interrupt_as_results_are_processed_leaves_nothing_behind(llm, monkeypatch):
    prefill = llm.engine.planners["prefill"]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(prefill, "on_results", Mock(side_effect=KeyboardInterrupt))
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1))
    assert not llm.engine.has_work and llm.engine.stats().pages_in_use == 0


def test_without_a_tokenizer_token_ids_still_work(llm, monkeypatch):
    monkeypatch.setattr(llm, "tokenizer", None)
    [output] = llm.generate([1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True))
    assert (output.outputs[0].text, len(output.outputs[0].token_ids)) == ("", 3)
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        llm.generate("text")


def test_the_step_takes_few_arguments(llm):
    """A decode step's flat arguments (2,600 cost 34 ms per step elsewhere)."""
    programs = llm.engine.executor.devices.programs
    arrays = jax.tree.leaves(programs.spec(Key("decode", 4)).arguments)
    assert len(arrays) < 60
    assert all(a.dtype != jnp.float64 for a in arrays)


def test_importing_the_package_imports_no_jax():
    code = "import sys, dsv3; dsv3.SamplingParams, dsv3.__version__; assert 'jax' not in sys.modules, 'it is imported'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_prompt_logprobs_are_those_of_the_same_tokens_as_an_answer(llm):
    """Decode's log-probabilities of an answer equal prefill's of it as a prompt, in chunks and past a cached prefix."""
    prompt = [(7 * i) % 250 + 4 for i in range(100)]
    asking = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=2)
    [answer] = llm.generate([prompt], asking)
    tokens, told = answer.outputs[0].token_ids, answer.outputs[0].logprobs
    whole = [*prompt, *tokens]
    [output] = llm.generate([whole], SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2))
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(whole)
    for mine, theirs in zip(output.prompt_logprobs[len(prompt) :], told, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-3)
        assert mine.top_ids[0] == theirs.top_ids[0]
    assert llm.generate([prompt], asking)[0].prompt_logprobs is None
    [scores] = llm.score([whole])
    assert scores == pytest.approx([token.logprob for token in output.prompt_logprobs[1:]], abs=1e-3)
    with pytest.raises(InvalidRequest, match="fewer than two tokens"):
        llm.score([[5]])


def test_routed_experts_are_arrays_of_prompt_and_answer(llm, greedy):
    """Each completion has its own, as long as its text: also where a stop string ends that early."""
    prompt = greedy["prompts"][0]
    whole, plain = llm.generate(
        [prompt, prompt],
        [SamplingParams(max_tokens=9, n=2, temperature=0, return_routed_experts=True), SamplingParams(max_tokens=9)],
    )
    assert plain.outputs[0].routed_experts is None
    for each in whole.outputs:
        wanted = llm.inspect([*prompt, *each.token_ids[:-1]], attention=False)
        assert each.routed_experts.dtype == np.uint8
        np.testing.assert_array_equal(each.routed_experts, np.stack([x.expert_ids for x in wanted.layers[1:]], axis=1))
    stop = SamplingParams(max_tokens=9, temperature=0, return_routed_experts=True, stop=(whole.outputs[0].text[2:4],))
    [cut] = llm.generate([prompt], stop)[0].outputs
    assert cut.finish_reason == "stop" and len(cut.token_ids) < 9
    assert len(cut.routed_experts) == len(prompt) + len(cut.token_ids) - 1


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}


def test_answers_keep_to_a_schema(llm):
    """Every finished one validates, greedy or sampled; a conversation's answer may begin with reasoning."""
    held = StructuredOutputsParams(json=SCHEMA)
    params = [
        SamplingParams(temperature=t, n=n, seed=3, max_tokens=230, structured_outputs=held) for t, n in ((0, 1), (1, 4))
    ]
    answers = [each for output in llm.generate(["x", "y"], params) for each in output.outputs]
    finished = [each for each in answers if each.finish_reason == "stop"]
    assert len(finished) >= 3
    for each in finished:
        jsonschema.validate(json.loads(each.text), SCHEMA)
    choice = SamplingParams(
        temperature=1, seed=1, max_tokens=20, structured_outputs=StructuredOutputsParams(choice=["no"])
    )
    [output] = llm.chat([{"role": "user", "content": "hi"}], choice)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("no", "stop")


def test_an_impossible_constraint_is_refused_before_anything_runs(llm):
    steps = llm.engine.stats().steps
    bad = SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "array", "uniqueItems": True}))
    with pytest.raises(InvalidRequest, match="uniqueItems"):
        llm.generate(["x", "y"], [SamplingParams(), bad])
    with pytest.raises(InvalidRequest, match="thinking_token_budget: only the answers of `chat`"):
        llm.generate("x", SamplingParams(thinking_token_budget=5))
    assert llm.engine.stats().steps == steps


def test_inspecting_agrees_with_serving_and_leaves_the_engine_as_it_was(llm: LLM, greedy: dict) -> None:
    """Inspection takes no step and no page; it accepts the prompts that could be served."""
    prompt, before = greedy["prompts"][0], llm.engine.stats()
    seen = llm.inspect(prompt, layers=[0], attention=False)
    assert llm.engine.stats() == before
    assert int(seen.logits[-1].argmax()) == greedy["greedy"][0][0]
    assert seen.token_ids.tolist() == prompt and len(seen.layers) == 1
    for wrong in ([], [10**6], [1] * 300):
        with pytest.raises(InvalidRequest):
            llm.inspect(wrong)


def test_inspecting_needs_all_experts_on_one_device(llm: LLM, monkeypatch) -> None:
    monkeypatch.setattr(llm.engine.executor.devices, "params", object())
    with pytest.raises(ValueError, match="without enable_expert_parallel"):
        llm.inspect([1, 2])
