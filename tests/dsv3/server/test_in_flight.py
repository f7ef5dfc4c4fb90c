"""Who goes on in the next engine, behind what, and who is to blame for the death of one after the other."""

import gc
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.suspects import RULES, Fleet, FleetWithoutTrial, FleetWithoutTurns, play, prepared
from dsv3.sampling_params import SamplingParams
from dsv3.scheduler.request import EngineRequest, RequestRules, behind, fan_out, prepare
from dsv3.server.engine.in_flight import SAFE_TOKENS, InFlightRequests

TOKENS = st.lists(st.integers(0, 8), max_size=300)


@given(st.lists(st.integers(0, 8), min_size=1, max_size=200), TOKENS, TOKENS, st.integers(1, 3), st.booleans())
def test_behind_its_tokens_a_request_is_as_if_it_had_come_so(prompt, before, since, n, caches):
    """It may have been resumed itself; only what was told of the prompt is not told again."""
    rules = RequestRules(vocab_size=9, max_model_len=2000, fingerprint="print", enable_prefix_caching=caches)
    sampling = SamplingParams(n=n, seed=5, temperature=0.5, max_tokens=900, prompt_logprobs=None if since else 2)
    asked = EngineRequest(
        request_id=40, prompt_token_ids=prompt, sampling=sampling, answer_token_ids=before, cache_salt="salt"
    )
    whole = EngineRequest(
        request_id=40, prompt_token_ids=prompt, sampling=sampling, answer_token_ids=before + since, cache_salt="salt"
    )
    for i, expected in enumerate(fan_out(prepare(whole, rules))):
        assert behind(prepare(asked, rules), i, np.array(since, "<i4"), rules) == expected


def test_the_prompts_logprobs_are_told_once():
    asked = prepare(
        EngineRequest(request_id=1, prompt_token_ids=[5], sampling=SamplingParams(prompt_logprobs=2)), RULES
    )
    assert behind(asked, 0, np.array([], "<i4"), RULES).sampling.prompt_logprobs == 2
    assert behind(asked, 0, np.array([3], "<i4"), RULES).sampling.prompt_logprobs is None


ONE = st.tuples(st.integers(0, 11), st.integers(0, 40)).map(lambda pair: [pair])
SEVERAL = st.lists(st.tuples(st.integers(0, 11), st.integers(0, SAFE_TOKENS - 1)), max_size=3)


@given(st.integers(1, 3), st.integers(1, 12), ONE | SEVERAL, st.integers(SAFE_TOKENS, 3 * SAFE_TOKENS))
def test_only_those_end_that_engines_die_of(api_servers, count, fatal, num_tokens):
    """Any one request, or several that get nowhere; one that gets on can still kill an engine during a trial."""
    fatal = {i: at for i, at in fatal if i < count and at < num_tokens}
    fleet = Fleet(api_servers, 100, fatal)
    for request_id in range(count):
        fleet.add(request_id)
    for _ in range(20 * (count + 1) * num_tokens):
        if not fleet.num_live:
            break
        fleet.step(num_tokens)
    assert not fleet.num_live
    assert set(fleet.ended) == set(fatal)
    assert fleet.deaths <= 3 * len(fatal) + 1
    assert all("the engine has died" in text for text in fleet.ended.values())


@pytest.mark.parametrize(("scheme", "least"), [(Fleet, 0), (FleetWithoutTurns, 2), (FleetWithoutTrial, 10)])
def test_what_the_trial_and_its_turns_are_for(scheme, least):
    """Counts how many of 23 innocent requests end with an error beside a fatal one, on average, over four fronts."""
    ended = [play(scheme, 4, 1, seed)[0] for seed in range(50)]
    assert sum(ended) >= 50 * least and (max(ended) == 0) == (scheme is Fleet)


def test_a_request_goes_on_so_often_and_no_more():
    in_flight = InFlightRequests(2)
    in_flight.add([prepared(0)], [object()])
    for restarts in (1, 2, 3):
        in_flight.by_id[0].is_there = True
        in_flight.by_id[0].tokens.extend([1] * SAFE_TOKENS)  # nothing speaks against it
        ended = in_flight.on_engine_death()
        assert [live.restarts for live, _ in ended] == ([3] if restarts == 3 else [])
        assert list(in_flight.waiting) == ([] if restarts == 3 else [0])
    assert "3 times" in str(ended[0][1])


def test_one_that_no_engine_has_had_is_not_to_blame():
    """It waits for the next engine, once, with those that came with it."""
    in_flight = InFlightRequests(0)
    new = [[prepared(i, n=2)] for i in (3, 7)]
    for asked in new:
        in_flight.put_off(asked, in_flight.add(asked, [object()] * 2))
    for _ in range(5):
        assert not in_flight.on_engine_death() and not in_flight.waiting
    for request_id in (3, 4, 8):
        in_flight.pop(request_id)
    assert list(in_flight.take_unsent(RULES)) == [(new[1], [7, 8])]
    assert not list(in_flight.take_unsent(RULES))


def test_prompts_of_clients_that_go_while_there_is_no_engine_go_with_them():
    """Clients that time out and ask again filled the memory, while a large model loads for minutes."""

    class Asked(list):
        """What `weakref` takes."""

    in_flight, kept = InFlightRequests(0), []
    for i in range(0, 40, 2):
        asked = Asked([prepared(i), prepared(i + 1)])
        kept.append(weakref.ref(asked))
        in_flight.put_off(asked, in_flight.add(asked, [object()] * 2))
        del asked
        in_flight.pop(i)
        if i:
            in_flight.pop(i + 1)
    gc.collect()
    assert [each() is not None for each in kept] == [True] + [False] * 19
    [(_, left)] = in_flight.take_unsent(RULES)
    assert left == [0, 1]


def test_what_comes_while_the_others_are_sent_is_sent_too():
    in_flight, asked = InFlightRequests(0), {i: [prepared(i)] for i in range(4)}
    for i in (0, 1, 2):
        in_flight.put_off(asked[i], in_flight.add(asked[i], [object()]))
    sent = []
    for _, ids in in_flight.take_unsent(RULES):
        sent += ids
        if sent == [0]:
            in_flight.pop(1)
            in_flight.put_off(asked[3], in_flight.add(asked[3], [object()]))
    assert sent == [0, 2, 3] and not in_flight._unsent
