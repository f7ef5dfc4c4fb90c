"""In-flight requests: resumption in the next engine, and the quarantine of requests that crash engines."""

import weakref

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dsv3.sampling_params import SamplingParams
from dsv3.scheduler.request import EngineRequest, RequestRules, fan_out, prepare, resumed_request
from dsv3.server.engine.in_flight import SAFE_TOKENS, InFlightRequests
from tests.dsv3.server.fleet import RULES, Fleet, prepared

TOKENS = st.lists(st.integers(0, 8), max_size=300)


@given(st.lists(st.integers(0, 8), min_size=1, max_size=200), TOKENS, TOKENS, st.integers(1, 3), st.booleans())
def test_a_resumed_request_equals_one_submitted_with_the_same_tokens(prompt, before, since, n, caches):
    """Also if it had been resumed before; only the prompt's log-probabilities are not sent again."""
    rules = RequestRules(vocab_size=9, max_model_len=2000, fingerprint="print", enable_prefix_caching=caches)
    sampling = SamplingParams(n=n, seed=5, temperature=0.5, max_tokens=900, prompt_logprobs=None if since else 2)
    asked = EngineRequest(
        request_id=40, prompt_token_ids=prompt, sampling=sampling, answer_token_ids=before, cache_salt="salt"
    )
    whole = EngineRequest(
        request_id=40, prompt_token_ids=prompt, sampling=sampling, answer_token_ids=before + since, cache_salt="salt"
    )
    for i, expected in enumerate(fan_out(prepare(whole, rules))):
        assert resumed_request(prepare(asked, rules), i, np.array(since, "<i4"), rules) == expected


def test_prompt_logprobs_are_sent_once():
    asked = prepare(
        EngineRequest(request_id=1, prompt_token_ids=[5], sampling=SamplingParams(prompt_logprobs=2)), RULES
    )
    assert resumed_request(asked, 0, np.array([], "<i4"), RULES).sampling.prompt_logprobs == 2
    assert resumed_request(asked, 0, np.array([3], "<i4"), RULES).sampling.prompt_logprobs is None


ONE = st.tuples(st.integers(0, 11), st.integers(0, 40)).map(lambda pair: [pair])
SEVERAL = st.lists(st.tuples(st.integers(0, 11), st.integers(0, SAFE_TOKENS - 1)), max_size=3)


@given(st.integers(1, 3), st.integers(1, 12), ONE | SEVERAL, st.integers(SAFE_TOKENS, 3 * SAFE_TOKENS))
def test_only_requests_that_crash_engines_fail(api_servers, count, fatal, num_tokens):
    """One request is fatal, at any position, or several that fail early."""
    fatal = {i: at for i, at in fatal if i < count and at < num_tokens}
    fleet = Fleet(api_servers, 100, fatal)
    for request_id in range(count):
        fleet.add(request_id)
    for _ in range(20 * (count + 1) * num_tokens):
        if not fleet.num_in_flight:
            break
        fleet.step(num_tokens)
    assert not fleet.num_in_flight
    assert set(fleet.ended) == set(fatal)
    assert fleet.deaths <= 3 * len(fatal) + 1
    assert all("the engine has died" in text for text in fleet.ended.values())


def test_a_request_is_retried_max_restarts_times():
    in_flight = InFlightRequests(2)
    in_flight.add([prepared(0)], [object()])
    for restarts in (1, 2, 3):
        in_flight.by_id[0].in_engine = True
        in_flight.by_id[0].tokens.extend([1] * SAFE_TOKENS)  # nothing speaks against it
        ended = in_flight.on_engine_death()
        assert [live.restarts for live, _ in ended] == ([3] if restarts == 3 else [])
        assert list(in_flight.waiting) == ([] if restarts == 3 else [0])
    assert "3 times" in str(ended[0][1])


def test_a_request_that_was_never_sent_is_not_blamed():
    """It is sent to the next engine once, with those that were submitted together with it."""
    in_flight = InFlightRequests(0)
    new = [[prepared(i, n=2)] for i in (3, 7)]
    for asked in new:
        in_flight.defer(asked, in_flight.add(asked, [object()] * 2))
    for _ in range(5):
        assert not in_flight.on_engine_death() and not in_flight.waiting
    for request_id in (3, 4, 8):
        in_flight.pop(request_id)
    assert list(in_flight.pop_unsent(RULES)) == [(new[1], [7, 8])]
    assert not list(in_flight.pop_unsent(RULES))


def test_prompts_of_clients_that_leave_during_a_restart_are_released():
    """Clients that time out and retry filled the memory while a large model was loading for minutes."""

    class Asked(list):
        """A list that supports `weakref`."""

    in_flight, kept = InFlightRequests(0), []
    for i in range(0, 40, 2):
        asked = Asked([prepared(i), prepared(i + 1)])
        kept.append(weakref.ref(asked))
        in_flight.defer(asked, in_flight.add(asked, [object()] * 2))
        del asked
        in_flight.pop(i)
        if i:
            in_flight.pop(i + 1)
    assert [each() is not None for each in kept] == [True] + [False] * 19
    [(_, left)] = in_flight.pop_unsent(RULES)
    assert left == [0, 1]


def test_requests_deferred_while_others_are_sent_are_sent_too():
    in_flight, asked = InFlightRequests(0), {i: [prepared(i)] for i in range(4)}
    for i in (0, 1, 2):
        in_flight.defer(asked[i], in_flight.add(asked[i], [object()]))
    sent = []
    for _, ids in in_flight.pop_unsent(RULES):
        sent += ids
        if sent == [0]:
            in_flight.pop(1)
            in_flight.defer(asked[3], in_flight.add(asked[3], [object()]))
    assert sent == [0, 2, 3] and not in_flight.unsent
