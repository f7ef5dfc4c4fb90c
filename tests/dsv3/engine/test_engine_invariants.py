"""Random arrivals, ranks, priorities, aborts, pre-emptions and NaN.

No page is lost, none has two writers, every text is correct, and no request waits while capacity is free.
"""

import contextlib
import dataclasses

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from dsv3.config.engine import EngineConfig
from dsv3.config.model import PAGE_SIZE
from dsv3.engine.components import EngineComponents
from dsv3.engine.engine import Engine
from dsv3.engine.job import Planned, StepCommand
from dsv3.engine.jobs import decode, prefill
from dsv3.engine.jobs.sample import ForwardResults
from dsv3.kv_cache.tiers import tiers
from dsv3.scheduler.admission import lookup_keys
from dsv3.scheduler.batch_slots import NOT_FINITE, NOTHING, BatchRows
from dsv3.scheduler.request import EngineRequest, QueueFull
from dsv3.scheduler.sequence import CAPACITY, Sequence, SequenceStatus
from tests.dsv3.engine import toy
from tests.dsv3.engine.conftest import LIMITS
from tests.dsv3.engine.driving import Gathered, drain, name_of, number, request, take
from tests.dsv3.engine.fewer import one_bucket


@dataclasses.dataclass
class Auditor:
    """Checks every launched step: which request writes which page of which rank. A step may be repeated."""

    engine: Engine
    repeats: bool
    last_step: int = 0
    last_writers: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict)

    def check(self, jobs: list[Planned]) -> None:
        if not jobs:
            return
        if self.engine.scheduler.pages.collected >= self.last_step:
            self.last_writers = {}  # that step has finished
        writers: dict[tuple[int, int], int] = {}
        for rank, page, name in self._writes(jobs):
            assert writers.setdefault((rank, page), name) == name, f"two requests write page {page}"
            cache = self.engine.scheduler.caches[rank]
            assert cache.pool.references(page) == 1, f"a shared page {page} is written"
            assert page not in cache.index._key_of, f"a cached page {page} is written"
            in_flight = self.last_writers.get((rank, page), name)
            assert in_flight == name, f"page {page} was handed on while a launched step may still write it"
        self.last_step, self.last_writers = self.engine.scheduler.pages.launched + 1, writers

    def _writes(self, jobs: list[Planned]):
        slots = self.engine.scheduler.slots
        for job in (j for j in jobs if j.kind == "prefill"):
            for rank, chunks in enumerate(job.context.chunks):
                for chunk in chunks:
                    for index in range(chunk.start // PAGE_SIZE, (chunk.stop - 1) // PAGE_SIZE + 1):
                        yield rank, chunk.sequence.pages[index], chunk.sequence.id
        copies = (copy for job in jobs if job.kind == "pages" for copy in job.command.into)
        for copy in (copy for copy in copies if copy.parts is None):
            for rank, page in ((rank, page) for rank, row in enumerate(copy.pages.tolist()) for page in row):
                owners = [sequence.id for sequence in slots.on_rank(rank) if page in sequence.pages]
                yield from ((rank, page, owner) for owner in owners)
        width = next((j.command.width for j in jobs if j.kind == "decode"), 1)
        for job in (j for j in jobs if j.kind == "decode"):
            rows = job.context.rows
            for slot, rank in zip(rows.slots.tolist(), rows.rank.tolist(), strict=True):
                sequence, known = slots.sequences[slot], int(slots.known[slot])
                before = int(slots.planned[slot]) - width  # `planned` counts this step's tokens already
                # A step in flight brings one token at least, or none where it is computed again.
                first = known - 1 if before == known or self.repeats else known
                for index in range(first // PAGE_SIZE, (before - 1 + self.engine.cfg.tokens_ahead) // PAGE_SIZE + 1):
                    yield rank, sequence.pages[index], sequence.id


class Idleness:
    """Checks that no request waits without reason: counts the steps in which one could continue and did not."""

    PATIENCE = 4  # steps: pages freed for a request are available one step later

    def __init__(self, engine: Engine) -> None:
        self.engine, self.idle, self.passed = engine, 0, 0

    def check(self, jobs: list[Planned]) -> None:
        scheduler = self.engine.scheduler
        works = bool(jobs) or bool(self.engine._in_flight) or scheduler.waits_only_for_tiers
        self.idle = 0 if works or not scheduler.sequences else self.idle + 1
        assert self.idle <= self.PATIENCE, f"nothing runs, and {scheduler.sequences.keys()} wait"
        waiting = [s for s in scheduler.waiting if s not in scheduler.admission.awaiting_lookup]
        self.passed = self.passed + 1 if waiting and self._has_room(waiting[0]) else 0
        assert self.passed <= self.PATIENCE, f"there is room for request {waiting[0].id}, the first that waits"
        for rank, parked in scheduler.queue._parked.items():
            lost = [s.id for s in parked.get(CAPACITY, []) if s.state is SequenceStatus.WAITING]
            assert not lost or rank in scheduler.admission._requested_ranks, (
                f"nobody wakes {lost} when rank {rank} has room"
            )

    def _has_room(self, sequence: Sequence) -> bool:
        """Whether a request fits where it may go, and waits for no page that is being computed there."""
        scheduler, asked = self.engine.scheduler, sequence.request.rank
        admission, useful = scheduler.admission, lookup_keys(sequence, scheduler.cfg.page_size)
        for rank in range(scheduler.cfg.num_ranks) if asked is None else (asked,):
            cached = admission._match_if_it_fits(sequence, rank, useful)
            if cached is not None and admission._last_pending(sequence, rank, len(cached)) is None:
                return True
        return False


_FAMILIES = [[(7 * i * (f + 3)) % (toy.POISON - 1) + 1 for i in range(250)] for f in range(3)]


class EngineMachine(RuleBasedStateMachine):
    """Requests come and go while the engine steps."""

    make_engine = None
    sharing = True

    @initialize()
    def start(self) -> None:
        engine = type(self).make_engine(enable_prefix_caching=self.sharing, max_num_queued_reqs=6)
        self._begin(engine, engine.executor.devices.layout.functions.may_overflow)

    def _begin(self, engine: Engine, repeats: bool) -> None:
        self.engine = engine
        auditor, idleness, plan = Auditor(engine, repeats), Idleness(engine), engine._plan

        def audited() -> list[Planned]:
            self.planned = jobs = plan()
            auditor.check(jobs)
            idleness.check(jobs)
            return jobs

        self.engine._plan = audited
        self.requests: dict[str, EngineRequest] = {}
        self.gathered: dict[str, Gathered] = {}
        self.aborted: set[str] = set()

    @rule(
        family=st.integers(0, 2),
        shared=st.integers(0, 249),
        tail=st.lists(st.integers(1, toy.POISON - 1), max_size=4),
        max_tokens=st.integers(1, 100),
        stop=st.sets(st.integers(0, toy.POISON - 1), max_size=2),
        ignore_eos=st.booleans(),
        poison=st.sampled_from([[], [], [], [toy.POISON]]),
        rank=st.sampled_from([None, None, 0, 1]),
        priority=st.sampled_from([0, 0, 0, 1, 2]),
        answered=st.sampled_from([0, 0, 1, 7, 64]),
    )
    def add(self, family, shared, tail, max_tokens, stop, ignore_eos, poison, rank, priority, answered) -> None:
        prompt = (_FAMILIES[family][:shared] + tail)[:254] + poison or [1]
        name = f"r{len(self.requests)}"
        item = request(name, prompt, max_tokens=max_tokens, stop_token_ids=tuple(sorted(stop)), ignore_eos=ignore_eos)
        if not poison and answered and len(begun := self._expected(item, answered + 1)) > answered:
            item = msgspec.structs.replace(item, answer_token_ids=begun[:answered])
        rank = None if rank is None else rank % self.engine.cfg.num_ranks
        item = msgspec.structs.replace(item, rank=rank, priority=priority)
        try:
            self.engine.add(item)
        except QueueFull:
            return
        self.requests[name] = item

    @rule(count=st.integers(1, 12))
    def steps(self, count) -> None:
        for _ in range(count):
            take(self.engine.step(), self.gathered)

    @rule(host=st.booleans())
    def forget(self, host) -> None:
        """Drops all unused pages, and those in the host's memory."""
        for cache in self.engine.scheduler.caches:
            cache.clear()
        if host:
            self.engine.flush()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data) -> None:
        live = [name for name in self.requests if name not in self.gathered or not self.gathered[name].finish_reason]
        name = data.draw(st.sampled_from(live or sorted(self.requests)))
        self.aborted.add(name)
        self.engine.abort(number(name))

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        drain(self.engine, self.gathered)
        stats = self.engine.stats()
        assert self.engine.failure is None, self.engine.failure
        assert (stats.pages_in_use, stats.running, stats.waiting, stats.recompilations) == (0, 0, 0, 0)
        scheduler = self.engine.scheduler
        assert not scheduler.balancer.backlog.any() and not scheduler.slots.num_tokens().any()
        for key in (key for cache in scheduler.caches for key in cache.index._page_of):
            depths = scheduler.pages.rank_index.depths([key])
            expected = [len(cache.match([key])) for cache in scheduler.caches]
            assert len(expected) == 1 or depths.tolist() == expected
        assert self.gathered.keys() == self.requests.keys()
        for name, item in self.requests.items():
            self._check_text(name, item)

    def _expected(self, item: EngineRequest, most: int = 256) -> list[int]:
        """Returns the answer, which may have begun elsewhere, or its first tokens."""
        sampling, room = item.sampling, 256 - len(item.prompt_token_ids)
        return toy.expected_tokens(item.prompt_token_ids, min(sampling.max_tokens, room, most), tuple(_stop(item)))

    def _check_text(self, name: str, item: EngineRequest) -> None:
        got, stop = self.gathered[name], _stop(item)
        expected = self._expected(item)[len(item.answer_token_ids) :]
        if got.finish_reason == "abort":
            assert name in self.aborted
            assert got.tokens == expected[: len(got.tokens)]
            return
        if item.prompt_token_ids[-1] == toy.POISON:
            assert (got.tokens, got.finish_reason) == ([], "error")
            return
        assert got.tokens == expected
        assert got.finish_reason == ("stop" if expected[-1] in stop else "length")
        assert got.last.stop_token_id == (expected[-1] if expected[-1] in stop else None)


def _stop(item: EngineRequest) -> set[int]:
    return {*item.sampling.stop_token_ids} | (set() if item.sampling.ignore_eos else {toy.EOS})


class Played:
    """Samples without a device: the toy's tokens, one to all of a row of several."""

    def __init__(self, machine: "HostMachine") -> None:
        self.machine = machine
        self.texts: dict[int, tuple[int, list[int]]] = {}  # where each answer begins, and the answer

    def launch(self, command: StepCommand) -> list[Planned]:
        return self.machine.planned

    def fetch(self, command: StepCommand, jobs: list[Planned]) -> list[ForwardResults]:
        return [self._results(job) for job in jobs]

    def _results(self, job: Planned) -> ForwardResults:
        if job.command.sample is None:
            return ForwardResults()
        return ForwardResults(sampled=(self._tokens(job.context.rows, getattr(job.command, "width", 1)),))

    def _tokens(self, rows: BatchRows, width: int) -> np.ndarray:
        scheduler = self.machine.engine.scheduler
        known = scheduler.slots.known[rows.slots]
        tokens = np.full((scheduler.cfg.num_ranks, rows.position.max(initial=0) + 1, width), NOTHING, np.int32)
        for i, request_id in enumerate(rows.ids.tolist()):
            if request_id in scheduler.sequences:
                row = self._next(scheduler.sequences[request_id], int(known[i]), width)
                tokens[rows.rank[i], rows.position[i], : len(row)] = row
        return tokens

    def _next(self, sequence: Sequence, known: int, width: int) -> list[int]:
        if sequence.request.prompt[-1] == toy.POISON:
            return [NOT_FINITE]
        if sequence.id not in self.texts:
            prompt = sequence.request.prompt.tolist()
            self.texts[sequence.id] = len(prompt), toy.expected_tokens(prompt, 128, ())
        begin, text = self.texts[sequence.id]
        return text[known - begin :][: 1 + known % width]


class HostMachine(EngineMachine):
    """Engines without a device, of many sizes: scheduling does not depend on how tokens are made."""

    @initialize(
        ranks=st.sampled_from([2, 2, 1, 3]),
        slots=st.sampled_from([1, 1, 1, 2, 4]),
        pages=st.integers(6, 12),
        width=st.sampled_from([1, 1, 2, 4]),
        budget=st.sampled_from([64, 128, 256]),
        queue=st.sampled_from([6, 40, 40]),
        sharing=st.booleans(),
    )
    def start(self, ranks, slots, pages, width, budget, queue, sharing) -> None:
        cfg = EngineConfig(
            max_model_len=256,
            num_ranks=ranks,
            max_num_seqs=slots,
            num_pages=pages,
            max_num_batched_tokens=budget,
            max_num_queued_reqs=queue,
            enable_prefix_caching=sharing,
            speculative_config={"method": "ngram", "num_speculative_tokens": width - 1} if width > 1 else None,
            tokens_per_row=width,
        )
        parts = EngineComponents.on_devices(toy.FUNCTIONS, toy.PARAMS, toy.toy_config(), cfg)
        self._begin(Engine(parts, Played(self), (decode.KIND, prefill.KIND)), repeats=False)

    @rule(ranks=st.lists(st.sampled_from([0, None, 0, 1]), min_size=2, max_size=6), priority=st.integers(0, 1))
    def add_crowd(self, ranks, priority) -> None:
        """Short answers that ask for ranks, so that many wait and one continues at every turn."""
        for i, rank in enumerate(ranks):
            self.add(i % 3, 5, [], 2 + i, frozenset(), True, [], rank, priority, 0)
            self.steps(1)

    @precondition(lambda self: self.engine.scheduler.queue)
    @rule(data=st.data())
    def fail(self, data) -> None:
        """The client of a waiting request disconnects."""
        waiting = data.draw(st.sampled_from(self.engine.scheduler.waiting[:6]))
        self.aborted.add(name_of(waiting.id))
        self.engine.abort(waiting.id)
        self.steps(1)


def test_no_request_waits_while_capacity_is_free():
    """Ranks, priorities, aborts, drafts, shared prefixes and few pages together."""
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        HostMachine,
        settings=settings(max_examples=50, stateful_step_count=40, deadline=None, suppress_health_check=checks),
    )


@pytest.mark.parametrize("sharing", [True, False], ids=["prefix-cache", "no-prefix-cache"])
def test_every_text_is_its_own_and_every_page_comes_back(make_engine, sharing):
    machine = type("Machine", (EngineMachine,), {"make_engine": staticmethod(make_engine), "sharing": sharing})
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        machine, settings=settings(max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=checks)
    )


def test_offloading_changes_no_text_and_loses_no_page(make_engine, monkeypatch):
    monkeypatch.setattr(tiers, "is_loading_faster", lambda *_: True)

    def make(**changes):
        return make_engine(kv_offloading_size=4e-5, identity="f", **changes)  # eight pages; they stay for the next

    machine = type("Machine", (EngineMachine,), {"make_engine": staticmethod(make)})
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        machine, settings=settings(max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=checks)
    )


@pytest.fixture(scope="module")
def make_drafting():
    """Makes engines that share programs; steps of more requests take fewer drafts, down to none; a fourth is wrong.

    Programs are compiled at their first use: not all of them are. Most are those of `test_draft`.
    """
    given = {"method": "mtp", "num_speculative_tokens_per_batch_size": [[1, 1, 2], [2, 2, 1], [3, 4, 0]]}
    limits = LIMITS | {"speculative_config": given, "tokens_per_row": 3, "max_num_batched_tokens": 64}
    model, functions, programs = toy.toy_config(num_nextn_predict_layers=1), toy.drafting(None), []

    def make(**changes) -> Engine:
        cfg = EngineConfig(**(limits | changes))
        engine = Engine(EngineComponents.on_devices(functions, jnp.int32(4), model, cfg))
        if programs:
            engine.executor.devices.programs = programs[0]
        programs[:] = [engine.executor.devices.programs]
        return engine

    return make


def test_drafts_change_no_text_and_lose_no_page(make_drafting):
    machine = type("Machine", (EngineMachine,), {"make_engine": staticmethod(make_drafting)})
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        machine, settings=settings(max_examples=20, stateful_step_count=30, deadline=None, suppress_health_check=checks)
    )


def test_the_pool_is_small_enough_to_pre_empt(make_engine):
    engine = make_engine()
    for i in range(8):
        engine.add(request(str(i), [i + 1] * 60, max_tokens=150, ignore_eos=True))
    gathered = drain(engine)
    assert engine.stats().preemptions > 0
    for i in range(8):
        assert gathered[str(i)].tokens == toy.expected_tokens([i + 1] * 60, 150, ())


@pytest.fixture(scope="module", params=[1, 2], ids=["one token", "with drafts"])
def make_cramped(request):
    """Makes engines whose steps often overflow and are repeated, with shared programs.

    Those with drafts have one size of decode steps; the others, and `make_drafting`, have all.
    """
    width = request.param
    given = {"method": "mtp", "num_speculative_tokens": 1} if width > 1 else None
    limits = LIMITS | {"num_pages": 8, "speculative_config": given, "tokens_per_row": width}
    limits["max_num_batched_tokens"] = 64  # one program for prompts
    model = toy.toy_config(num_nextn_predict_layers=width - 1)
    functions, programs = toy.cramped(toy.drafting(4) if width > 1 else toy.FUNCTIONS), []

    def make(**changes) -> Engine:
        with one_bucket() if width > 1 else contextlib.nullcontext():
            engine = Engine(
                EngineComponents.on_devices(functions, toy.PARAMS, model, EngineConfig(**(limits | changes)))
            )
        if programs:
            engine.executor.devices.programs = programs[0]
        programs[:] = [engine.executor.devices.programs]
        return engine

    return make


def test_repeated_steps_change_no_text_and_lose_no_page(make_cramped):
    """Prefill, decode and what is in flight behind them, with aborts, pre-emptions and shared prefixes."""
    machine = type("Machine", (EngineMachine,), {"make_engine": staticmethod(make_cramped)})
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        machine, settings=settings(max_examples=12, stateful_step_count=30, deadline=None, suppress_health_check=checks)
    )
