"""Requests of several priorities, counted in steps: order, pre-emption, and what batch work costs others."""

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsv3.sampling_params import SamplingParams
from dsv3.scheduler.request import BATCH_PRIORITY, EngineRequest, InvalidRequest, QueueFull, RequestRules, prepare
from dsv3.scheduler.sequence import make_sequence
from tests.dsv3.engine import toy
from tests.dsv3.engine.driving import drain, name_of, request, take
from tests.dsv3.engine.test_scheduler import Driver


def first_tokens(driver, arrivals, steps):
    """Steps in which requests get their first token; `arrivals` are (step, name, length, max_tokens, priority)."""
    found = {}
    for step in range(steps):
        for at, name, length, max_tokens, priority in arrivals:
            if at == step:
                driver.add(name, length, max_tokens=max_tokens, priority=priority)
        plan, _ = driver.step()
        for name in plan.sampled("prefill"):
            found.setdefault(name, step)
        if step > 60 and not driver.scheduler.has_work:
            break
    return found


def test_a_lower_number_is_served_first():
    driver = Driver(max_num_seqs=1)
    for name, priority in (("running", 0), ("late", 7), ("later", 7), ("first", -3), ("soon", 1)):
        driver.add(name, 5, max_tokens=2, priority=priority)
        if name == "running":
            driver.step()
    assert [name_of(s.id) for s in driver.scheduler.waiting] == ["first", "soon", "late", "later"]
    order = []
    while driver.scheduler.has_work or driver.in_flight:
        order += [name_of(o.request_id) for o in driver.step()[1] if o.finish_reason]
    assert order.index("first") < order.index("soon") < order.index("late") < order.index("later")


def test_a_slot_of_later_work_is_taken_at_once():
    driver = Driver(max_num_seqs=2)
    for name in ("b1", "b2"):
        driver.add(name, 10, priority=BATCH_PRIORITY)
    for _ in range(3):
        driver.step()
    driver.add("now", 10)
    plan, _ = driver.step()
    assert plan.sampled("prefill") == ["now"] and plan.sampled("decode") == ["b1"]
    assert [name_of(s.id) for s in driver.scheduler.waiting] == ["b2"]
    assert len(driver.scheduler.waiting[0].tokens) > 10, "what it has is computed again with the prompt"


def test_pages_of_later_work_are_there_one_step_later():
    driver = Driver(num_pages=8, max_num_seqs=4, max_num_batched_tokens=512)
    driver.add("batch", 64 * 6, priority=BATCH_PRIORITY)
    for _ in range(3):
        driver.step()
    driver.add("now", 64 * 4)
    plans = [driver.step()[0] for _ in range(2)]
    assert [bool(p) and p.sampled("prefill") for p in plans] == [False, ["now"]]


def test_equal_priorities_do_not_preempt():
    driver = Driver(max_num_seqs=1)
    driver.add("a", 10, priority=5)
    driver.step()
    driver.add("b", 10, priority=5)
    driver.add("c", 10, priority=6)
    for _ in range(5):
        driver.step()
    assert not driver.scheduler.num_preemptions
    assert [name_of(s.id) for s in driver.scheduler.waiting] == ["b", "c"]


def test_chunks_of_later_prompts_come_last():
    driver = Driver()
    driver.add("batch", 300, priority=BATCH_PRIORITY)
    driver.step()
    driver.add("now", 100)
    plan, _ = driver.step()
    chunks = [(name_of(c.sequence.id), c.stop - c.start) for c in plan.prefill.context.chunks[0]]
    assert chunks == [("now", 100), ("batch", 28)]


def test_a_prompt_that_later_work_computes_is_not_waited_for():
    """It would wait for chunks that themselves wait for all earlier work."""
    driver = Driver(max_num_batched_tokens=64)
    sampling = SamplingParams(temperature=0, max_tokens=3)
    rules = RequestRules(vocab_size=50, max_model_len=512)
    for i, priority in enumerate((BATCH_PRIORITY, 0)):
        prompt = EngineRequest(request_id=i, prompt_token_ids=[2] * 200, sampling=sampling, priority=priority)
        driver.scheduler.add(make_sequence(prepare(prompt, rules)))
        driver.step()
    assert [s.id for s in driver.scheduler.prefilling[0]] == [1, 0]
    for _ in range(30):
        driver.step()
    assert not driver.scheduler.sequences and not any(driver.scheduler.pages.pending)
    assert driver.scheduler.pages.in_use == 0


def test_later_work_on_a_rank_does_not_make_it_busy():
    driver = Driver(num_ranks=2, max_num_seqs=2)
    for i in range(4):
        driver.add(f"batch {i}", 5, priority=BATCH_PRIORITY)
    driver.step()
    driver.add("a", 5)
    driver.add("b", 5)
    driver.step()
    names = [[name_of(s.id) for s in driver.scheduler.slots.on_rank(rank)] for rank in (0, 1)]
    assert sorted(name for mine in names for name in mine if "batch" not in name) == ["a", "b"]
    assert all(len(mine) == 2 for mine in names)


def test_a_rank_counts_as_busy_by_what_cannot_be_preempted():
    driver = Driver(num_ranks=2, max_num_seqs=4)
    driver.add("a", 5)
    driver.step()
    for i in range(5):
        driver.add(f"batch {i}", 5, priority=BATCH_PRIORITY)
    driver.step()
    assert driver.scheduler.slots.running.tolist() == [3, 3]
    driver.add("b", 5)
    driver.step()
    assert [s.id for s in driver.scheduler.slots.on_rank(0) if s.priority == 0] == [driver.scheduler.slots.ids[0]]


def test_a_promise_is_waited_for_and_blocks_no_other_request():
    """The rank without earlier work is taken, one step later, though another one has the pages now."""
    driver = Driver(num_ranks=2, num_pages=8, max_num_seqs=4, max_num_batched_tokens=512)
    driver.add("a", 5)
    driver.step()
    driver.add("batch", 64 * 6, priority=BATCH_PRIORITY)
    for _ in range(3):
        driver.step()
    driver.add("large", 64 * 4)
    driver.add("small", 5)
    first, second = driver.step()[0], driver.step()[0]
    assert first.sampled("prefill") == ["small"] and second.sampled("prefill") == ["large"]
    assert [name_of(s.id) for s in driver.scheduler.slots.on_rank(1)] == ["large"]


@pytest.mark.parametrize("num_pages", [8, 9, 10, 11, 12])
def test_running_requests_never_sit_out_a_step_for_later_work(num_pages):
    driver = Driver(num_pages=num_pages, max_num_seqs=8, max_num_batched_tokens=512)
    for name in ("a", "b"):
        driver.add(name, 60, max_tokens=180)
    driver.step()
    for i in range(6):
        driver.add(f"batch {i}", 60 + i, max_tokens=150, priority=BATCH_PRIORITY)
    for _ in range(178):
        assert {"a", "b"} <= set(driver.step()[0].sampled("decode"))
    while driver.scheduler.has_work:
        driver.step()
    assert driver.scheduler.num_preemptions and driver.scheduler.pages.in_use == 0


def test_a_newcomer_that_just_fits_leaves_later_work_no_page_that_others_need():
    driver = Driver(num_pages=12, max_num_seqs=4, max_num_batched_tokens=512)
    driver.add("batch", 130, max_tokens=60, priority=BATCH_PRIORITY)
    driver.add("a", 55, max_tokens=30)
    driver.step()
    driver.add("large", 64 * 7 - 3, max_tokens=30)
    for _ in range(2):
        driver.step()
    for _ in range(20):
        assert {"a", "large"} <= set(driver.step()[0].sampled("decode"))
    assert driver.scheduler.num_preemptions


INTERACTIVE = st.tuples(st.integers(0, 50), st.integers(1, 300), st.integers(1, 40))
BATCH = st.tuples(st.integers(0, 50), st.integers(1, 480), st.integers(1, 100))


@settings(max_examples=60, deadline=None)
@example([(0, 1, 1), (43, 257, 1)], [(0, 1, 1), (0, 1, 1), (0, 411, 39), (0, 413, 37), (0, 1, 34)], 3)
@example([(0, 1, 1), (44, 257, 1), (0, 1, 1), (45, 129, 1)], [(0, 1, 1), (0, 346, 78), (0, 363, 37), (43, 99, 100)], 3)
@given(st.lists(INTERACTIVE, min_size=1, max_size=8), st.lists(BATCH, min_size=1, max_size=10), st.integers(1, 4))
def test_batch_work_delays_a_first_token_by_no_more_than_a_step(interactive, batch, max_num_seqs):
    """Compared with the same requests alone, as long as these have pages enough.

    Prompt and answer of an interactive request take 6 pages at most; 1 page for every two running requests is margin.
    """
    limits = {"max_num_seqs": max_num_seqs, "num_pages": max(8, 7 * max_num_seqs), "max_num_batched_tokens": 128}
    mine = [(at, f"i{i}", length, tokens, 0) for i, (at, length, tokens) in enumerate(interactive)]
    others = [
        (at, f"b{i}", length, min(tokens, 512 - length), BATCH_PRIORITY) for i, (at, length, tokens) in enumerate(batch)
    ]
    alone = first_tokens(Driver(**limits), mine, 2000)
    driver = Driver(**limits)
    together = first_tokens(driver, [*mine, *others], 5000)
    assert set(together) == {name for _, name, *_ in [*mine, *others]}, "batch work is done in the end"
    late = {name: (step, together[name]) for name, step in alone.items() if together[name] > step + 1}
    assert not late
    assert not driver.scheduler.has_work and driver.scheduler.pages.in_use == 0


def test_half_of_the_queue_is_kept_for_others(make_engine):
    engine = make_engine(max_num_queued_reqs=4)
    slots = engine.cfg.num_ranks * engine.cfg.max_num_seqs
    for i in range(slots + 2):
        engine.add(with_priority(f"batch {i}", 1))
    with pytest.raises(QueueFull):
        engine.add(with_priority("one too many", 1))
    for i in range(2):
        engine.add(with_priority(f"now {i}", 0))
    with pytest.raises(QueueFull):
        engine.add(with_priority("full", 0))
    drain(engine)


def with_priority(name, priority, **fields):
    return msgspec.structs.replace(request(name, [3, 4, 5], max_tokens=3, **fields), priority=priority)


def test_texts_stay_the_same_when_work_is_preempted(make_engine):
    """Pre-empted in the middle of prompt or answer, requests end with the text they would have had."""
    engine = make_engine()
    rng = np.random.default_rng(0)
    prompts = {f"{'now' if i % 3 == 0 else 'batch'} {i}": rng.integers(1, 60, 20 + 7 * i).tolist() for i in range(18)}
    gathered = {}
    for i, (name, prompt) in enumerate(prompts.items()):
        priority = 0 if name.startswith("now") else BATCH_PRIORITY - i
        engine.add(msgspec.structs.replace(request(name, prompt, max_tokens=60, ignore_eos=True), priority=priority))
        for _ in range(5):
            drain_once(engine, gathered)
    drain(engine, gathered)
    assert engine.stats().preemptions > 0
    for name, prompt in prompts.items():
        assert gathered[name].tokens == toy.expected_tokens(prompt, 60, ())


def drain_once(engine, gathered):
    take(engine.step(), gathered)


def test_numbers_beyond_32_bits_are_refused():
    with pytest.raises(InvalidRequest, match="priority"):
        prepare(with_priority("x", 2**31), RequestRules(vocab_size=50, max_model_len=512))
