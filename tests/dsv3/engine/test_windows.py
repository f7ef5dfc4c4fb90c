"""Requests of a model with a window: their texts, and where a cached prefix can be continued."""

import functools
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from dsv3.engine.engine import Engine
from dsv3.kv_cache.page_keys import is_window_key
from dsv3.kv_cache.tiers import tiers
from tests.dsv3.engine import fewer, test_hosts, toy, windowed
from tests.dsv3.engine.driving import request, run, run_out_of_pages
from tests.dsv3.engine.test_engine_invariants import EngineMachine
from tests.dsv3.engine.test_pages import clear_caches, counts
from tests.dsv3.engine.two_hosts import over_two_hosts

LIMITS = {"max_model_len": 256, "num_pages": 7, "max_num_seqs": 4, "max_num_batched_tokens": 100, "num_ranks": 2}
TIERS = {"kv_offloading_size": 1e-3, "identity": "f"}
PROMPT = [i % 60 + 1 for i in range(200)]
FULL = 192
MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine whose programs the tests share."""
    with pytest.MonkeyPatch.context() as patched, fewer.one_bucket():
        patched.setattr("dsv3.kv_cache.tiers.host_pool.FOLDER", tmp_path_factory.mktemp("shared_memory"))
        engine = Engine(windowed.parts(**LIMITS, **TIERS))
        engine.warm_up()
    yield engine


@pytest.fixture
def make(compiled: Engine, monkeypatch: pytest.MonkeyPatch) -> MakeEngine:
    """Makes engines that load what a tier has, however fast they would compute it."""
    for name in ("LOOKUP_S", "LOAD_S"):
        monkeypatch.setattr(tiers, name, 60.0)
    monkeypatch.setattr(tiers, "is_loading_faster", lambda *_: True)

    def make(**changes: object) -> Engine:
        with fewer.one_bucket():
            engine = Engine(windowed.parts(**(LIMITS | TIERS | changes)))
            engine.executor.devices.programs = compiled.executor.devices.programs
            engine.warm_up()
        return engine

    return make


def generate(engine: Engine, name: str, prompt: list[int] = PROMPT, tokens: int = 3) -> int:
    """Generates an answer, checks the text, and returns how many of the prompt's tokens were cached."""
    gathered = run(engine, request(name, prompt, max_tokens=tokens, ignore_eos=True))[name]
    assert gathered.tokens == toy.expected_tokens(prompt, tokens, ())
    assert not any(cache.in_use or cache.window.in_use for cache in engine.scheduler.caches)
    assert engine.stats().recompilations == 0
    return gathered.outputs[0].num_cached_tokens


def test_chunks_and_preempted_requests_give_their_texts(make: MakeEngine) -> None:
    run_out_of_pages(make())


def test_a_prompt_is_continued_behind_its_last_full_page(make: MakeEngine) -> None:
    engine = make()
    assert [generate(engine, "first"), generate(engine, "again")] == [0, FULL]
    assert generate(engine, "one token more than a page", PROMPT[: FULL + 1]) == FULL
    assert generate(engine, "a shorter one", PROMPT[:FULL]) == 128, "at least one token is computed"


def test_an_answer_is_continued_behind_its_last_full_page(make: MakeEngine) -> None:
    engine, prompt = make(), PROMPT[:60]
    answer = toy.expected_tokens(prompt, 140, ())
    assert generate(engine, "turn", prompt, 140) == 0
    assert generate(engine, "next turn", prompt + answer + [5] * 9) == FULL
    assert generate(engine, "the turn again", prompt + answer[:20]) == 0, "its window has moved on"


def test_a_prefix_of_several_prompts_is_continued_from_the_second_on() -> None:
    """A prompt leaves window pages where others may part from it, and longer ones fewer, at larger distances.

    A prompt that finds more than it can continue leaves one for the next, where the two part.
    """
    with fewer.one_bucket(), fewer.greedy_samplers():
        engine = Engine(windowed.parts(**(LIMITS | {"max_num_batched_tokens": 256, "num_ranks": 1})))
        engine.warm_up()
    prompts = [PROMPT[:70] + [word] * 130 for word in (61, 62, 63)]
    assert [generate(engine, f"{i}", prompt) for i, prompt in enumerate(prompts)] == [0, 64, 64]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("dsv3.scheduler.windows.SPREAD", 1)
        prompts = [[5, *PROMPT[:70], *[word] * 130] for word in (61, 62, 63)]
        assert [generate(engine, f"far {i}", prompt) for i, prompt in enumerate(prompts)] == [0, 0, 64]


def test_a_provisional_window_page_reaches_the_host_once_it_is_continued(make: MakeEngine) -> None:
    engine, prompts = make(), [PROMPT[:70] + [word] * 130 for word in (60, 61, 62, 63)]
    assert generate(engine, "first", prompts[0]) == 0
    clear_caches(engine)
    assert generate(engine, "not yet", prompts[1]) == 0
    assert generate(engine, "continues it", prompts[2]) == 64
    clear_caches(engine)
    assert generate(engine, "from the host", prompts[3]) == 64


def test_a_prompt_that_waits_for_another_continues_it(make: MakeEngine) -> None:
    """The second one waits until the first has computed what both begin with, which leaves a window page there."""
    engine, prompts = make(), [PROMPT[:130] + [word] * 60 for word in (61, 62)]
    gathered = run(engine, *(request(f"{i}", p, max_tokens=3, ignore_eos=True) for i, p in enumerate(prompts)))
    assert [gathered[f"{i}"].tokens for i in range(2)] == [toy.expected_tokens(p, 3, ()) for p in prompts]
    assert engine.stats().recompilations == 0


def test_window_pages_are_evicted_before_a_request_lacks_one(make: MakeEngine) -> None:
    engine = make()
    for i in range(40):
        prompt = [(i * 7 + j) % 60 + 1 for j in range(70 + i)]
        assert generate(engine, f"{i}", prompt, 5) == 0
    window = engine.scheduler.caches[0].window
    assert window.available == window.pool.num_pages > len(window.index) > 0


def test_pages_and_windows_are_loaded_from_the_host_and_from_a_store(make: MakeEngine, tmp_path: Path) -> None:
    engine = make(kv_store=str(tmp_path))
    generate(engine, "first")
    clear_caches(engine)
    assert generate(engine, "from the host") == FULL
    assert counts(engine).hits == FULL
    clear_caches(engine, host=True)
    assert generate(engine, "from the store") == FULL
    assert counts(engine, "store").hits == FULL
    clear_caches(engine, host=True)
    assert generate(engine, "next turn", PROMPT[:FULL] + [3] * 20) == FULL


@pytest.mark.parametrize("window", [True, False], ids=["window", "page"])
@pytest.mark.parametrize("damage", ["lost", "flipped"])
def test_what_cannot_be_continued_is_computed(make: MakeEngine, window: bool, damage: str) -> None:
    engine = make()
    generate(engine, "first")
    clear_caches(engine)
    pool = engine.planners["pages"]._tiers._host_pool
    for key in [key for key in pool._block_of if is_window_key(key) == window]:
        if damage == "lost":
            pool.delete(key)
        else:
            pool._blocks[pool._block_of[key]][0] ^= 1
    assert generate(engine, "again") == 0
    assert engine.stats().preemptions == 0, "a load that breaks off preempts nothing"
    assert generate(engine, "and again") == FULL


def test_a_prompt_of_another_instance_is_continued(make: MakeEngine, tmp_path: Path) -> None:
    (key := tmp_path / "transfer.key").write_text("k" * 40)
    key.chmod(0o600)
    given = {"transfer_key_file": str(key), "identity": '{"weights": "w"}'}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    there, here = make(**given, role="prefill", transfer_address=address), make(**given, role="decode")
    run(there, request("there", PROMPT, max_tokens=1, ignore_eos=True))
    item = msgspec.structs.replace(request("here", PROMPT, max_tokens=20, ignore_eos=True), pages_from=address)
    gathered = run(here, item)["here"]
    assert gathered.tokens == toy.expected_tokens(PROMPT, 20, ())
    assert gathered.outputs[0].num_cached_tokens == FULL == here.stats().jobs["pages"].tiers["peer"].hits
    longer = [*PROMPT, *range(1, 40)]
    item = msgspec.structs.replace(request("longer", longer, max_tokens=5, ignore_eos=True), pages_from=address)
    clear_caches(here, host=True)
    assert run(here, item)["longer"].outputs[0].num_cached_tokens == FULL, "the last page of what is there"


def test_each_host_keeps_the_windows_of_its_ranks(compiled: Engine, make: MakeEngine) -> None:
    made: list[Engine] = []

    def on_two_hosts(**changes: object) -> Engine:
        with fewer.one_bucket():
            made.append(over_two_hosts(windowed.parts(**(LIMITS | TIERS | {"identity": "{}"} | changes))))
            made[-1].executor.devices.programs = compiled.executor.devices.programs
            made[-1].warm_up()
        return made[-1]

    engine = on_two_hosts()
    assert test_hosts.generate(engine, "far", rank=test_hosts.FAR) == 0
    test_hosts.clear_caches(engine)
    assert test_hosts.generate(engine, "again") == FULL, "goes where its pages are"
    assert test_hosts.remote_tiers(engine).host.hits == FULL
    small = functools.partial(on_two_hosts, kv_offloading_size=8e-5)
    Machine = type("Machine", (EngineMachine,), {"make_engine": staticmethod(small)})
    run_state_machine_as_test(Machine, settings=_settings(max_examples=5))
    for engine in made:
        test_hosts.wait_until_stored(engine)
        assert not engine.executor.follower_handler._ordered._loads


def test_steps_that_overflow_are_repeated(make: MakeEngine) -> None:
    """A chunk that began within a page overwrites rows of its window: it is computed again from the page's start."""
    limits = LIMITS | {"max_num_batched_tokens": 40, "num_pages": 20}
    with fewer.one_bucket(), fewer.greedy_samplers():
        engine = Engine(windowed.parts(toy.cramped(windowed.FUNCTIONS), **limits))
        engine.warm_up()
    prompts = [[2 * (i * k % 29) + 2 for i in range(150 + k)] for k in (1, 3, 7)]  # even: all choose one device
    items = [request(f"{i}", prompt, max_tokens=60, ignore_eos=True) for i, prompt in enumerate(prompts)]
    gathered = run(engine, *items)
    assert [gathered[f"{i}"].tokens for i in range(3)] == [toy.expected_tokens(p, 60, ()) for p in prompts]


def test_drafts_that_are_rejected_leave_the_window_as_it_was(make: MakeEngine) -> None:
    given = {"method": "ngram", "num_speculative_tokens": 2}
    limits = LIMITS | {"speculative_config": given, "tokens_per_row": 3, "num_ranks": 1}
    with fewer.one_bucket(), fewer.greedy_samplers():
        engine = Engine(windowed.parts(**limits))
        engine.warm_up()
    texts = [toy.expected_tokens([i], 60, ()) for i in (5, 6, 7)]
    prompts = [[*text, 9, *text[:30]] for text in texts]
    items = [request(f"{i}", prompt, max_tokens=120, ignore_eos=True) for i, prompt in enumerate(prompts)]
    gathered = run(engine, *items)
    assert [gathered[f"{i}"].tokens for i in range(3)] == [toy.expected_tokens(p, 120, ()) for p in prompts]
    drafts = engine.stats().jobs["draft"]
    assert 0 < drafts.num_accepted_tokens < drafts.num_draft_tokens


@pytest.mark.parametrize("sharing", [True, False], ids=["prefix-cache", "no-prefix-cache"])
def test_every_text_is_its_own_and_every_page_comes_back(make: MakeEngine, sharing: bool) -> None:
    class Machine(EngineMachine):
        make_engine = staticmethod(functools.partial(make, kv_offloading_size=0.0))

        def teardown(self) -> None:
            super().teardown()
            if hasattr(self, "engine"):
                assert not any(cache.window.in_use for cache in self.engine.scheduler.caches)

    Machine.sharing = sharing
    run_state_machine_as_test(Machine, settings=_settings(max_examples=10))


def _settings(max_examples: int) -> settings:
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    return settings(max_examples=max_examples, stateful_step_count=30, deadline=None, suppress_health_check=checks)
