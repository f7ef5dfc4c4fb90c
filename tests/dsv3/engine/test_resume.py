"""An answer that begins with tokens of another engine's continues as it would have there, wherever it is cut."""

import msgspec
import pytest

from dsv3.scheduler.request import EngineRequest, InvalidRequest, prepare
from tests.dsv3.engine import toy
from tests.dsv3.engine.driving import Gathered, request, run
from tests.dsv3.engine.test_draft import make

PROMPT = [(11 * i) % 60 + 1 for i in range(70)]
CUTS = (1, 5, 57, 58, 69)
SAMPLINGS = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 7, "top_p": 0.95},
    "penalties": {"temperature": 0.9, "seed": 8, "presence_penalty": 1.0, "frequency_penalty": 0.7},
    "repetition": {"repetition_penalty": 1.3, "logit_bias": {3: 2.0}},
    "min_tokens": {"temperature": 1.5, "seed": 9, "min_tokens": 60, "stop_token_ids": tuple(range(20))},
    "logprobs": {"temperature": 0.8, "seed": 10, "logprobs": 3},
}


def resumed(item: EngineRequest, name: str, answered: list[int]) -> EngineRequest:
    """The same request under another name, behind the tokens that its answer begins with."""
    other = request(name, [1])
    return msgspec.structs.replace(item, request_id=other.request_id, answer_token_ids=answered)


def check(engine, item: EngineRequest, whole: Gathered, cuts=CUTS) -> None:
    for cut in (cut for cut in cuts if cut < len(whole.tokens)):
        [got] = run(engine, resumed(item, f"cut {cut}", whole.tokens[:cut])).values()
        assert got.tokens == whole.tokens[cut:]
        assert (got.finish_reason, got.last.stop_token_id) == (whole.finish_reason, whole.last.stop_token_id)
        assert got.outputs[0].num_cached_tokens <= len(PROMPT)
        if item.sampling.logprobs is not None:
            assert _logprobs(got) == _logprobs(whole)[cut:]


def _logprobs(got: Gathered) -> list[list[int]]:
    return [entry.top_ids for output in got.outputs for entry in output.logprobs]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_an_answer_goes_on_with_the_same_tokens(engine, sampling):
    item = request("whole", PROMPT, **({"max_tokens": 70, "ignore_eos": True} | sampling))
    [whole] = run(engine, item).values()
    assert len(whole.tokens) > 59
    check(engine, item, whole)


def test_min_tokens_count_those_that_came_before(engine):
    """The first stop token after 60 tokens ends both; without min_tokens the whole answer would be shorter."""
    item = request("whole", PROMPT, max_tokens=70, **SAMPLINGS["min_tokens"])
    [whole] = run(engine, item).values()
    [short] = run(engine, msgspec.structs.replace(request("short", PROMPT), sampling=_without_min(item))).values()
    assert whole.finish_reason == "stop" and len(short.tokens) < 60 <= len(whole.tokens)
    check(engine, item, whole)


def _without_min(item: EngineRequest):
    return msgspec.structs.replace(item.sampling, min_tokens=0)


def test_a_tired_engine_and_a_fresh_one_agree(make_engine):
    item = request("whole", PROMPT, max_tokens=70, ignore_eos=True, temperature=1.0, seed=3)
    [whole] = run(make_engine(), item).values()
    engine = make_engine(enable_prefix_caching=False)
    check(engine, item, whole)
    assert engine.stats().prefix_hits == 0


@pytest.mark.parametrize("right_of", [0, 3])
def test_drafts_change_nothing(right_of):
    engine = make(right_of, num_speculative_tokens=2)
    item = request("whole", PROMPT, max_tokens=70, ignore_eos=True)
    [whole] = run(engine, item).values()
    assert whole.tokens == toy.expected_tokens(PROMPT, 70, ())
    check(engine, item, whole, cuts=(1, 57, 58))


@pytest.mark.parametrize(
    ("answered", "words"),
    [
        (list(range(1, 11)), "nothing left to generate; give fewer"),
        ([toy.VOCAB], "not in the vocabulary"),
        ([-1], "not in the vocabulary"),
        ([2**70], "not in the vocabulary"),
    ],
)
def test_tokens_that_cannot_begin_an_answer_are_refused(engine, answered, words):
    item = request("a", PROMPT, max_tokens=10)
    with pytest.raises(InvalidRequest, match=words):
        prepare(msgspec.structs.replace(item, answer_token_ids=answered), engine.rules)
