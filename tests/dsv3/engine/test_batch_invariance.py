"""With `batch_invariant`, tokens and log-probabilities have the bits of a request alone in the engine.

Batches, chunks, cached pages, ranks and the number of drafts vary with what else is served, and with when it comes.
DeepSeek-V4 is in `model/test_deepseek_v4_steps.py`.
"""

import functools
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv3.config.engine import EngineConfig
from dsv3.engine.components import EngineComponents
from dsv3.engine.engine import Engine
from dsv3.engine.functions import batch_invariant, in_full_precision, model_functions
from tests.dsv3.engine.driving import Gathered, drain, request, take
from tests.dsv3.model import golden
from training.served import served_logprobs

pytestmark = pytest.mark.optimised  # as XLA compiles other programs

PROMPTS = (150, 3, 70, 64, 33)
"""Lengths of prompts; a step takes 64 tokens of them."""
_names = itertools.count()


@functools.cache
def engine(member: str) -> Engine:
    """An engine whose steps of one request have two drafts, and larger ones none; or one with two ranks."""
    drafts = member == "deepseek_v3"
    params, cfg = golden.with_module(member) if drafts else golden.model(member)
    limits = {"max_model_len": 256, "num_pages": 24, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    if drafts:
        sizes = [[1, 1, 2], [2, 4, 0]]
        given = {"method": "mtp", "num_speculative_tokens_per_batch_size": sizes}
        limits |= {"speculative_config": given, "tokens_per_row": 3}
    else:
        limits["num_ranks"] = 2
    functions = batch_invariant(in_full_precision(model_functions(drafts=drafts)))
    return Engine(EngineComponents.on_devices(functions, params, cfg, EngineConfig(batch_invariant=True, **limits)))


def asked(member: str, number: int, salt: str):
    """A request; those of one salt share cached pages."""
    vocabulary = engine(member).model_cfg.vocab_size
    tokens = np.random.default_rng(7).integers(3, vocabulary, PROMPTS[0]).tolist()  # prompts share their beginnings
    sampling = {"max_tokens": 7, "logprobs": 2, "ignore_eos": True} | (
        {"seed": 5, "temperature": 0.8} if number % 2 else {}
    )
    prompt = [*tokens[: PROMPTS[number] - 1], 4 + number]
    return request(f"{member} {next(_names)}", prompt, salt=salt, **sampling)


def bits(gathered: Gathered) -> list[object]:
    return [gathered.tokens, [entry for output in gathered.outputs for entry in output.logprobs]]


@functools.cache
def alone(member: str, number: int) -> list[object]:
    """The bits of a request with nothing beside it, and nothing in the cache."""
    served = engine(member)
    served.add(asked(member, number, f"alone {number}"))
    (gathered,) = drain(served).values()
    return bits(gathered)


@pytest.mark.parametrize("member", ["deepseek_v3", "deepseek_v32"])
@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_bits_are_those_of_a_request_alone(member: str, data: st.DataObject) -> None:
    served, gathered, numbers = engine(member), {}, {}
    for number in data.draw(st.permutations(range(len(PROMPTS)))):
        one = asked(member, number, data.draw(st.sampled_from(["", f"own {next(_names)}"])))
        served.add(one)
        numbers[one.request_id] = number
        for _ in range(data.draw(st.integers(0, 3))):
            take(served.step(), gathered)
    drain(served, gathered)
    found = {output.outputs[0].request_id: bits(output) for output in gathered.values()}
    for request_id, number in numbers.items():
        assert found[request_id] == alone(member, number), number


@pytest.mark.parametrize("member", ["deepseek_v3", "deepseek_v32"])
def test_a_sampled_answer_scores_as_it_was_sampled(member: str) -> None:
    """Prefill gives the log-probabilities of an answer's tokens that decode and drafts gave, bit by bit."""
    number = 3
    prompt = asked(member, number, "scored").prompt_token_ids
    tokens, logprobs = alone(member, number)
    served = engine(member)
    served.add(request(f"{member} {next(_names)}", [*prompt, *tokens], max_tokens=1, prompt_logprobs=0))
    (gathered,) = drain(served).values()
    parts = [output.prompt_logprobs for output in gathered.outputs if output.prompt_logprobs is not None]
    scores = np.concatenate([np.frombuffer(part.logprobs, "<f4") for part in parts])
    assert scores[len(prompt) - 1 :].tolist() == [entry.logprob for entry in logprobs]


def test_the_trainer_scores_a_sampled_answer_as_it_was_sampled() -> None:
    """Sparse attention chooses the positions that decode chose: there are more than the indexer's top-k."""
    member, number = "deepseek_v32", 3
    prompt, (params, cfg) = asked(member, number, "scored").prompt_token_ids, golden.model(member)
    tokens, logprobs = alone(member, number)
    assert cfg.indexer.topk < len(prompt)
    found = served_logprobs(params, cfg, np.array([[*prompt, *tokens]], np.int32))
    assert found[0, len(prompt) - 1 :].tolist() == [entry.logprob for entry in logprobs]
