"""A fleet in virtual time: sums done by hand, every request ends once, more instances are no worse."""

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv3.sampling_params import SamplingParams
from dsv3.scheduler.request import EngineRequest, PreparedRequest, RequestRules, prepare
from tests.tools.simulate.tables import HOST, decode_s, prefill_s, table
from tools.simulate.fleet import InstanceGroup, Setting, SettingError, SimulatedFleet, hold, replay
from tools.simulate.options import Pressure, Rule, SimulateOptions
from tools.simulate.prompts import VOCAB, SimulatedRequest, keys_of, request_of
from tools.simulate.record import RequestLog
from tools.simulate.simulation import simulate
from tools.simulate.times import InstanceTimes, VirtualClock
from tools.simulate.traffic import Session, TokenRun, TracedRequest

BOTH, PREFILL, DECODE = table(), table("prefill"), table("decode")
ONE = Setting(InstanceGroup(BOTH, 1))
PAIR = Setting(InstanceGroup(DECODE, 1), InstanceGroup(PREFILL, 1))


def ask(prompt: int, answer: int, name: int = 0) -> TracedRequest:
    return TracedRequest((TokenRun(name, prompt),), answer)


def played(setting: Setting, *sessions: Session, until: float | None = None) -> SimulatedFleet:
    fleet = SimulatedFleet(setting, VirtualClock(), RequestLog())
    replay(fleet, sessions, until)
    fleet.clock.run(until, lambda: fleet.is_over)
    return fleet


def run_of(options: SimulateOptions, **by_name: InstanceTimes) -> dict[str, Any]:
    return simulate(options, by_name)[0]


def test_one_request_takes_the_sum_of_its_steps() -> None:
    """100 tokens are two chunks, of 64 and 36 in a bucket of 64; the second gives the first of three tokens."""
    fleet = played(ONE, Session(5.0, (ask(100, 3),)))
    chunks = prefill_s(64, 64 * 32 / 64), prefill_s(64, 36 * 82 / 64)
    record = fleet.record
    assert record.first[0] - record.arrived[0] == pytest.approx(sum(chunks))
    steps = decode_s(1, 101), decode_s(1, 102)
    assert record.last[0] - record.first[0] == pytest.approx(sum(steps))
    assert (record.tokens[0], record.ended[0]) == (3, record.last[0])
    assert record.figures(10.0)["tpot_ms"]["mean"] == pytest.approx(sum(steps) / 2 * 1e3)


def test_a_pair_hands_whole_pages_over_and_computes_the_rest() -> None:
    """The prefill instance computes 64 and 36 tokens, two pages cross a link, the other computes the 36 again."""
    fleet = played(PAIR, Session(0.0, (ask(100, 2),)))
    first, second = prefill_s(64, 32), prefill_s(64, 36 * 82 / 64)
    on_its_way = 2 * PREFILL.page_bytes / PREFILL.link
    rest = second  # the same chunk: 36 tokens behind 64
    assert fleet.record.first[0] == pytest.approx(first + second + on_its_way + rest)
    assert fleet.record.last[0] == pytest.approx(fleet.record.first[0] + decode_s(1, 101))


def test_a_prompt_of_less_than_a_page_needs_no_prefill_instance() -> None:
    fleet = played(PAIR, Session(0.0, (ask(40, 1),)))
    assert fleet.record.first[0] == pytest.approx(prefill_s(64, 40 * 20 / 64))
    [(_, idle), _] = [fleet.done(pool) for pool, _ in fleet.pools]
    assert idle.steps == 0


def test_a_second_prompt_alike_costs_what_is_not_cached() -> None:
    turns = TracedRequest((TokenRun(0, 320),), 2), TracedRequest((TokenRun(0, 320), TokenRun(1, 10)), 2)
    fleet = played(ONE, Session(0.0, turns))
    assert fleet.record.cached[:2].tolist() == [0, 320]
    assert fleet.record.arrived[1] == fleet.record.ended[0]
    assert fleet.record.first[1] - fleet.record.arrived[1] == pytest.approx(prefill_s(64, 10 * 325 / 64))


def test_prompts_are_those_that_a_front_prepares() -> None:
    found = request_of(SimulatedRequest(4, (TokenRun(3, 200), TokenRun(-7, 90)), 290, 295))
    for field in ("request_id", "tokens", "root", "max_length", "stop_ids"):
        assert getattr(found, field) == getattr(real(found), field)


def real(request: PreparedRequest) -> PreparedRequest:
    """Returns a request as a front prepares it."""
    sampling = SamplingParams(temperature=0, ignore_eos=True, max_tokens=request.max_length - len(request.prompt))
    asked = EngineRequest(request_id=request.request_id, prompt_token_ids=request.prompt.tolist(), sampling=sampling)
    return prepare(asked, RequestRules(vocab_size=VOCAB, max_model_len=2048))


RUNS = st.builds(TokenRun, st.sampled_from([1, 2, -2, 5 * VOCAB + 3]), st.sampled_from([2, 63, 64, 65, 127, 200]))


@settings(deadline=None)
@given(st.lists(st.lists(RUNS, min_size=1, max_size=3, unique_by=lambda run: run.name), min_size=2, max_size=4))
def test_keys_are_equal_where_those_of_a_front_are(contents) -> None:
    asked = [SimulatedRequest(i, tuple(runs), 0, 2000) for i, runs in enumerate(contents)]
    pairs = {
        pair
        for each in asked
        for pair in zip(keys_of(each.content, 64), real(request_of(each)).prefix_keys, strict=True)
    }
    assert len({ours for ours, _ in pairs}) == len({theirs for _, theirs in pairs}) == len(pairs)


def test_nothing_comes() -> None:
    fleet = played(PAIR, until=60.0)
    figures = fleet.record.figures(60.0, {"ttft": 1.0})
    assert figures["requests"] == {"arrived": 0, "unfinished": 0}
    assert figures["ttft_ms"] is None and figures["itl_ms"] is None
    assert figures["goodput"] == {"requests_per_second": 0.0, "share": 0.0}


def test_what_is_too_long_is_refused_and_what_grows_too_long_is_cut() -> None:
    fleet = played(ONE, Session(0.0, (ask(1024, 1), ask(5000, 1), ask(1000, 500))))
    assert fleet.record.ends == {"too long": 2, "answered": 1}
    assert fleet.record.tokens[2] == 24


def test_a_burst_fills_the_queue_and_no_more() -> None:
    """An instance takes twice its slots, 1,024 wait for it and 30 s at most, the others are refused at once."""
    fleet = played(ONE, *(Session(0.0, (ask(64, 2, i),)) for i in range(2000)))
    assert fleet.record.ends["refused"] >= 2000 - 1024 - 8
    assert sum(fleet.record.ends.values()) == 2000
    late = fleet.record.ended[:2000][~fleet.record.answered[:2000]]
    assert set(late.tolist()) <= {0.0, 30.0}


def test_an_instance_without_room_for_one_request_is_refused() -> None:
    with pytest.raises(SettingError, match="small_both: num_pages: 8 pages of 64 tokens cannot hold one request"):
        Setting(InstanceGroup(table(pages=8), 1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Setting(InstanceGroup(PREFILL, 1)), "small_prefill only computes prompts"),
        (lambda: Setting(InstanceGroup(DECODE, 1)), "small_decode computes no prompts"),
        (lambda: Setting(InstanceGroup(BOTH, 0)), "small_both: 0 instances"),
        (lambda: Setting(InstanceGroup(BOTH, 1), store_gib=1), "a store needs host memory"),
    ],
)
def test_settings_that_cannot_be(make, message) -> None:
    with pytest.raises(SettingError, match=message):
        make()


@st.composite
def worlds(draw) -> tuple[Setting, list[Session]]:
    count = st.integers(1, 3)
    seqs, pages = draw(st.sampled_from([1, 4, 8])), draw(st.sampled_from([17, 24, 64]))
    ranks = draw(st.integers(1, 3))
    few = {"ranks": ranks, "seqs": seqs, "pages": pages, "batched": draw(st.sampled_from([64, 256]))}
    rule = draw(st.sampled_from([None, Rule(period_s=0.2, start_s=0.5, queue_s=0.1, calm=2, most=3)]))
    pair = draw(st.booleans())
    setting = Setting(
        InstanceGroup(table("decode" if pair else "both", **few), draw(count), rule),
        InstanceGroup(table("prefill", **few), draw(count), rule) if pair else None,
        routing=draw(st.sampled_from(["cost", "round_robin"])),
        host_gib=draw(st.sampled_from([0.0, 0.05])),
    )
    runs = st.builds(TokenRun, st.integers(0, 3), st.integers(1, 400))
    asks = st.builds(
        lambda runs, answer: TracedRequest(tuple(runs), answer),
        st.lists(runs, min_size=1, max_size=3),
        st.integers(1, 40),
    )
    sessions = st.builds(Session, st.floats(0, 2), st.lists(asks, min_size=1, max_size=3).map(tuple))
    found = sorted(draw(st.lists(sessions, max_size=25)), key=lambda session: session.at)
    return setting, found


@settings(max_examples=25, deadline=None)
@given(worlds())
def test_every_request_ends_once_with_all_its_tokens(world) -> None:
    """Nothing is left behind: no page, no load at the router, no request."""
    setting, sessions = world
    fleet = played(setting, *sessions)
    asks = [each for session in sessions for each in session.asks]
    record = fleet.record
    assert record.count == sum(record.ends.values()) == len(asks)
    whole = sorted(min(a.prompt + a.answer, 1024) - a.prompt for a in asks if a.prompt < 1024)
    assert sorted(record.tokens[: record.count][record.answered[: record.count]].tolist()) == whole
    assert record.output_tokens == sum(whole)
    assert record.ends["too long"] == sum(a.prompt >= 1024 for a in asks)
    for pool, _ in fleet.pools:
        for place in pool.places:
            assert (place.load.requests, place.load.held, place.load.prefill) == (0, 0, 0.0)
            assert place.instance.is_idle
            fleet.clock.run(fleet.clock.now + 5)  # what a last step still holds comes back when it has ended
            assert place.instance.scheduler.pages.in_use == 0


def test_the_same_seed_gives_the_same_figures() -> None:
    options = SimulateOptions(
        instances="both", num_instances=2, request_rate=4.0, seconds=10.0, prompt=200, answer=20, max_model_len=1024
    )
    first, again = (run_of(options, both=BOTH) for _ in range(2))
    other = run_of(dataclasses.replace(options, seed=1), both=BOTH)
    assert first | {"simulator": 0} == again | {"simulator": 0} != other | {"simulator": 0}


@pytest.mark.parametrize("routing", ["cost", "round_robin"])
def test_more_instances_are_no_worse(routing) -> None:
    limits = {"ttft": 2000.0}

    def good(count: int) -> float:
        burst = [Session(0.01 * i, (ask(300, 20, i),)) for i in range(60)]
        fleet = played(Setting(InstanceGroup(BOTH, count), routing=routing), *burst)
        return fleet.record.figures(100.0, limits)["goodput"]["share"]

    found = [good(count) for count in (1, 2, 4, 8)]
    assert found == sorted(found) and found[0] < 1 == found[-1]


def test_a_closed_loop_holds_its_requests() -> None:
    """Little's law: requests per second times their time is what is on its way."""
    fleet = SimulatedFleet(Setting(InstanceGroup(table(seqs=16, pages=256), 1)), VirtualClock(), RequestLog(5.0))
    hold(fleet, (ask(64, 20, i) for i in itertools.count()), 10, 1.0, 25.0)
    fleet.clock.run(25.0)
    assert fleet.in_flight == 10
    figures = fleet.record.figures(25.0)
    assert figures["requests_per_second"] * figures["e2e_ms"]["mean"] / 1e3 == pytest.approx(10, rel=0.02)


def test_a_full_pair_reaches_what_its_table_says() -> None:
    """All 32 slots of two ranks decode: a step is that of the mean context, prompt and half of the answer."""
    decode = table("decode", ranks=2, seqs=16, pages=256)
    fleet = SimulatedFleet(
        Setting(InstanceGroup(decode, 1), InstanceGroup(table("prefill", ranks=2, batched=1024), 2)),
        VirtualClock(),
        RequestLog(5.0),
    )
    hold(fleet, (ask(300, 40 + i % 41, i) for i in itertools.count()), 64, 2.0, 15.0)
    fleet.clock.run(15.0)
    _, (pool, _) = fleet.pools
    _, done = fleet.done(pool)
    expected = decode_s(16, 300 + 60 / 2)
    assert done.decode_s / done.decode_steps == pytest.approx(expected, rel=0.05)
    most = 32 * done.steps / done.busy_s  # with the prompts' last tokens, which a plan leaves out
    # Those that wait for others' ends of prompts, to be computed together, hold slots and have no token.
    assert 0.85 * most < fleet.record.figures(15.0)["output_tokens_per_second"] < 1.01 * most


def test_host_memory_gives_back_what_the_device_has_given_up() -> None:
    """Twelve prompts of 8 pages take turns on a device of 40 pages; host memory holds them all."""
    turns = [Session(0.5 * i, (ask(520, 1, i % 12),)) for i in range(48)]
    small = table(pages=40, batched=256)
    without = played(Setting(InstanceGroup(small, 1)), *turns)
    with_host = played(Setting(InstanceGroup(small, 1), host_gib=1.0), *turns)
    assert without.record.cached[12:48].sum() == 0
    assert with_host.record.cached[12:48].tolist() == [512] * 36
    [pages] = with_host.pages
    assert pages.counts()["host"].hits == 36 * 512
    wait, less = (fleet.record.first[40] - fleet.record.arrived[40] for fleet in (without, with_host))
    assert less < wait


def test_instances_that_share_a_store_find_each_others_pages() -> None:
    setting = Setting(
        InstanceGroup(table(pages=40, batched=256), 2), routing="round_robin", host_gib=0.02, store_gib=1.0
    )
    fleet = played(setting, *(Session(2.0 * i, (ask(520, 1),)) for i in range(3)))
    assert fleet.record.cached[:3].tolist() == [0, 512, 512]
    assert sum(pages.counts()["store"].hits for pages in fleet.pages) == 512


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 1.5)), min_size=1, max_size=8))
def test_a_rule_never_takes_back_what_it_has_just_done(values) -> None:
    """The others take the share of one that goes, and none is wanted again."""
    rule, pressures = Rule(), [Pressure(*each) for each in values]
    if rule.wants(pressures) < 0:
        share = len(pressures) / (len(pressures) - 1)
        left = [Pressure(p.queue_s * share, p.use * share) for p in pressures]
        mean = Pressure(*(sum(getattr(p, f) for p in left) / len(left) for f in ("queue_s", "use")))
        assert rule.wants([mean] * (len(left) - 1)) <= 0


def test_instances_come_with_the_crowd_and_go_after_it() -> None:
    rule = Rule(queue_s=0.5, period_s=1.0, start_s=2.0, calm=3, most=4)
    crowd = [Session(20 + 0.05 * i, (ask(200, 20, i),)) for i in range(400)]
    fleet = played(Setting(InstanceGroup(BOTH, 1, rule)), *crowd, Session(200.0, (ask(64, 1),)))
    [(pool, group)] = fleet.pools
    seconds, _ = fleet.done(pool)
    assert len(pool.places) == 1
    assert 1.2 < seconds / fleet.clock.now < 3
    assert fleet.record.ends["answered"] == 401
    assert group.times.nodes == 2


def test_the_host_is_counted_once_in_a_step_of_two_programs() -> None:
    """A prompt is computed beside a decode step: both programs, and one host."""
    fleet = played(ONE, Session(0.0, (ask(64, 30),)), Session(0.05, (ask(64, 1, 1),)))
    gaps = fleet.record.figures(10.0)["itl_ms"]
    both = decode_s(1, 70) + prefill_s(64, 32) - HOST
    assert gaps["max"] == pytest.approx(both * 1e3, abs=0.2)
