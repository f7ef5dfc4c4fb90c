"""Constrained requests: exactly the greedy choice among the tokens that a grammar allows.

The oracle is plain Python over the toy's scores, with a matcher of its own. It has no steps and no drafts.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from dsv3.config.engine import EngineConfig
from dsv3.engine.components import EngineComponents
from dsv3.engine.device.programs import Key, Programs
from dsv3.engine.device.sampling import apply_bitmask
from dsv3.engine.engine import Engine
from dsv3.engine.job import StepCommand
from dsv3.engine.jobs.decode import DecodeCommand
from dsv3.engine.jobs.prefill import PrefillCommand
from dsv3.engine.jobs.sample import RowMasks, SampleCommand
from dsv3.sampling_params import StructuredOutputsParams
from dsv3.scheduler import structured_output
from dsv3.scheduler.batch_slots import BatchRows
from dsv3.scheduler.request import EngineRequest, InvalidRequest, QueueFull, RequestRules, StepOutputs, prepare
from dsv3.scheduler.scheduler import Scheduler
from dsv3.scheduler.sequence import DRAWN, FILTERED, FULL, GREEDY, make_sequence
from dsv3.scheduler.structured_output import GrammarStats, Masks
from dsv3.text.grammar import ReasoningSpan, free_reasoning, plain_grammar
from dsv3.text.matcher import GrammarVocabulary, Matcher, without_tokens
from tests.dsv3.engine import letters, toy
from tests.dsv3.engine.conftest import LIMITS, parts
from tests.dsv3.engine.driving import Gathered, drain, number, request, run, take
from tests.dsv3.engine.fewer import one_bucket

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}, "b": {"enum": ["x", "yes", None]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
CONSTRAINTS = [
    StructuredOutputsParams(json=SCHEMA),
    StructuredOutputsParams(regex="[a-f]{3,150}"),
    StructuredOutputsParams(regex="(ab|cd|e)*[0-9]"),
    StructuredOutputsParams(choice=["yes", "no", "never"]),
    StructuredOutputsParams(grammar='start: "[" start "]" | NUMBER\nNUMBER: /[0-9]{1,3}/'),
    StructuredOutputsParams(regex="(.|\n)*"),
]
# The prompt ends in reasoning, which token 7 ends; it has at most 9 tokens, and anything may follow.
BUDGET, REASONING = 9, ReasoningSpan(open=6, close=7, opened=True, optional=False)
GRAMMARS = [*map(plain_grammar, CONSTRAINTS), free_reasoning(REASONING, BUDGET)]


@functools.cache
def vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary(letters.tokenizer().to_str(), toy.VOCAB, [toy.EOS])


@functools.cache
def compiled(which: int) -> Matcher:
    return vocabulary().compile(GRAMMARS[which])


def expected(
    prompt: list[int], count: int, which: int, min_tokens: int = 0, ignore_eos: bool = False
) -> tuple[list[int], str]:
    """The greedy answer under a constraint, and why it ends."""
    matcher, answer = compiled(which).copy(), []
    while True:
        mask = np.zeros((1, 1, vocabulary().words), np.uint32)
        vocabulary().fill([(matcher, [])], mask)
        assert matcher.error is None
        allowed = mask[0, 0] if len(answer) >= min_tokens and not ignore_eos else without_tokens(mask[0, 0], [toy.EOS])
        bits = np.unpackbits(allowed.view(np.uint8), bitorder="little")
        scores = toy.scores(prompt + answer)
        token = max(bits[: toy.POISON].nonzero()[0].tolist(), key=lambda i: (scores[i], -i))
        answer.append(token)
        if token == toy.EOS:
            return answer, "stop"
        if len(answer) == count:
            return answer, "length"
        matcher.advance(np.array(answer))
        assert not matcher.error


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return letters.write(tmp_path_factory.mktemp("letters"))


def maker(tokenizer: Path, functions, params, model, free, others, **limits) -> Callable[..., Engine]:
    """Makes engines with structured outputs that share programs.

    `free` are the samplers of free requests, `others` those of constrained ones.
    """
    programs, samplers = [], {"sample": free, "constrained sample": others, "prompt_logprobs": ()}

    def keys(self: Programs) -> list[Key]:
        return [key for key in self._specs if key.variant in samplers.get(key.kind, (key.variant,))]

    def make(**changes) -> Engine:
        cfg = EngineConfig(**(LIMITS | {"max_num_batched_tokens": 64} | limits | changes))
        given = EngineComponents.on_devices(functions, params, model, cfg)
        engine = Engine(dataclasses.replace(given, tokenizer=tokenizer))
        if programs:
            engine.executor.devices.programs = programs[0]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Programs, "keys", keys)
            engine.warm_up()
        programs[:] = [engine.executor.devices.programs]
        return engine

    return make


@pytest.fixture(scope="module")
def make_plain(tokenizer: Path) -> Callable[..., Engine]:
    made = maker(tokenizer, toy.FUNCTIONS, toy.PARAMS, toy.toy_config(), (GREEDY, FULL), (DRAWN, FILTERED, FULL))

    def make(**changes) -> Engine:
        with one_bucket():
            return made(**changes)

    return make


@pytest.fixture(scope="module")
def make_drafting(tokenizer: Path) -> Callable[..., Engine]:
    """Two drafts alone and one where there are several requests; a fourth of the drafts is wrong."""
    given = {"method": "mtp", "num_speculative_tokens_per_batch_size": [[1, 1, 2], [2, 4, 1]]}
    model = toy.toy_config(num_nextn_predict_layers=1)
    limits = {"speculative_config": given, "tokens_per_row": 3}
    return maker(tokenizer, toy.drafting(None), jnp.int32(4), model, (GREEDY,), (DRAWN, FULL), **limits)


@pytest.fixture(params=["plain", "drafting"])
def make(request: pytest.FixtureRequest) -> Callable[..., Engine]:
    return request.getfixturevalue(f"make_{request.param}")


def test_an_answer_that_another_server_began_keeps_to_its_grammar(make) -> None:
    """Wherever it is cut, between two tokens of one part of the schema, too."""
    engine = make()
    for which in (0, 2, 4, len(CONSTRAINTS)):
        tokens, reason = expected([which + 1, 5], 60, which)
        for cut in range(1, len(tokens), 3):
            item = msgspec.structs.replace(
                held("cut", [which + 1, 5], which, max_tokens=60), answer_token_ids=tokens[:cut]
            )
            got = run(engine, item)["cut"]
            assert (got.tokens, got.finish_reason) == (tokens[cut:], reason), (which, cut)


def held(name: str, prompt: list[int], which: int, **sampling) -> EngineRequest:
    if which >= len(CONSTRAINTS):
        return msgspec.structs.replace(request(name, prompt, **sampling), grammar=GRAMMARS[which])
    return request(name, prompt, structured_outputs=CONSTRAINTS[which], **sampling)


def test_constrained_and_free_requests_share_steps(make) -> None:
    """Each text is what it would be alone; n sequences, and one that ends with its first token."""
    engine = make()
    free = request("free", [9, 9], max_tokens=40, ignore_eos=True)
    got = run(engine, free, *(held(str(i), [i + 1, 5], i, max_tokens=60) for i in range(len(CONSTRAINTS))))
    assert got["free"].tokens == toy.expected_tokens([9, 9], 40, ())
    for i in range(len(CONSTRAINTS)):
        tokens, reason = expected([i + 1, 5], 60, i)
        assert (got[str(i)].tokens, got[str(i)].finish_reason) == (tokens, reason), i
    assert letters.text(got["3"].tokens) in CONSTRAINTS[3].choice
    stats = engine.stats()
    assert (stats.pages_in_use, stats.recompilations, stats.jobs["mask"].num_failed) == (0, 0, 0)
    assert stats.jobs["mask"].num_rows > 20 and sum(stats.jobs["mask"].counts) > 10


def test_a_forward_program_is_launched_before_its_masks_are_made(make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sampler is the deferred part of its job, in a command of its own, and uses what the program has left."""
    engine, seen = make(), []
    launch = engine.executor.launch

    def noted(command: StepCommand) -> Any:
        seen.append([each for kind, each in command.jobs if kind in ("prefill", "decode")])
        return launch(command)

    monkeypatch.setattr(engine.executor, "launch", noted)
    run(engine, held("a", [1, 5], 5, max_tokens=8, ignore_eos=True))
    for [forward], [rest] in zip(seen[::2], seen[1::2], strict=True):
        assert forward.sample is None and isinstance(rest, SampleCommand) and rest.masks is not None
    assert isinstance(seen[0][0], PrefillCommand) and isinstance(seen[2][0], DecodeCommand)
    devices = engine.executor.devices
    assert devices.decoded is None and devices.prefilled is None, "nothing of a step is kept behind it"


def test_drafts_are_walked_through_the_grammar(make_drafting) -> None:
    """Under a grammar that allows all but an early end, right drafts are accepted as without one."""
    engine = make_drafting()
    got = run(engine, held("a", [3, 1, 4], 5, max_tokens=60, ignore_eos=True))["a"]
    assert got.tokens == expected([3, 1, 4], 60, 5, ignore_eos=True)[0]
    stats = engine.stats()
    assert stats.jobs["draft"].num_accepted_tokens > 20
    assert stats.steps < 45


def test_reasoning_ends_when_its_budget_is_spent(make) -> None:
    """Exactly then, unless it ends by itself, and the answer is free behind it."""
    engine, budgeted, forced = make(), len(CONSTRAINTS), 0
    got = run(engine, *(held(str(i), [i + 1, 5], budgeted, max_tokens=40) for i in range(6)))
    for i in range(6):
        tokens = got[str(i)].tokens
        assert tokens == expected([i + 1, 5], 40, budgeted)[0]
        if REASONING.close in tokens:  # else the model has ended the answer in its reasoning
            thoughts = tokens.index(REASONING.close)
            forced += thoughts >= BUDGET
            assert thoughts <= BUDGET + (tokens[0] == REASONING.open)
            behind = toy.expected_tokens([i + 1, 5, *tokens[: thoughts + 1]], 39 - thoughts)
            assert tokens[thoughts + 1 :] == behind
    assert forced >= 3


def test_bitmasks_too_large_for_a_message_end_their_requests_alone(monkeypatch) -> None:
    cfg = EngineConfig(**(LIMITS | {"num_processes": 2}))
    scheduler = Scheduler(cfg, toy.VOCAB)
    structured_output = Masks(scheduler, vocabulary())
    monkeypatch.setattr("dsv3.scheduler.structured_output.MAX_PROCESS_BYTES", 2 * 4 * structured_output.words + 1)
    rules = RequestRules(
        vocab_size=toy.VOCAB, max_model_len=256, eos_token_ids=(toy.EOS,), num_ranks=2, takes_grammars=True
    )
    for i, rank in enumerate((0, 0, 0, 1, 1)):
        sequence = make_sequence(prepare(msgspec.structs.replace(held(str(i), [5, 6], 2), rank=rank), rules))
        sequence.matcher = compiled(2).copy()
        scheduler.add(sequence)
    scheduler.admit()
    slots = np.array([0, 1, 2, 4, 5])
    rows, outputs = BatchRows.at(scheduler.slots, slots, slots // 4, slots % 4), StepOutputs()
    places, got = structured_output.compute(rows, 1, outputs)
    assert places.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]] and len(got) == 4
    [refused] = outputs.details
    assert (refused.request_id, refused.finish_reason) == (number("2"), "error")
    assert "2 others in its process have a grammar" in refused.error
    assert number("2") not in scheduler.sequences and len(scheduler.sequences) == 4
    free = scheduler.sequences[number("1")]
    free.matcher = compiled(len(CONSTRAINTS)).copy()  # its reasoning has begun
    places, got = structured_output.compute(rows, 1, StepOutputs())
    assert places.tolist() == [[0, 0], [1, 0], [1, 1]] and len(got) == 3


def test_masks_behind_drafts_are_those_behind_the_same_tokens() -> None:
    """Up to a rejected draft; drafts of a slot's earlier owner do not count."""
    cfg = EngineConfig(**(LIMITS | {"tokens_per_row": 4}))
    scheduler = Scheduler(cfg, toy.VOCAB)
    structured_output = Masks(scheduler, vocabulary())
    rules = RequestRules(vocab_size=toy.VOCAB, max_model_len=256, eos_token_ids=(toy.EOS,), takes_grammars=True)
    sequence = make_sequence(prepare(held("a", [5, 6], 2), rules))
    sequence.matcher = compiled(2).copy()
    scheduler.slots.allocate(sequence, 0)
    slots = np.array([sequence.slot])
    rows = BatchRows.at(scheduler.slots, slots, np.array([0]), np.array([0]))
    for text, walked in (("cde", 4), ("cx", 2), ("e4", 3), ("x", 1), ("", 1)):
        drafts = [letters.LETTERS.index(letter) + 1 for letter in text]
        structured_output.record_drafts(rows, np.array([[drafts + [-1] * (3 - len(drafts))]] * cfg.num_ranks))
        places, got = structured_output.compute(rows, 4, StepOutputs())
        assert places.tolist() == [[0, 0]]
        matcher = compiled(2).copy()
        for i in range(walked):
            matcher.advance(np.array(drafts[:i]))
            want = np.zeros((1, 1, vocabulary().words), np.uint32)
            vocabulary().fill([(matcher, [])], want)
            np.testing.assert_array_equal(got[0, i], want[0, 0], f"{text} {i}")
        assert (got[0, walked:] == 0xFFFFFFFF).all(), text
    structured_output.record_drafts(rows, np.array([[[letters.LETTERS.index("c") + 1] * 3]] * cfg.num_ranks))
    scheduler.slots.epoch[slots] += 1000
    later = BatchRows.at(scheduler.slots, slots, np.array([0]), np.array([0]))
    assert (structured_output.compute(later, 4, StepOutputs())[1][0, 1:] == 0xFFFFFFFF).all()
    assert not len(structured_output.compute(rows, 4, StepOutputs())[0])


def test_sampling_keeps_to_the_grammar_and_to_its_seed(make) -> None:
    """Temperature and filters do not matter; logprobs are the model's own, also of tokens that were excluded."""
    settings = {"temperature": 2.0, "top_p": 0.5, "min_p": 0.1, "n": 3, "seed": 5, "max_tokens": 60, "logprobs": 2}
    texts = []
    for name in ("a", "b"):
        engine = make()
        penalty = 0.0 if engine.cfg.speculative is None else 0.1  # beside drafts the sampler with penalties is at hand
        got = run(engine, held(name, [7, 7], 0, presence_penalty=penalty, **settings))
        texts.append([letters.text(got[key].tokens) for key in sorted(got)])
        for gathered in got.values():
            assert gathered.finish_reason == "stop"
            assert sum(len(output.logprobs or []) for output in gathered.outputs) == len(gathered.tokens)
    assert texts[0] == texts[1] and len(set(texts[0])) > 1


def test_bias_chooses_among_what_the_grammar_allows(make_plain) -> None:
    """The letter with the greatest bias is excluded; free requests beside it may have it."""
    bias = {letters.LETTERS.index("x") + 1: 90.0, letters.LETTERS.index("n") + 1: 50.0}
    free = request("free", [8], max_tokens=4, logit_bias=bias)
    got = run(make_plain(), free, held("a", [7], 3, logit_bias=bias))
    assert letters.text(got["a"].tokens) in ("no", "never")
    assert letters.text(got["free"].tokens) == "xxxx"


@pytest.mark.parametrize("sampling", [{"min_tokens": 20}, {"ignore_eos": True}, {"min_tokens": 20, "logprobs": 1}])
def test_an_end_comes_no_earlier_than_it_must(make_plain, sampling) -> None:
    """Where the grammar allows only the end, the answer ends all the same."""
    engine = make_plain()
    got = run(engine, *(held(str(i), [i + 2], i, max_tokens=70, **sampling) for i in (1, 3)))
    assert letters.text(got["3"].tokens) in CONSTRAINTS[3].choice
    assert got["3"].finish_reason == "stop"
    letters_of_1 = letters.text(got["1"].tokens)
    assert len(letters_of_1) >= (60 if "ignore_eos" in sampling else sampling["min_tokens"])
    assert set(letters_of_1) <= set("abcdef")


def test_stop_tokens_end_where_the_grammar_has_them(make_plain) -> None:
    stop = letters.LETTERS.index("c") + 1
    got = run(make_plain(), held("a", [4], 1, max_tokens=60, stop_token_ids=(stop,)))["a"]
    tokens, _ = expected([4], 60, 1)
    if stop in tokens:
        tokens = tokens[: tokens.index(stop) + 1]
        assert got.last.stop_token_id == stop
    assert got.tokens == tokens


def test_a_grammar_is_compiled_once_and_few_are_kept(make_plain, monkeypatch) -> None:
    monkeypatch.setattr(structured_output, "MAX_CACHED", 2)
    engine = make_plain()
    compiled = []
    for which in (0, 0, 1, 0, 3, 1):
        run(engine, held("a", [1], which, max_tokens=3))
        compiled.append(engine.grammars.num_compiled)
    assert compiled == [1, 1, 2, 2, 3, 4]
    assert engine.stats().jobs["grammars"] == GrammarStats(num_compiled=4, num_found=2, num_kept=2)
    engine.add(held("b", [1], 1))
    engine.step()
    assert engine.stats().running == 1  # what is kept costs no step
    drain(engine)


def test_a_grammar_that_does_not_compile_fails_its_request_alone(make_plain) -> None:
    """A server's API process has checked it before; users of the engine itself can ask."""
    engine = make_plain()
    bad = request("bad", [1], structured_outputs=StructuredOutputsParams(regex="("))
    got = run(engine, bad, held("good", [1], 3))
    assert (got["bad"].finish_reason, got["bad"].tokens) == ("error", [])
    assert "regex" in got["bad"].last.error
    assert got["good"].finish_reason == "stop"
    with pytest.raises(InvalidRequest, match="structured_outputs"):
        engine.check_grammar(plain_grammar(StructuredOutputsParams(regex="(")))


def test_requests_end_while_their_grammar_is_compiled(make_plain) -> None:
    """Ids are in use meanwhile, an abort is answered, and a failure of the engine ends them."""
    engine = make_plain()
    engine.add(held("a", [1], 0))
    engine._ingest()
    assert engine.has_work and engine.stats().waiting == 1
    with pytest.raises(InvalidRequest, match="in use"):
        engine.add(held("a", [1], 0))
    engine.abort(number("a"))
    assert drain(engine)["a"].finish_reason == "abort"
    engine.add(held("b", [1], 0))
    engine._ingest()
    engine.failure = RuntimeError("broken")
    assert [output.finish_reason for output in engine.step()] == ["error"]
    assert not engine.has_work


def test_without_a_tokenizer_no_request_is_constrained() -> None:
    with pytest.raises(InvalidRequest, match=r"tokenizer\.json"):
        Engine(parts()).add(held("a", [1], 0))


def test_logits_that_are_not_finite_fail_the_request(make_plain) -> None:
    """A bitmask must not hide them."""
    got = run(make_plain(), held("a", [1, toy.POISON], 1))["a"]
    assert (got.tokens, got.finish_reason) == ([], "error")


def test_a_part_of_a_command_masks_the_rows_of_its_ranks() -> None:
    places = np.array([[0, 1], [2, 0], [3, 1]], np.int32)
    structured_output = np.arange(3 * 2 * 3, dtype=np.uint32).reshape(3, 2, 3)
    command = RowMasks(places, structured_output)
    whole = command.whole(4, 2, 2, 3)
    assert (whole[0, 0] == 0xFFFFFFFF).all() and (whole[2, 0] == structured_output[1]).all()
    for first in (0, 2):
        np.testing.assert_array_equal(command.part(range(first, first + 2)).whole(2, 2, 2, 3), whole[first : first + 2])


def test_bits_are_tokens() -> None:
    """Also where the vocabulary is no multiple of 32; non-finite logits stay."""
    W = 67
    allowed = np.random.default_rng(0).random((2, 3, W)) < 0.3
    packed = np.packbits(np.pad(allowed, ((0, 0), (0, 0), (0, 96 - W))), axis=-1, bitorder="little").view("<u4")
    logits = np.random.default_rng(1).normal(size=(2, 3, W)).astype(np.float32)
    logits[0, 0, 5], logits[1, 2, 7] = np.nan, np.inf
    got = np.asarray(apply_bitmask(jnp.array(logits), jnp.array(packed)))
    finite = np.isfinite(logits)
    np.testing.assert_array_equal(got[finite], np.where(allowed, logits, -np.inf)[finite])
    assert np.isnan(got[0, 0, 5]) and got[1, 2, 7] == np.inf


class MaskMachine(RuleBasedStateMachine):
    """Constrained and free requests come and go while pages run out; every text is the oracle's."""

    make = None

    def __init__(self) -> None:
        super().__init__()
        self.engine = type(self).make(max_num_queued_reqs=8)
        self.requests: dict[str, tuple[EngineRequest, int | None]] = {}
        self.gathered: dict[str, Gathered] = {}
        self.aborted: set[str] = set()

    @rule(
        length=st.integers(1, 150),
        which=st.sampled_from([None, *range(len(GRAMMARS))]),
        max_tokens=st.integers(1, 80),
        min_tokens=st.integers(0, 8),
    )
    def add(self, length, which, max_tokens, min_tokens) -> None:
        prompt = [(7 * i * length) % (toy.POISON - 1) + 1 for i in range(length)]
        name = f"m{len(self.requests)}"
        settings = {"max_tokens": max_tokens, "min_tokens": min(min_tokens, max_tokens) if which is not None else 0}
        item = request(name, prompt, **settings) if which is None else held(name, prompt, which, **settings)
        try:
            self.engine.add(item)
        except QueueFull:
            return
        self.requests[name] = item, which

    @rule(count=st.integers(1, 12))
    def steps(self, count) -> None:
        for _ in range(count):
            take(self.engine.step(), self.gathered)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        self.aborted.add(name)
        self.engine.abort(number(name))

    def teardown(self) -> None:
        drain(self.engine, self.gathered, limit=20_000)
        stats = self.engine.stats()
        assert self.engine.failure is None
        assert (stats.pages_in_use, stats.running, stats.waiting, stats.recompilations) == (0, 0, 0, 0)
        for name, (item, which) in self.requests.items():
            got, sampling = self.gathered[name], item.sampling
            if which is None:
                tokens = toy.expected_tokens(item.prompt_token_ids, sampling.max_tokens)
                reason = "stop" if tokens[-1] == toy.EOS else "length"
            else:
                tokens, reason = expected(item.prompt_token_ids, sampling.max_tokens, which, sampling.min_tokens)
            if got.finish_reason == "abort":
                assert name in self.aborted and got.tokens == tokens[: len(got.tokens)]
            else:
                assert (got.tokens, got.finish_reason) == (tokens, reason), (name, which)


@pytest.mark.parametrize("kind", ["plain", "drafting"])
def test_under_random_traffic_each_text_is_its_own(kind, request) -> None:
    machine = type("Machine", (MaskMachine,), {"make": staticmethod(request.getfixturevalue(f"make_{kind}"))})
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        machine, settings=settings(max_examples=12, stateful_step_count=25, deadline=None, suppress_health_check=checks)
    )


def test_pre_empted_answers_go_on(make) -> None:
    """More than the pages hold: the youngest is pre-empted, and recomputed with its answer so far."""
    engine = make()
    names = [str(i) for i in range(8)]
    for i, name in enumerate(names):
        engine.add(held(name, [i + 1] * 60, 1, max_tokens=140, ignore_eos=True))
    got = drain(engine)
    assert engine.stats().preemptions > 0
    for i, name in enumerate(names):
        assert got[name].tokens == expected([i + 1] * 60, 140, 1, ignore_eos=True)[0]
