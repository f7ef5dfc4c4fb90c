"""Which rank a request goes to, without a device: what it costs there, what its sender asks for, what is told of it."""

import numpy as np
import pytest

from dsv3.sampling_params import SamplingParams
from dsv3.scheduler.balance import DecodeBalance, PrefillBalance
from dsv3.scheduler.request import EngineRequest, InvalidRequest, RequestRules, prepare
from dsv3.scheduler.sequence import sequence_of
from dsv3.server.engine.process import _numbers
from dsv3.server.serving.metrics import Metrics
from tests.dsv3.engine.driving import name_of, number
from tests.dsv3.engine.test_scheduler import VOCAB, Driver


def add(
    driver: Driver, name: str, prompt: list[int], rank: int | None = None, max_tokens: int = 100, priority: int = 0
):
    """Hands in a request that shares its prefix with all others, for one rank if given."""
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
    request = EngineRequest(
        request_id=number(name), prompt_token_ids=prompt, sampling=sampling, rank=rank, priority=priority
    )
    rules = RequestRules(vocab_size=VOCAB, max_model_len=driver.cfg.max_model_len, num_ranks=driver.cfg.num_ranks)
    sequence = sequence_of(prepare(request, rules))
    driver.scheduler.add(sequence)
    return sequence


def on(driver: Driver, rank: int) -> list[str]:
    return [name_of(s.id) for s in driver.scheduler.slots.on_rank(rank)]


def finish(driver: Driver) -> None:
    for _ in range(2000):
        if not (driver.scheduler.has_work or driver.in_flight):
            return
        driver.step()
    raise AssertionError("requests are left")


def test_a_prefix_draws_a_request_to_a_rank_that_is_busier():
    """The fewest running requests decided before, and a prefix only among equals."""
    driver = Driver(num_ranks=2)
    add(driver, "first", [7] * 300, rank=1)
    add(driver, "beside it", [8] * 10, rank=1)
    for _ in range(4):
        driver.step()
    add(driver, "stranger", [9] * 300)
    driver.step()
    add(driver, "second", [7] * 300 + [3])
    driver.step()
    assert on(driver, 0) == ["stranger"] and on(driver, 1) == ["first", "beside it", "second"]
    finish(driver)


def test_long_prompts_go_to_ranks_without_a_backlog():
    driver = Driver(num_ranks=2, max_num_seqs=8)
    add(driver, "long", [2] * 400)
    for i in range(4):
        add(driver, str(i), [i + 3] * 60)
    driver.step()
    assert on(driver, 0) == ["long"] and on(driver, 1) == ["0", "1", "2", "3"]
    finish(driver)


def test_a_request_that_asks_for_a_rank_waits_for_it_and_others_pass():
    driver = Driver(num_ranks=2, max_num_seqs=1)
    add(driver, "runs", [2] * 5, rank=1, max_tokens=30)
    driver.step()
    add(driver, "asks", [3] * 5, rank=1)
    add(driver, "asks too", [4] * 5, rank=1)
    add(driver, "passes", [5] * 5)
    driver.step()
    assert on(driver, 0) == ["passes"] and on(driver, 1) == ["runs"]
    assert len(driver.scheduler.queue) == 2
    while on(driver, 1) == ["runs"]:
        driver.step()
    driver.step()
    assert on(driver, 1) == ["asks"]
    finish(driver)


def test_no_younger_request_takes_the_room_for_which_one_waits():
    driver = Driver(num_ranks=2, num_pages=8, max_num_seqs=4)
    for rank in (0, 1):
        add(driver, f"runs {rank}", [2 + rank] * 64 * (6 - rank), rank=rank, max_tokens=20)
    for _ in range(4):
        driver.step()
    asking = add(driver, "asks", [4] * 64 * 5, rank=1)
    small = add(driver, "small", [5] * 5)
    driver.step()
    assert "small" in on(driver, 0) and len(driver.scheduler.queue) == 1
    driver.scheduler.remove(asking)
    driver.scheduler.remove(small)
    add(driver, "after", [6] * 5, rank=1)
    driver.step()
    assert "after" in on(driver, 1), "one that has given up bars nobody"
    finish(driver)


def test_one_that_gives_up_when_its_turn_has_come_leaves_the_turn_to_the_next():
    driver = Driver(num_ranks=2, max_num_seqs=1)
    add(driver, "runs 0", [2] * 5, rank=0, max_tokens=6)
    driver.step()
    first = add(driver, "first", [3] * 5, rank=0, max_tokens=3, priority=1)
    add(driver, "second", [4] * 5, rank=0, max_tokens=3, priority=1)
    driver.step()
    add(driver, "runs 1", [5] * 5, rank=1, max_tokens=400)
    driver.step()
    before = add(driver, "before", [6] * 5, max_tokens=4)
    while "runs 0" in on(driver, 0):
        driver.step()
    driver.step()
    assert on(driver, 0) == ["before"], "it takes the slot for which the first was woken"
    driver.scheduler.remove(first)
    while before.slot >= 0:
        driver.step()
    driver.step()
    assert on(driver, 0) == ["second"]
    finish(driver)


@pytest.mark.parametrize("rank", [-1, 2, 10**6])
def test_a_rank_that_is_not_there_is_refused(rank):
    with pytest.raises(InvalidRequest, match=f"rank: {rank} is not one of the 2 ranks"):
        add(Driver(num_ranks=2), "a", [2], rank=rank)


def test_imbalances_are_told_where_there_are_several_ranks():
    driver = Driver(num_ranks=2, max_num_seqs=4)
    add(driver, "a", [2] * 100, rank=1)
    driver.step()
    add(driver, "b", [3] * 50, rank=0)
    driver.step()
    driver.step()
    stats = {"jobs": {name: each.stats() for name, each in driver.planners.items() if each.stats() is not None}}
    assert stats["jobs"]["decode"] == DecodeBalance.of(driver.scheduler.slots)
    assert stats["jobs"]["decode"].cache_imbalance == pytest.approx(103 / 77, rel=0.05)
    assert stats["jobs"]["prefill"].token_imbalance == 2 and stats["jobs"]["decode"].request_imbalance == 1
    metrics = Metrics("tiny")
    metrics.update(_numbers(stats))
    lines = metrics.text().decode()
    assert 'dsv3:prefill_token_imbalance{model_name="tiny"} 2.0' in lines
    for name in ("prefill_cost", "decode_cache", "decode_request"):
        assert f"dsv3:{name}_imbalance{{" in lines
    assert all(planner.stats() is None for planner in Driver().planners.values())
    assert "imbalance" not in Metrics("tiny").text().decode()


def test_the_imbalance_of_prefill_is_that_of_all_recent_work():
    balance = PrefillBalance()
    for tokens in ([100, 300], [3, 1]):
        balance.note(np.array(tokens), np.array(tokens))
    assert balance.token_imbalance == pytest.approx((0.99 * 300 + 3) / (0.99 * 200 + 2))


def test_later_work_gives_way_on_the_rank_that_is_asked_for_and_on_no_other():
    driver = Driver(num_ranks=2, max_num_seqs=2)
    for i in range(4):
        add(driver, f"batch {i}", [2 + i] * 10, rank=i % 2, priority=9)
    for _ in range(3):
        driver.step()
    add(driver, "now", [7] * 10, rank=1)
    driver.step()
    assert on(driver, 0) == ["batch 0", "batch 2"]
    assert sorted(on(driver, 1)) == ["batch 1", "now"]
    add(driver, "too", [8] * 10, rank=1)
    add(driver, "waits", [9] * 10, rank=1)
    for _ in range(3):
        driver.step()
    assert on(driver, 0) == ["batch 0", "batch 2"]
    assert driver.scheduler.num_preemptions == 2, "nobody gives way in vain"
    assert sorted(on(driver, 1)) == ["now", "too"]
    finish(driver)
    assert not driver.scheduler.pages.in_use
