"""A simulated fleet: times computed by hand, every request ends once, more instances are not slower."""

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv3.sampling_params import SamplingParams
from dsv3.scheduler.request import EngineRequest, PreparedRequest, RequestRules, prepare
from tests.tools.simulate.tables import HOST, decode_s, prefill_s, table
from tools.simulate.fleet import FleetConfig, FleetConfigError, SimulatedFleet, closed_loop, replay
from tools.simulate.options import ScalingPolicy, SimulateOptions
from tools.simulate.pool import InstanceGroup
from tools.simulate.prompts import VOCAB, SimulatedRequest, page_keys, prepare_request
from tools.simulate.record import RequestLog
from tools.simulate.simulation import simulate
from tools.simulate.times import InstanceTimes, VirtualClock
from tools.simulate.traffic import Session, TokenRun, TracedRequest

BOTH, PREFILL, DECODE = table(), table("prefill"), table("decode")
ONE = FleetConfig(InstanceGroup(BOTH, 1))
PAIR = FleetConfig(InstanceGroup(DECODE, 1), InstanceGroup(PREFILL, 1))


def traced(prompt: int, answer: int, name: int = 0) -> TracedRequest:
    return TracedRequest((TokenRun(name, prompt),), answer)


def run_sessions(config: FleetConfig, *sessions: Session, until: float | None = None) -> SimulatedFleet:
    fleet = SimulatedFleet(config, VirtualClock(), RequestLog())
    replay(fleet, sessions, until)
    fleet.clock.run(until, lambda: fleet.is_over)
    return fleet


def run_simulation(options: SimulateOptions, **by_name: InstanceTimes) -> dict[str, Any]:
    return simulate(options, by_name)[0]


def test_one_request_takes_the_sum_of_its_steps() -> None:
    """100 tokens are two chunks, of 64 and 36 in a bucket of 64; the second gives the first of three tokens."""
    fleet = run_sessions(ONE, Session(5.0, (traced(100, 3),)))
    chunks = prefill_s(64, 64 * 32 / 64), prefill_s(64, 36 * 82 / 64)
    record = fleet.record
    assert record.first[0] - record.arrived[0] == pytest.approx(sum(chunks))
    steps = decode_s(1, 101), decode_s(1, 102)
    assert record.last[0] - record.first[0] == pytest.approx(sum(steps))
    assert (record.tokens[0], record.ended[0]) == (3, record.last[0])
    assert record.figures(10.0)["tpot_ms"]["mean"] == pytest.approx(sum(steps) / 2 * 1e3)


def test_prefill_transfers_whole_pages_and_decode_computes_the_rest() -> None:
    """The prefill instance computes 64 and 36 tokens, two pages cross a link, the other computes the 36 again."""
    fleet = run_sessions(PAIR, Session(0.0, (traced(100, 2),)))
    first, second = prefill_s(64, 32), prefill_s(64, 36 * 82 / 64)
    transfer = 2 * PREFILL.page_bytes / PREFILL.link
    rest = second  # the same chunk: 36 tokens after 64
    assert fleet.record.first[0] == pytest.approx(first + second + transfer + rest)
    assert fleet.record.last[0] == pytest.approx(fleet.record.first[0] + decode_s(1, 101))


def test_a_prompt_of_less_than_a_page_skips_the_prefill_instance() -> None:
    fleet = run_sessions(PAIR, Session(0.0, (traced(40, 1),)))
    assert fleet.record.first[0] == pytest.approx(prefill_s(64, 40 * 20 / 64))
    _, idle = fleet.pools[0].totals
    assert idle.steps == 0


def test_an_equal_prompt_computes_only_uncached_tokens() -> None:
    turns = TracedRequest((TokenRun(0, 320),), 2), TracedRequest((TokenRun(0, 320), TokenRun(1, 10)), 2)
    fleet = run_sessions(ONE, Session(0.0, turns))
    assert fleet.record.cached[:2].tolist() == [0, 320]
    assert fleet.record.arrived[1] == fleet.record.ended[0]
    assert fleet.record.first[1] - fleet.record.arrived[1] == pytest.approx(prefill_s(64, 10 * 325 / 64))


def test_prompts_equal_those_of_an_api_server() -> None:
    found = prepare_request(SimulatedRequest(4, (TokenRun(3, 200), TokenRun(-7, 90)), 290, 295))
    for field in ("request_id", "tokens", "root", "max_length", "stop_ids"):
        assert getattr(found, field) == getattr(real(found), field)


def real(request: PreparedRequest) -> PreparedRequest:
    """Returns a request as an API server prepares it."""
    sampling = SamplingParams(temperature=0, ignore_eos=True, max_tokens=request.max_length - len(request.prompt))
    unprepared = EngineRequest(
        request_id=request.request_id, prompt_token_ids=request.prompt.tolist(), sampling=sampling
    )
    return prepare(unprepared, RequestRules(vocab_size=VOCAB, max_model_len=2048))


RUNS = st.builds(TokenRun, st.sampled_from([1, 2, -2, 5 * VOCAB + 3]), st.sampled_from([2, 63, 64, 65, 127, 200]))


@settings(deadline=None)
@given(st.lists(st.lists(RUNS, min_size=1, max_size=3, unique_by=lambda run: run.name), min_size=2, max_size=4))
def test_keys_are_equal_if_and_only_if_an_api_servers_are(contents) -> None:
    requests = [SimulatedRequest(i, tuple(runs), 0, 2000) for i, runs in enumerate(contents)]
    pairs = {
        pair
        for each in requests
        for pair in zip(page_keys(each.content, 64), real(prepare_request(each)).prefix_keys, strict=True)
    }
    assert len({ours for ours, _ in pairs}) == len({theirs for _, theirs in pairs}) == len(pairs)


def test_no_traffic() -> None:
    fleet = run_sessions(PAIR, until=60.0)
    figures = fleet.record.figures(60.0, {"ttft": 1.0})
    assert figures["requests"] == {"arrived": 0, "unfinished": 0}
    assert figures["ttft_ms"] is None and figures["itl_ms"] is None
    assert figures["goodput"] == {"requests_per_second": 0.0, "share": 0.0}


def test_too_long_prompts_are_refused_and_too_long_answers_are_cut() -> None:
    fleet = run_sessions(ONE, Session(0.0, (traced(1024, 1), traced(5000, 1), traced(1000, 500))))
    assert fleet.record.ends == {"too long": 2, "answered": 1}
    assert fleet.record.tokens[2] == 24


def test_a_burst_fills_the_queue_and_no_more() -> None:
    """An instance gets twice its batch slots, 1,024 requests wait for at most 30 s, the others are refused."""
    fleet = run_sessions(ONE, *(Session(0.0, (traced(64, 2, i),)) for i in range(2000)))
    assert fleet.record.ends["refused"] >= 2000 - 1024 - 8
    assert sum(fleet.record.ends.values()) == 2000
    late = fleet.record.ended[:2000][~fleet.record.answered[:2000]]
    assert set(late.tolist()) <= {0.0, 30.0}


def test_an_instance_with_too_few_pages_for_a_request_is_refused() -> None:
    with pytest.raises(FleetConfigError, match="small_both: num_pages: 8 pages of 64 tokens cannot hold one request"):
        FleetConfig(InstanceGroup(table(pages=8), 1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FleetConfig(InstanceGroup(PREFILL, 1)), "small_prefill only computes prompts"),
        (lambda: FleetConfig(InstanceGroup(DECODE, 1)), "small_decode computes no prompts"),
        (lambda: FleetConfig(InstanceGroup(BOTH, 0)), "small_both: 0 instances"),
        (lambda: FleetConfig(InstanceGroup(BOTH, 1), store_gib=1), "a store needs host memory"),
    ],
)
def test_contradictory_fleets_are_refused(make, message) -> None:
    with pytest.raises(FleetConfigError, match=message):
        make()


@st.composite
def worlds(draw) -> tuple[FleetConfig, list[Session]]:
    count = st.integers(1, 3)
    seqs, pages = draw(st.sampled_from([1, 4, 8])), draw(st.sampled_from([17, 24, 64]))
    ranks = draw(st.integers(1, 3))
    few = {"ranks": ranks, "seqs": seqs, "pages": pages, "batched": draw(st.sampled_from([64, 256]))}
    policy = draw(
        st.sampled_from(
            [None, ScalingPolicy(period_s=0.2, start_s=0.5, queue_s=0.1, scale_down_checks=2, max_instances=3)]
        )
    )
    pair = draw(st.booleans())
    config = FleetConfig(
        InstanceGroup(table("decode" if pair else "both", **few), draw(count), policy),
        InstanceGroup(table("prefill", **few), draw(count), policy) if pair else None,
        routing=draw(st.sampled_from(["cost", "round_robin"])),
        host_gib=draw(st.sampled_from([0.0, 0.05])),
    )
    runs = st.builds(TokenRun, st.integers(0, 3), st.integers(1, 400))
    requests = st.builds(
        lambda runs, answer: TracedRequest(tuple(runs), answer),
        st.lists(runs, min_size=1, max_size=3),
        st.integers(1, 40),
    )
    sessions = st.builds(Session, st.floats(0, 2), st.lists(requests, min_size=1, max_size=3).map(tuple))
    found = sorted(draw(st.lists(sessions, max_size=25)), key=lambda session: session.at)
    return config, found


@settings(max_examples=25, deadline=None)
@given(worlds())
def test_every_request_ends_once_with_all_its_tokens(world) -> None:
    """No page, no load at the router and no request is left."""
    config, sessions = world
    fleet = run_sessions(config, *sessions)
    requests = [each for session in sessions for each in session.requests]
    record = fleet.record
    assert record.count == sum(record.ends.values()) == len(requests)
    whole = sorted(min(a.prompt + a.answer, 1024) - a.prompt for a in requests if a.prompt < 1024)
    assert sorted(record.tokens[: record.count][record.answered[: record.count]].tolist()) == whole
    assert record.output_tokens == sum(whole)
    assert record.ends["too long"] == sum(a.prompt >= 1024 for a in requests)
    for pool in fleet.pools:
        for member in pool.members:
            assert (member.load.requests, member.load.held, member.load.prefill) == (0, 0, 0.0)
            assert member.instance.is_idle
            fleet.clock.run(fleet.clock.now + 5)  # the last step releases its pages at its end
            assert member.instance.scheduler.pages.in_use == 0


def test_the_same_seed_gives_the_same_figures() -> None:
    options = SimulateOptions(
        instances="both", num_instances=2, request_rate=4.0, seconds=10.0, prompt=200, answer=20, max_model_len=1024
    )
    first, again = (run_simulation(options, both=BOTH) for _ in range(2))
    other = run_simulation(dataclasses.replace(options, seed=1), both=BOTH)
    assert first | {"simulator": 0} == again | {"simulator": 0} != other | {"simulator": 0}


@pytest.mark.parametrize("routing", ["cost", "round_robin"])
def test_more_instances_are_not_slower(routing) -> None:
    limits = {"ttft": 2000.0}

    def good(count: int) -> float:
        burst = [Session(0.01 * i, (traced(300, 20, i),)) for i in range(60)]
        fleet = run_sessions(FleetConfig(InstanceGroup(BOTH, count), routing=routing), *burst)
        return fleet.record.figures(100.0, limits)["goodput"]["share"]

    found = [good(count) for count in (1, 2, 4, 8)]
    assert found == sorted(found) and found[0] < 1 == found[-1]


def test_a_closed_loop_keeps_its_concurrency() -> None:
    """Little's law: requests per second times their time are the requests in flight."""
    fleet = SimulatedFleet(FleetConfig(InstanceGroup(table(seqs=16, pages=256), 1)), VirtualClock(), RequestLog(5.0))
    closed_loop(fleet, (traced(64, 20, i) for i in itertools.count()), 10, 1.0, 25.0)
    fleet.clock.run(25.0)
    assert len(fleet.active) == 10
    figures = fleet.record.figures(25.0)
    assert figures["requests_per_second"] * figures["e2e_ms"]["mean"] / 1e3 == pytest.approx(10, rel=0.02)


def test_a_full_pair_reaches_the_throughput_of_its_table() -> None:
    """All 32 batch slots of two ranks decode at the mean context, the prompt and half of the answer."""
    decode = table("decode", ranks=2, seqs=16, pages=256)
    fleet = SimulatedFleet(
        FleetConfig(InstanceGroup(decode, 1), InstanceGroup(table("prefill", ranks=2, batched=1024), 2)),
        VirtualClock(),
        RequestLog(5.0),
    )
    closed_loop(fleet, (traced(300, 40 + i % 41, i) for i in itertools.count()), 64, 2.0, 15.0)
    fleet.clock.run(15.0)
    _, totals = fleet.answering.totals
    expected = decode_s(16, 300 + 60 / 2)
    assert totals.decode_s / totals.decode_steps == pytest.approx(expected, rel=0.05)
    most = 32 * totals.steps / totals.busy_s  # busy with partial pages of prompts, too
    # Requests that wait for the batched prefill of partial pages occupy batch slots without producing tokens.
    assert 0.85 * most < fleet.record.figures(15.0)["output_tokens_per_second"] < 1.01 * most


def test_host_memory_restores_evicted_pages() -> None:
    """Twelve prompts of 8 pages alternate on a device of 40 pages; host memory fits them all."""
    turns = [Session(0.5 * i, (traced(520, 1, i % 12),)) for i in range(48)]
    small = table(pages=40, batched=256)
    without = run_sessions(FleetConfig(InstanceGroup(small, 1)), *turns)
    with_host = run_sessions(FleetConfig(InstanceGroup(small, 1), host_gib=1.0), *turns)
    assert without.record.cached[12:48].sum() == 0
    assert with_host.record.cached[12:48].tolist() == [512] * 36
    [pages] = with_host.pages
    assert pages.stats().tiers["host"].hits == 36 * 512
    wait, less = (fleet.record.first[40] - fleet.record.arrived[40] for fleet in (without, with_host))
    assert less < wait


def test_instances_read_each_others_pages_from_a_store() -> None:
    config = FleetConfig(
        InstanceGroup(table(pages=40, batched=256), 2), routing="round_robin", host_gib=0.02, store_gib=1.0
    )
    fleet = run_sessions(config, *(Session(2.0 * i, (traced(520, 1),)) for i in range(3)))
    assert fleet.record.cached[:3].tolist() == [0, 512, 512]
    assert sum(pages.stats().tiers["store"].hits for pages in fleet.pages) == 512


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 1.5)), min_size=1, max_size=8))
def test_a_scaling_policy_does_not_oscillate(values) -> None:
    """After an instance is removed, the others' load does not add one again."""
    policy, left = ScalingPolicy(), len(values) - 1
    if policy.decide(values) < 0:
        queue_s, use = (sum(column) / left for column in zip(*values, strict=True))
        assert policy.decide([(queue_s, use)] * left) <= 0


def test_instances_are_added_under_load_and_removed_after_it() -> None:
    policy = ScalingPolicy(queue_s=0.5, period_s=1.0, start_s=2.0, scale_down_checks=3, max_instances=4)
    crowd = [Session(20 + 0.05 * i, (traced(200, 20, i),)) for i in range(400)]
    fleet = run_sessions(FleetConfig(InstanceGroup(BOTH, 1, policy)), *crowd, Session(200.0, (traced(64, 1),)))
    [pool] = fleet.pools
    seconds, _ = pool.totals
    assert len(pool.members) == 1
    assert 1.2 < seconds / fleet.clock.now < 3
    assert fleet.record.ends["answered"] == 401
    assert pool.nodes == 2


def test_the_host_is_counted_once_in_a_step_of_two_programs() -> None:
    """A step of prefill and decode takes both programs' time, and the host's once."""
    fleet = run_sessions(ONE, Session(0.0, (traced(64, 30),)), Session(0.05, (traced(64, 1, 1),)))
    gaps = fleet.record.figures(10.0)["itl_ms"]
    both = decode_s(1, 70) + prefill_s(64, 32) - HOST
    assert gaps["max"] == pytest.approx(both * 1e3, abs=0.2)
