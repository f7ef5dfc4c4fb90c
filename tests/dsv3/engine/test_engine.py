"""Each request gets what it asks for, whatever else the engine does."""

import threading

import msgspec
import numpy as np
import pytest

from dsv3.engine.engine import Engine
from dsv3.scheduler.request import EngineDead, InvalidRequest, QueueFull
from tests.dsv3.engine import toy
from tests.dsv3.engine.conftest import parts
from tests.dsv3.engine.driving import drain, name_of, number, request, run, take, timing_of
from tests.dsv3.engine.fewer import one_bucket

PROMPT = [(11 * i) % 60 + 1 for i in range(150)]


@pytest.mark.parametrize("length", [1, 63, 64, 65, 100, 128, 150])
@pytest.mark.parametrize("max_tokens", [1, 70])
def test_greedy_text(engine, length, max_tokens):
    got = run(engine, request("a", PROMPT[:length], max_tokens=max_tokens, ignore_eos=True))["a"]
    assert got.tokens == toy.expected_tokens(PROMPT[:length], max_tokens, ())
    assert got.finish_reason == "length"


def test_without_max_tokens_an_answer_fills_the_model_length(engine):
    got = run(engine, request("a", PROMPT, ignore_eos=True))["a"]
    assert len(got.tokens) == 256 - len(PROMPT)


def test_a_mixed_workload_compiles_nothing(engine):
    samplings = [
        {},
        {"temperature": 0.8},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 5, "min_p": 0.05},
        {"presence_penalty": 1.0, "repetition_penalty": 1.2},
        {"logprobs": 3},
        {"temperature": 1.0, "logit_bias": {3: 5.0}, "logprobs": 0, "min_tokens": 2},
    ]
    gathered = run(
        engine,
        *(
            request(str(i), PROMPT[: 7 * i + 1], max_tokens=5 * i + 1, **samplings[i % len(samplings)])
            for i in range(18)
        ),
    )
    assert len(gathered) == 18 and all(g.finish_reason in ("stop", "length") for g in gathered.values())
    assert engine.stats().recompilations == 0


def test_a_compilation_after_warm_up_is_counted(make_engine, monkeypatch, caplog):
    import jax

    engine = make_engine()
    launch = engine.executor.launch

    def with_a_new_shape(command):
        jax.jit(lambda x: x * 3 + command.number)(np.arange(5))
        return launch(command)

    monkeypatch.setattr(engine.executor, "launch", with_a_new_shape)
    run(engine, request("a", [1], max_tokens=1))
    assert engine.stats().recompilations > 0
    assert "compiled after warm-up" in caplog.text


def test_the_next_step_is_launched_before_a_token_is_read(engine, monkeypatch):
    events = []
    launch, fetch = engine.executor.launch, engine.executor.fetch

    def logged_launch(command):
        events.append("launch")
        return launch(command)

    def logged_fetch(command, launched):
        events.append("fetch")
        return fetch(command, launched)

    monkeypatch.setattr(engine.executor, "launch", logged_launch)
    monkeypatch.setattr(engine.executor, "fetch", logged_fetch)
    run(engine, request("a", [1], max_tokens=6, ignore_eos=True))
    assert events[:2] == ["launch", "launch"]
    launched = [i for i, event in enumerate(events) if event == "launch"]
    assert all(events[i + 1] == "fetch" for i in launched[1:])


SEEDED = {"temperature": 1.0, "seed": 1234, "max_tokens": 40, "ignore_eos": True}


def test_a_seed_fixes_the_text_whatever_else_runs(engine):
    alone = run(engine, request("a", PROMPT[:30], **SEEDED))["a"].tokens
    others = [
        request(f"o{i}", PROMPT[: 20 * i + 1], temperature=0.5 * i, max_tokens=30 + i, presence_penalty=0.1 * i)
        for i in range(5)
    ]
    crowded = run(engine, *others[:3], request("b", PROMPT[:30], **SEEDED), *others[3:])["b"].tokens
    assert crowded == alone
    other_seed = run(engine, request("c", PROMPT[:30], **(SEEDED | {"seed": 1235})))["c"].tokens
    assert other_seed != alone


def test_without_a_seed_answers_differ(engine):
    gathered = run(engine, *(request(str(i), [5], temperature=2.0, max_tokens=20) for i in range(4)))
    assert len({tuple(g.tokens) for g in gathered.values()}) == 4


def test_a_pre_empted_seeded_request_continues_unchanged(make_engine):
    alone = run(make_engine(), request("a", [9] * 60, **(SEEDED | {"max_tokens": 150})))["a"].tokens
    engine, gathered = make_engine(), {}
    crowd = [request(f"r{i}", [9] * 60, **(SEEDED | {"max_tokens": 150})) for i in range(8)]
    for item in crowd:
        engine.add(msgspec.structs.replace(item, return_timing=True))
    listed: set[tuple[str, str]] = set()
    while engine.has_work:
        take(engine.step(), gathered)
        found = engine.requests()
        assert found.total == len(found.requests) == 8 - sum(g.finish_reason is not None for g in gathered.values())
        assert all(each.computed <= each.tokens <= 60 + 150 and each.prompt_tokens == 60 for each in found.requests)
        listed |= {(each.state, each.reason) for each in found.requests}
    assert all(g.tokens == alone for g in gathered.values())
    preemptions = [timing_of(each).preemptions for each in gathered.values()]
    assert sum(preemptions) == engine.stats().preemptions > 0
    assert {("prefilling", ""), ("decoding", ""), ("preempted", "pages")} <= listed


def test_stop_tokens(engine):
    expected = toy.expected_tokens(PROMPT[:10], 30, ())
    stop = expected[12]
    first = expected.index(stop)
    got = run(engine, request("a", PROMPT[:10], max_tokens=30, ignore_eos=True, stop_token_ids=(stop,)))["a"]
    assert got.tokens == expected[: first + 1]
    assert (got.finish_reason, got.last.stop_token_id) == ("stop", stop)
    both = run(
        engine,
        request("a", PROMPT[:10], max_tokens=30, ignore_eos=True, stop_token_ids=(stop,)),
        request("b", PROMPT[:10], max_tokens=30, ignore_eos=True),
    )
    assert both["b"].tokens == expected, "another request's stop token ended this one"


def test_min_tokens_forbids_end_and_stop_tokens(engine):
    stop = tuple(range(1, 60))
    got = run(engine, request("a", PROMPT[:10], max_tokens=30, min_tokens=8, stop_token_ids=stop))["a"]
    assert len(got.tokens) >= 9
    assert not set(got.tokens[:8]) & {*stop, toy.EOS}


def test_logit_bias_decides(engine):
    got = run(engine, request("a", PROMPT[:10], max_tokens=5, logit_bias={42: 100.0}, ignore_eos=True))["a"]
    assert got.tokens == [42] * 5


def test_penalties_count_the_answer_and_survive_pre_emption(make_engine):
    params = {"frequency_penalty": 2.0, "logit_bias": {7: 30.0}, "max_tokens": 120, "ignore_eos": True}
    engine = make_engine()
    alone = run(engine, request("a", [9] * 60, **params))["a"].tokens
    run_length = next(i for i, token in enumerate(alone) if token != 7)
    assert 10 <= run_length <= 16, "30 of bias are used up by 2 a token"
    crowd = run(engine, *(request(f"r{i}", [9] * 60, **params) for i in range(8)))
    assert engine.stats().preemptions > 0
    assert all(g.tokens == alone for g in crowd.values())


def test_adjustments_of_a_slots_last_owner_do_not_linger(engine):
    run(engine, *(request(f"a{i}", PROMPT[:5], max_tokens=5, logit_bias={42: 100.0}) for i in range(8)))
    gathered = run(
        engine,
        request("plain", PROMPT[:10], max_tokens=20, ignore_eos=True),
        request("full", PROMPT[:10], max_tokens=20, logit_bias={41: 100.0}, ignore_eos=True),
    )
    assert gathered["plain"].tokens == toy.expected_tokens(PROMPT[:10], 20, ())


def test_logprobs(engine):
    got = run(engine, request("a", PROMPT[:10], max_tokens=6, logprobs=3, ignore_eos=True, temperature=1.0))["a"]
    tokens = list(PROMPT[:10])
    for output in got.outputs:
        [entry] = output.logprobs
        scores = np.asarray(toy.scores(tokens)) / 8192.0
        logp = scores - np.log(np.exp(scores).sum())
        assert entry.logprob == pytest.approx(logp[output.token_ids[0]], abs=1e-4)
        assert entry.top_ids == np.argsort(-logp, kind="stable")[:3].tolist()
        assert entry.top_logprobs == pytest.approx(sorted(logp, reverse=True)[:3], abs=1e-4)
        tokens += output.token_ids


def test_processed_logprobs_and_masks():
    """They are of the distribution that is drawn from: after bias, temperature and top_k."""
    with one_bucket():
        engine = Engine(parts(logprobs_mode="processed_logprobs", enable_return_sampling_mask=True, num_ranks=1))
    how = {"max_tokens": 6, "logprobs": 4, "ignore_eos": True, "temperature": 0.5, "top_k": 3}
    biased = request("b", PROMPT[:10], **how, logit_bias={9: 5.0}, return_sampling_mask=True)
    free = request("c", PROMPT[:10], max_tokens=3, temperature=1.0, return_sampling_mask=True)
    greedy = request("d", PROMPT[:10], max_tokens=3, return_sampling_mask=True)
    gathered = run(engine, request("a", PROMPT[:10], **how), biased, free, greedy)
    assert all(output.logprobs[0].kept == b"" for output in gathered["c"].outputs), "nothing was excluded"
    assert all(output.logprobs[0].kept_ids.tolist() == output.token_ids for output in gathered["d"].outputs)
    for name, bias in (("a", 0.0), ("b", 5.0)):
        tokens = list(PROMPT[:10])
        for output in gathered[name].outputs:
            scores = np.asarray(toy.scores(tokens)) / 8192.0
            scores[9] += bias
            kept = np.where(scores >= np.sort(scores)[-3], scores / 0.5, -np.inf)
            wanted = kept - kept.max() - np.log(np.exp(kept - kept.max()).sum())
            [entry] = output.logprobs
            assert entry.logprob == pytest.approx(wanted[output.token_ids[0]], abs=1e-4)
            assert entry.top_logprobs == pytest.approx(np.sort(wanted)[::-1][:4], abs=1e-4)
            kept = np.isfinite(wanted).nonzero()[0].astype("<i4").tobytes()
            assert entry.kept == (kept if name == "b" else None)
            tokens += output.token_ids


def test_only_requests_that_ask_get_logprobs(engine):
    gathered = run(engine, request("a", [3], max_tokens=3, logprobs=0), request("b", [3], max_tokens=3))
    assert all(o.logprobs is not None and o.logprobs[0].top_ids == [] for o in gathered["a"].outputs)
    assert all(o.logprobs is None for o in gathered["b"].outputs)


def test_a_cached_prefix_is_not_computed_again(engine):
    run(engine, request("a", PROMPT[:140], max_tokens=1))
    before = engine.stats()
    got = run(engine, request("b", [*PROMPT[:140], 5], max_tokens=4, ignore_eos=True))["b"]
    after = engine.stats()
    assert got.outputs[0].num_cached_tokens == 128
    assert after.prefix_hits - before.prefix_hits == 128
    assert after.prompt_tokens - before.prompt_tokens == 13
    assert got.tokens == toy.expected_tokens([*PROMPT[:140], 5], 4, ())


def test_an_answer_is_a_prefix_too(engine):
    answer = run(engine, request("a", PROMPT[:60], max_tokens=70, ignore_eos=True))["a"].tokens
    got = run(engine, request("b", [*PROMPT[:60], *answer, 1], max_tokens=2))["b"]
    assert got.outputs[0].num_cached_tokens == 128


def test_salts_keep_tenants_apart(engine):
    run(engine, request("a", PROMPT[:140], max_tokens=1, salt="one"))
    got = run(engine, request("b", PROMPT[:140], max_tokens=1, salt="two"))["b"]
    assert got.outputs[0].num_cached_tokens == 0
    got = run(engine, request("c", PROMPT[:140], max_tokens=1, salt="one"))["c"]
    assert got.outputs[0].num_cached_tokens == 128


def test_a_whole_prompt_in_the_cache_still_computes_its_last_token(engine):
    first = run(engine, request("a", PROMPT[:128], max_tokens=3, ignore_eos=True))["a"]
    second = run(engine, request("b", PROMPT[:128], max_tokens=3, ignore_eos=True))["b"]
    assert second.outputs[0].num_cached_tokens == 64
    assert second.tokens == first.tokens


def test_equal_prompts_that_arrive_together_are_computed_once_a_rank(engine):
    gathered = run(engine, request("a", PROMPT[:140], n=6, temperature=1.0, seed=1, max_tokens=3, ignore_eos=True))
    assert len(gathered) == 6
    assert engine.stats().prompt_tokens <= 2 * 140 + 4 * 12


def test_nan_fails_its_own_request_alone(engine):
    poisoned = [*PROMPT[:70], toy.POISON]
    gathered = run(
        engine,
        request("good", PROMPT[:70], max_tokens=20, ignore_eos=True),
        request("bad", poisoned, max_tokens=20),
        request("also good", PROMPT[:71], max_tokens=20, ignore_eos=True),
    )
    assert (gathered["bad"].finish_reason, gathered["bad"].tokens) == ("error", [])
    assert "not finite" in gathered["bad"].last.error
    assert gathered["good"].tokens == toy.expected_tokens(PROMPT[:70], 20, ())
    assert gathered["also good"].tokens == toy.expected_tokens(PROMPT[:71], 20, ())


def test_nan_leaves_the_prefix_cached_that_others_have_written(engine):
    def honest(name: str, max_tokens: int):
        return [request(f"{name}{i}", PROMPT[:70], max_tokens=max_tokens, ignore_eos=True) for i in range(2)]

    run(engine, *honest("first", 1))  # one per rank
    bad = [*PROMPT[:64], *range(1, 65), toy.POISON]
    gathered = run(engine, *honest("beside", 9), request("bad", bad))
    assert gathered["bad"].finish_reason == "error" and engine.stats().prefix_hits == 3 * 64
    assert all(gathered[f"beside{i}"].tokens == toy.expected_tokens(PROMPT[:70], 9, ()) for i in range(2))
    gathered = run(engine, *honest("after", 1))
    assert [gathered[f"after{i}"].outputs[0].num_cached_tokens for i in range(2)] == [64, 64]
    own = run(engine, request("own", [*bad[:128], 5], max_tokens=9, ignore_eos=True))["own"]
    assert own.outputs[0].num_cached_tokens == 64, "what a request with NaN has written was shared"
    assert own.tokens == toy.expected_tokens([*bad[:128], 5], 9, ())


@pytest.mark.parametrize(
    ("prompt", "sampling", "words"),
    [
        ([], {}, "empty"),
        ([1] * 256, {}, "max_model_len is 256"),
        ([1, 67], {}, "67 is not in the vocabulary"),
        ([-1], {}, "-1 is not in the vocabulary"),
        ([1], {"logit_bias": {67: 1.0}}, "logit_bias"),
        ([1], {"min_tokens": 1, "stop_token_ids": tuple(range(67))}, "min_tokens: 1 forbids all 67"),
        ([1], {"n": 2}, "fan_out"),
    ],
)
def test_what_can_never_be_served_is_refused_at_once(engine, prompt, sampling, words):
    with pytest.raises(InvalidRequest, match=words):
        engine.add(request("a", prompt, **sampling))
    assert not engine.has_work


def test_an_id_in_use_is_refused_until_it_is_free(engine):
    engine.add(request("a", [1], max_tokens=1))
    with pytest.raises(InvalidRequest, match="in use"):
        engine.add(request("a", [1]))
    drain(engine)
    assert run(engine, request("a", [1], max_tokens=1))["a"].finish_reason


def test_a_full_queue_refuses(make_engine):
    engine = make_engine(max_num_queued_reqs=2)
    for i in range(10):  # eight free slots and two places in the queue
        engine.add(request(str(i), [1], max_tokens=3))
    with pytest.raises(QueueFull):
        engine.add(request("x", [1]))
    drain(engine)
    engine.add(request("x", [1], max_tokens=1))
    drain(engine)


def test_an_abort_ends_a_request_wherever_it_is(engine):
    gathered = {}
    for i in range(12):
        engine.add(request(str(i), PROMPT, max_tokens=90, ignore_eos=True))
    engine.abort(number("0"))  # not even taken over yet
    take(engine.step(), gathered)
    engine.abort(number("11"))  # waiting
    engine.abort(number("1"))  # its prompt is in flight
    take(engine.step(), gathered)
    assert {name for name, g in gathered.items() if g.finish_reason == "abort"} == {"0", "1", "11"}
    for i in range(12):
        engine.abort(number(str(i)))
    engine.abort(number("never heard of"))
    drain(engine, gathered)
    assert len(gathered) == 12 and all(g.finish_reason == "abort" for g in gathered.values())


def test_ranks_fill_evenly(engine):
    for i in range(4):
        engine.add(request(str(i), [i + 1] * 3, max_tokens=20, ignore_eos=True))
    engine.step()
    slots = engine.scheduler.slots
    assert [slots.num_running(rank) for rank in range(2)] == [2, 2]
    drain(engine)


def test_first_come_first_served(engine):
    order = []
    for i in range(12):
        engine.add(request(str(i), [i + 1] * 5, max_tokens=1))
    while engine.has_work:
        order += [name_of(o.request_id) for o in engine.step() if o.finish_reason]
    assert sorted(order[:8]) == sorted(map(str, range(8)))


def test_requests_from_other_threads(engine):
    def feed(worker: int) -> None:
        for i in range(10):
            engine.add(request(f"{worker}-{i}", [worker + 1, i + 1], max_tokens=5, ignore_eos=True))
            if i % 3 == 2:
                engine.abort(number(f"{worker}-{i}"))

    threads = [threading.Thread(target=feed, args=(w,)) for w in range(4)]
    for thread in threads:
        thread.start()
    gathered = {}
    while any(t.is_alive() for t in threads) or engine.has_work:
        take(engine.step(), gathered)
    assert len(gathered) == 40
    for name, got in gathered.items():
        worker, i = map(int, name.split("-"))
        expected = toy.expected_tokens([worker + 1, i + 1], 5, ())
        assert got.finish_reason in ("length", "abort")
        assert got.tokens == expected[: len(got.tokens)]


def test_an_exception_in_a_step_ends_everything_cleanly(make_engine, monkeypatch):
    engine = make_engine()
    for i in range(12):
        engine.add(request(str(i), PROMPT[:80], max_tokens=50))
    gathered = {}
    for _ in range(4):
        take(engine.step(), gathered)

    def broken(command, launched):
        raise RuntimeError("the device has gone")

    monkeypatch.setattr(engine.executor, "fetch", broken)
    engine.add(request("late", [1]))
    drain(engine, gathered, limit=3)
    assert len(gathered) == 13 and all(g.finish_reason for g in gathered.values())
    assert gathered["late"].finish_reason == "error" and "RuntimeError" in gathered["late"].last.error
    assert isinstance(engine.failure, RuntimeError)
    assert engine.stats().pages_in_use == 0
    with pytest.raises(EngineDead):
        engine.add(request("after", [1]))
