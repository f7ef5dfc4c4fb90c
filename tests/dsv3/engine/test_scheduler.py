"""Decisions of the scheduler, without a device: chunks, fairness, pages held back, pre-emption, ranks."""

import dataclasses

import numpy as np
import pytest

from dsv3.config.engine import EngineConfig, bucket
from dsv3.engine.job import EngineView, Planned
from dsv3.engine.jobs.decode import DecodePlanner
from dsv3.engine.jobs.prefill import PrefillPlanner
from dsv3.engine.jobs.sample import ForwardResults
from dsv3.sampling_params import SamplingParams
from dsv3.scheduler import admission
from dsv3.scheduler.batch_slots import NOTHING
from dsv3.scheduler.request import EngineOutput, EngineRequest, RequestRules, StepOutputs, prepare
from dsv3.scheduler.scheduler import Scheduler
from dsv3.scheduler.sequence import Sequence, make_sequence
from tests.dsv3.engine.driving import name_of, number

VOCAB = 50


class Step:
    """The jobs of one step, and what tests ask of them."""

    def __init__(self, jobs: list[Planned]) -> None:
        self.jobs = jobs

    def __bool__(self) -> bool:
        return bool(self.jobs)

    def _of(self, kind: str) -> Planned | None:
        return next((j for j in self.jobs if j.kind == kind), None)

    @property
    def prefill(self) -> Planned | None:
        return self._of("prefill")

    @property
    def decode(self) -> Planned | None:
        return self._of("decode")

    def sampled(self, kind: str) -> list[str]:
        """Names of the requests that get a token."""
        job = self._of(kind)
        return [] if job is None or job.command.sample is None else [*map(name_of, job.context.rows.ids.tolist())]


class Driver:
    """A scheduler whose every sampled token is 1, with results one step late as in the engine.

    Of a row of several tokens `accepted` are accepted.
    """

    def __init__(self, accepted: int = 1, **limits) -> None:
        defaults = {"max_model_len": 512, "num_pages": 64, "max_num_seqs": 8, "max_num_batched_tokens": 128}
        self.cfg = EngineConfig(**(defaults | limits))
        self.accepted = accepted
        self.scheduler = Scheduler(self.cfg, VOCAB)
        view = EngineView(self.scheduler, None)
        planners = {"decode": DecodePlanner, "prefill": PrefillPlanner}
        self.planners = {name: make(view) for name, make in planners.items()}
        self.in_flight = None

    def add(self, name: str, length: int, max_tokens: int = 100, token: int = 2, priority: int = 0) -> Sequence:
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
        request = EngineRequest(
            request_id=number(name),
            prompt_token_ids=[token] * length,
            sampling=sampling,
            cache_salt=name,
            priority=priority,
        )
        sequence = make_sequence(prepare(request, RequestRules(vocab_size=VOCAB, max_model_len=self.cfg.max_model_len)))
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> tuple[Step, list[EngineOutput]]:
        self.scheduler.admission.preempt_for_waiting()
        jobs: list[Planned] = []
        for planner in self.planners.values():
            jobs += planner.plan(jobs)
        number = self.scheduler.pages.begin_step() if jobs else 0
        before, self.in_flight = self.in_flight, (number, jobs) if jobs else None
        outputs = StepOutputs([], [])
        if before is not None:
            for job in before[1]:
                self.planners[job.kind].on_results(job, self._results(job), outputs)
            self.scheduler.pages.collect(before[0])
        return Step(jobs), list(outputs)

    def _results(self, job: Planned) -> ForwardResults:
        if job.command.sample is None:
            return ForwardResults()
        width = self.cfg.tokens_per_row if job.kind == "decode" else 1
        tokens = np.full((self.cfg.num_ranks, 64, width), NOTHING, np.int32)
        tokens[..., : self.accepted] = 1
        return ForwardResults(sampled=(tokens,))


def _chunks(plan):
    return [[(name_of(c.sequence.id), c.start, c.stop) for c in mine] for mine in plan.prefill.context.chunks]


def test_a_long_prompt_comes_in_chunks_and_leaves_room_for_decode():
    driver = Driver()
    driver.add("short", 10)
    driver.step()
    driver.add("long", 300)
    plans = [driver.step()[0] for _ in range(4)]
    assert [_chunks(p)[0] if p.prefill else None for p in plans] == [
        [("long", 0, 128)], [("long", 128, 256)], [("long", 256, 300)], None
    ]  # fmt: skip
    assert [p.sampled("decode") for p in plans] == [["short"]] * 3 + [["short", "long"]]


def test_chunks_share_the_budget_in_order_of_arrival():
    driver = Driver()
    for name, length in (("a", 50), ("b", 50), ("c", 50)):
        driver.add(name, length)
    plan, _ = driver.step()
    assert _chunks(plan) == [[("a", 0, 50), ("b", 0, 50), ("c", 0, 28)]]
    assert plan.sampled("prefill") == ["a", "b"]
    assert _chunks(driver.step()[0]) == [[("c", 28, 50)]]


def test_a_request_at_its_last_token_is_not_launched_again():
    driver = Driver()
    driver.add("a", 5, max_tokens=3)
    plans, outputs = zip(*(driver.step() for _ in range(5)), strict=True)
    assert [bool(p) for p in plans] == [True, True, True, False, False]
    tokens = [o for step in outputs for o in step]
    assert [o.finish_reason for o in tokens] == [None, None, "length"]


def test_the_head_of_the_queue_is_not_overtaken():
    driver = Driver(num_pages=8)
    driver.add("running", 64 * 4)
    for _ in range(3):
        driver.step()
    driver.add("large", 64 * 6)
    driver.add("small", 5)
    driver.step()
    assert [name_of(s.id) for s in driver.scheduler.waiting] == ["large", "small"]


@pytest.mark.parametrize("in_flight", [True, False])
def test_pages_of_an_aborted_request_wait_for_the_step_in_flight(in_flight):
    driver = Driver()
    sequence = driver.add("a", 100)
    driver.step()
    if not in_flight:
        driver.scheduler.pages.collect(1)
    pages_before = driver.scheduler.pages.in_use
    driver.scheduler.finish(sequence)
    assert pages_before == 2
    assert driver.scheduler.pages.in_use == (2 if in_flight else 0)
    driver.step()
    assert driver.scheduler.pages.in_use == 0


def test_the_youngest_is_pre_empted_and_comes_back_first():
    driver = Driver(num_pages=8, max_num_seqs=4)
    for i, name in enumerate(("old", "middle", "young")):
        driver.add(name, 120, token=i + 2)
    driver.add("later", 64 * 4)
    while not driver.scheduler.num_preemptions:
        driver.step()
    assert [name_of(s.id) for s in driver.scheduler.waiting] == ["young", "later"]
    assert len(driver.scheduler.waiting[0].tokens) > 120, "its answer so far is computed again with the prompt"
    order = []
    while driver.scheduler.has_work or driver.in_flight:
        order += [name_of(o.request_id) for o in driver.step()[1] if o.finish_reason]
    assert order[-1] == "later" and sorted(order) == ["later", "middle", "old", "young"]
    assert driver.scheduler.pages.in_use == 0


def test_requests_spread_over_ranks_and_stay():
    driver = Driver(num_ranks=3, max_num_seqs=2)
    for i in range(7):
        driver.add(str(i), 5, token=i)
    plan, _ = driver.step()
    assert [len(mine) for mine in plan.prefill.context.chunks] == [2, 2, 2]
    assert [name_of(s.id) for s in driver.scheduler.waiting] == ["6"]
    decode = driver.step()[0].decode
    assert decode.command.rows.shape == (3, 2, 3)
    assert (decode.command.rows[..., 0] == [[0, 1]] * 3).all()


def test_a_full_rank_does_not_block_another():
    driver = Driver(num_ranks=2, num_pages=8, max_num_seqs=4)
    driver.add("large", 64 * 7)
    driver.add("small", 5)
    driver.add("medium", 64 * 4)
    driver.step()
    assert [name_of(s.id) for s in driver.scheduler.slots.on_rank(1)] == ["small", "medium"]


def test_idle_ranks_are_padding():
    driver = Driver(num_ranks=2, max_num_seqs=4)
    driver.add("only", 5)
    driver.step()
    batch = driver.step()[0].decode.command.rows
    assert batch[1, :, 0].tolist() == [4], "slot max_num_seqs means nothing to do"


def test_buckets_are_few_and_cover_the_limits():
    cfg = EngineConfig(max_model_len=64, num_pages=1, max_num_seqs=100, max_num_batched_tokens=5000)
    assert cfg.decode_buckets == (1, 4, 16, 64, 100)
    assert cfg.prefill_buckets == (64, 256, 1024, 2048, 4096, 5000)
    assert [bucket(cfg.decode_buckets, n) for n in (1, 2, 16, 17, 100)] == [1, 4, 16, 64, 100]
    assert all(cfg.prefill_rows(t) in cfg.decode_buckets for t in cfg.prefill_buckets)
    sizes = [dataclasses.replace(cfg, max_num_seqs=n).decode_buckets for n in (1, 3, 64, 96, 128, 200)]
    assert sizes[:3] == [(1,), (1, 3), (1, 4, 16, 64)]
    assert sizes[3:] == [(1, 4, 16, 64, 96), (1, 4, 16, 64, 96, 128), (1, 4, 16, 64, 96, 128, 200)]


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"num_pages": 1}, "lower max_model_len"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_queued_reqs": -1}, "max_num_queued_reqs"),
    ],
)
def test_limits_that_make_no_sense_are_refused(limits, words):
    with pytest.raises(ValueError, match=words):
        EngineConfig(**({"max_model_len": 128, "num_pages": 2} | limits))


def test_a_pre_empted_request_that_moves_publishes_nothing_for_its_old_slot():
    """Slots once had counters of their own as epochs: equal ones let a new owner's unwritten pages be shared."""
    driver = Driver(num_ranks=2, max_num_seqs=2)
    sequence = driver.add("a", 100)
    driver.step()
    slots = driver.scheduler.slots
    assert len(set(slots.epoch.tolist())) == len(slots.epoch)
    before = slots.epoch[sequence.slot]
    driver.scheduler.finish(sequence)
    assert before not in slots.epoch
    assert len(set(slots.epoch.tolist())) == len(slots.epoch)


def test_long_prompts_start_a_few_per_step(monkeypatch):
    """Before, all that fitted started in one step: 176 ms for 127 cached prompts of 131,071 tokens."""
    monkeypatch.setattr(admission, "MAX_ADMISSION_TOKENS", 100)
    driver = Driver(max_num_batched_tokens=2048)
    for i in range(8):
        driver.add(f"long {i}", 60)
    running = []
    for _ in range(5):
        driver.step()
        running.append(driver.scheduler.slots.total_running)
    assert running == [2, 4, 6, 8, 8]
