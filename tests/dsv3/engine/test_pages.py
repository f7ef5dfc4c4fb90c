"""Pages that are offloaded and loaded again: the same text, counted, and never an unverified page."""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dsv3.engine.engine import Engine
from dsv3.engine.jobs.pages import PageStats, page_buckets
from dsv3.engine.operations import UpdateWeights
from dsv3.kv_cache.page_keys import extend_keys
from dsv3.kv_cache.tiers import counts as counts_module
from dsv3.kv_cache.tiers import store as store_module
from dsv3.kv_cache.tiers import tiers
from dsv3.kv_cache.tiers.counts import Rate, is_loading_faster
from dsv3.scheduler.request import EngineRequest, prepare
from dsv3.scheduler.sequence import SequenceStatus
from tests.dsv3.engine import toy
from tests.dsv3.engine.driving import Gathered, begin_update, drain, number, request, run, take, timing_of

PROMPT = [i % 60 + 1 for i in range(200)]
FULL = 192
"""Tokens of the prompt's full pages."""
MakeEngine = Callable[..., Engine]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes engines wait for tiers on a busy machine, and load what the toy computes in no time."""
    for name in ("LOOKUP_S", "LOAD_S"):
        monkeypatch.setattr(tiers, name, 60.0)
    monkeypatch.setattr(tiers, "is_loading_faster", lambda *_: True)


@pytest.fixture
def make(make_engine: MakeEngine) -> MakeEngine:
    """Makes engines that offload pages to the host's memory."""

    def make(**changes: object) -> Engine:
        return make_engine(**({"kv_offloading_size": 1e-3, "identity": "f"} | changes))

    return make


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def text_of(gathered: Gathered, item: EngineRequest) -> None:
    """Checks the text of a toy request."""
    expected = toy.expected_tokens(item.prompt_token_ids, item.sampling.max_tokens, (toy.EOS,))
    assert gathered.tokens == expected


def generate(engine: Engine, name: str, prompt: list[int] = PROMPT, **changes: object) -> int:
    """Generates an answer, checks its text, and returns how many of its prompt's tokens were cached."""
    item = request(name, prompt, max_tokens=3, **changes)
    gathered = run(engine, item)[name]
    text_of(gathered, item)
    return gathered.outputs[0].num_cached_tokens


def wait_until_stored(engine: Engine) -> None:
    """Waits until all offloaded pages are stored."""
    deadline = time.monotonic() + 30
    while any(engine.scheduler.tiers._backlog.values()):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def clear_caches(engine: Engine, host: bool = False) -> None:
    """Drops all pages from the devices, and from the host's memory where asked."""
    wait_until_stored(engine)
    for cache in engine.scheduler.caches:
        cache.clear()
    if host:
        engine.scheduler.tiers.clear()


def counts(engine: Engine, tier: str = "host"):
    stats = engine.stats().jobs["pages"]
    assert isinstance(stats, PageStats)
    return stats.tiers[tier]


def end(engine: Engine) -> None:
    """Frees the host's memory, as the end of a process does."""
    wait_until_stored(engine)
    memory = engine.planners["pages"].memory
    memory.close()


def test_an_evicted_prompt_is_loaded_from_the_host(make: MakeEngine):
    engine = make()
    assert generate(engine, "first") == 0
    clear_caches(engine)
    computed = engine.stats().prompt_tokens
    assert generate(engine, "again") == FULL
    assert engine.stats().prompt_tokens - computed == len(PROMPT) - FULL
    assert (counts(engine).hits, counts(engine).queries) == (FULL, 2 * FULL)
    assert generate(engine, "on the device") == FULL
    assert counts(engine).hits == FULL
    assert engine.stats().recompilations == 0


def test_answers_are_kept_too(make: MakeEngine):
    engine = make()
    prompt = PROMPT[:60]
    item = request("long", prompt, max_tokens=80, ignore_eos=True)
    answer = run(engine, item)["long"].tokens
    clear_caches(engine)
    assert generate(engine, "next turn", prompt + answer) == 128


def test_a_restarted_engine_finds_the_hosts_memory_again(make: MakeEngine):
    engine = make()
    generate(engine, "first")
    end(engine)
    assert generate(make(), "second") == FULL
    assert generate(make(identity="other"), "another model") == 0


def test_the_store_serves_other_engines_and_later_ones(make: MakeEngine, store: Path):
    first, second = make(kv_store=str(store)), make(kv_store=str(store))
    generate(first, "first")
    wait_until_stored(first)
    assert generate(second, "second") == FULL
    assert (counts(second, "store").hits, counts(second, "host").hits) == (FULL, 0)
    clear_caches(second)
    assert generate(second, "from the host now") == FULL
    assert (counts(second, "store").hits, counts(second, "host").hits) == (FULL, FULL)
    for changes in ({"salt": "mine"}, {"prompt": PROMPT[1:]}):
        assert generate(second, "miss", **changes) == 0
        clear_caches(second, host=True)
    assert generate(make(kv_store=str(store), identity="other"), "another model") == 0


def test_pages_are_found_under_their_weights_alone(make: MakeEngine, store: Path, monkeypatch: pytest.MonkeyPatch):
    """The devices, the host's memory and the store find none of other weights; the toy's replace themselves.

    A request that was prepared before the update gets the keys of the new weights. One that runs meanwhile keeps its
    pages, which none finds.
    """
    engine, gathered = make(kv_store=str(store)), {}
    monkeypatch.setattr(engine.executor, "plan_weights", lambda _: lambda: None)
    monkeypatch.setattr(engine.executor, "replace_weights", lambda _: None)
    assert generate(engine, "first") == 0
    early, kept = prepare(request("early", PROMPT, max_tokens=3), engine.rules), [7, *PROMPT[1:150]]
    engine.add(request("kept", kept, max_tokens=70, ignore_eos=True))
    while len(gathered.get("kept", Gathered()).tokens) < 5:
        take(engine.step(), gathered)
    wait_until_stored(engine)
    begin_update(engine, UpdateWeights(str(store / "none"), "new", "keep"), gathered)
    drain(engine, gathered)
    assert gathered["kept"].tokens == toy.expected_tokens(kept, 70, ())
    assert [output.weight_version for output in gathered["kept"].outputs if output.weight_version] == ["default", "new"]
    assert generate(engine, "second") == generate(engine, "of the kept", kept) == 0
    engine.submit(early)
    assert drain(engine)["early"].outputs[0].num_cached_tokens == FULL
    for host in (False, True):
        clear_caches(engine, host)
        assert generate(engine, f"again {host}") == FULL
    assert generate(make(kv_store=str(store)), "with the first weights") == FULL


def test_a_prefix_that_the_host_has_in_part_comes_from_both(make: MakeEngine, store: Path):
    engine = make(kv_store=str(store))
    generate(engine, "first")
    clear_caches(engine, host=True)
    generate(engine, "a page", PROMPT[:70])
    clear_caches(engine)
    item = msgspec.structs.replace(request("all", PROMPT, max_tokens=3), return_timing=True)
    gathered = run(engine, item)["all"]
    text_of(gathered, item)
    assert counts(engine, "store").hits == 64 + 128 and counts(engine).hits == 64
    timing = timing_of(gathered)
    assert timing.cached == {"host": 64, "store": 128} and gathered.outputs[0].num_cached_tokens == FULL
    assert [name for name, _ in timing.phases] == ["queue", "lookup", "queue", "load", "prefill", "decode"]
    assert [tokens for *_, tokens in timing.chunks] == [len(PROMPT) - FULL]


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "swap"])
def test_a_damaged_store_costs_time_and_no_text(make: MakeEngine, store: Path, damage: str):
    engine = make(kv_store=str(store))
    generate(engine, "first")
    clear_caches(engine, host=True)
    files = sorted(store.rglob("*.kv"), key=lambda path: path.name)
    assert len(files) == FULL // 64
    first = next(path for path in files if path.stem == _key(engine, 0))
    second = next(path for path in files if path.stem == _key(engine, 1))
    if damage == "flip":
        content = bytearray(second.read_bytes())
        content[4096 + 100] ^= 1
        second.write_bytes(content)
    elif damage == "truncate":
        second.write_bytes(second.read_bytes()[:4200])
    elif damage == "delete":
        second.unlink()
    else:
        second.write_bytes(first.read_bytes())
    assert generate(engine, "again") == 64
    assert counts(engine, "store").damaged == (damage != "delete")
    clear_caches(engine, host=True)
    assert generate(engine, "mended") == FULL


def _key(engine: Engine, page: int) -> str:
    keys: list[bytes] = []
    extend_keys(engine.rules.root(""), keys, np.array(PROMPT, np.int32), 64)
    return keys[page].hex()


def test_a_damaged_page_of_the_host_is_computed_again(make: MakeEngine):
    engine = make()
    generate(engine, "first")
    clear_caches(engine)
    host_pool = engine.scheduler.tiers._host_pool
    block = host_pool._block_of[bytes.fromhex(_key(engine, 1))]
    host_pool._blocks[block, 5] ^= 1
    assert generate(engine, "again") == 64
    assert counts(engine).damaged == 1
    clear_caches(engine)
    assert generate(engine, "mended") == FULL


def test_a_full_disk_stops_no_request(make: MakeEngine, store: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_module, "_write_fully", full)
    engine = make(kv_store=str(store))
    assert generate(engine, "first") == 0
    wait_until_stored(engine)
    assert counts(engine, "store").dropped == 3 and counts(engine, "store").failures
    assert not list(store.rglob("*.kv")) and not list(store.rglob("*.tmp"))
    clear_caches(engine)
    assert generate(engine, "from the host") == FULL


def test_a_store_that_hangs_is_left_alone(make: MakeEngine, store: Path, monkeypatch: pytest.MonkeyPatch):
    engine = make(kv_store=str(store))
    generate(engine, "first")
    clear_caches(engine, host=True)
    there = engine.scheduler.tiers._store
    get = there.get

    def hang(*arguments: object) -> int:
        time.sleep(0.3)
        return get(*arguments)

    monkeypatch.setattr(there, "get", hang)
    monkeypatch.setattr(tiers, "LOAD_S", 0.05)
    assert generate(engine, "beside a hanging store") == 0
    assert not engine.scheduler.tiers.has_store
    assert generate(engine, "later", PROMPT[::-1]) == 0


def test_a_store_that_breaks_costs_no_answer(make: MakeEngine, store: Path, monkeypatch: pytest.MonkeyPatch):
    engine = make(kv_store=str(store))
    generate(engine, "first")
    clear_caches(engine, host=True)

    def broken(*_: object) -> int:
        raise RuntimeError("a bug")

    for name in ("get", "count"):
        monkeypatch.setattr(engine.scheduler.tiers._store, name, broken)
        assert generate(engine, name) == 0
        clear_caches(engine, host=True)
    assert engine.failure is None and engine.scheduler.tiers.num_loading_batches == 0


def test_a_lookup_without_answer_is_a_miss(make: MakeEngine, store: Path, monkeypatch: pytest.MonkeyPatch):
    engine = make(kv_store=str(store))
    monkeypatch.setattr(engine.scheduler.tiers._store, "count", lambda keys: time.sleep(0.3) or len(keys))
    monkeypatch.setattr(tiers, "LOOKUP_S", 0.02)
    assert generate(engine, "first") == 0
    assert not engine.scheduler.tiers.has_store, "it is left alone, as after a load that does not come"


def test_invalidated_pages_leave_every_tier(make: MakeEngine, store: Path):
    engine = make(kv_store=str(store))
    generate(engine, "good", PROMPT[:70])
    poisoned = run(engine, request("poisoned", [*PROMPT, toy.POISON], max_tokens=3))["poisoned"]
    assert poisoned.finish_reason == "error"
    clear_caches(engine)
    time.sleep(0.05)
    wait_until_stored(engine)
    held = {path.stem for path in store.rglob("*.kv")}
    assert held == {_key(engine, 0)}, "what others had computed stays"
    assert generate(engine, "again") == 64


def test_loaded_pages_stay_valid_whatever_happens_to_the_request(make: MakeEngine):
    engine = make()
    generate(engine, "good")
    clear_caches(engine)
    poisoned = run(engine, request("poisoned", [*PROMPT, toy.POISON], max_tokens=3))["poisoned"]
    assert poisoned.finish_reason == "error"
    assert generate(engine, "again") == FULL and counts(engine).hits == FULL, "found on the device"


def test_a_page_reallocated_before_offloading_is_dropped(make: MakeEngine):
    engine = make()
    engine.add(request("first", PROMPT[:100], max_tokens=3))
    while not engine.scheduler.offload_queue:
        engine.step()
    for cache in engine.scheduler.caches:
        cache.clear()
    drain(engine)
    wait_until_stored(engine)
    assert counts(engine).bytes_held == 0


def test_others_go_on_while_pages_are_loaded(make: MakeEngine, monkeypatch: pytest.MonkeyPatch):
    engine = make()
    generate(engine, "first")
    clear_caches(engine)
    host_pool = engine.scheduler.tiers._host_pool
    get, may_go = host_pool.get, []

    def slow(*arguments: object) -> bool:
        while not may_go:
            time.sleep(0.001)
        return get(*arguments)

    monkeypatch.setattr(host_pool, "get", slow)
    gathered: dict[str, Gathered] = {}
    loads, other = request("loads", PROMPT, max_tokens=3), request("other", [5, 6, 7], max_tokens=40, ignore_eos=True)
    engine.add(loads)
    engine.step()
    assert engine.scheduler.sequences[number("loads")].state is SequenceStatus.LOADING
    engine.add(other)
    for _ in range(20):
        take(engine.step(), gathered)
    assert len(gathered["other"].tokens) > 10 and "loads" not in gathered
    assert engine.stats().jobs["pages"].num_loading == 1
    may_go.append(True)
    drain(engine, gathered)
    text_of(gathered["loads"], loads)
    assert gathered["loads"].outputs[0].num_cached_tokens == FULL


def test_a_long_prefix_is_loaded_over_several_steps_beside_the_answers_of_others(make: MakeEngine):
    engine = make()
    generate(engine, "first")
    clear_caches(engine)
    planner, launched = engine.planners["pages"], []
    planner._most, planner._tiers.buckets = 1, (1,)
    launch = engine.executor.launch

    def watched(command):
        launched.append({kind for kind, _ in command.jobs})
        return launch(command)

    engine.executor.launch = watched
    gathered: dict[str, Gathered] = {}
    engine.add(request("other", [5, 6, 7], max_tokens=100, ignore_eos=True))
    take(engine.step(), gathered)
    loads = request("loads", PROMPT, max_tokens=3)
    engine.add(loads)
    drain(engine, gathered)
    text_of(gathered["loads"], loads)
    with_pages = [kinds for kinds in launched if "pages" in kinds]
    assert len(with_pages) >= FULL // 64, "a page at a time"
    assert all("decode" in kinds for kinds in launched[1:90]), "the other one has a token in each step"


def test_an_abort_while_loading_frees_everything(make: MakeEngine, monkeypatch: pytest.MonkeyPatch):
    engine = make()
    generate(engine, "first")
    clear_caches(engine)
    host_pool = engine.scheduler.tiers._host_pool
    get = host_pool.get
    monkeypatch.setattr(host_pool, "get", lambda *arguments: time.sleep(0.05) or get(*arguments))
    engine.add(request("gone", PROMPT, max_tokens=3))
    engine.step()
    engine.abort(number("gone"))
    assert drain(engine)["gone"].finish_reason == "abort"
    assert engine.stats().pages_in_use == 0 and not engine.planners["pages"]._fetches
    assert engine.scheduler.tiers.num_loading_batches == 0
    assert generate(engine, "again") == FULL


def test_two_requests_load_a_prefix_once(make: MakeEngine):
    engine = make(num_ranks=2)
    generate(engine, "first")
    clear_caches(engine)
    items = [request(f"r{i}", [*PROMPT, i + 1], max_tokens=3) for i in range(4)]
    gathered = run(engine, *items)
    for i, item in enumerate(items):
        text_of(gathered[f"r{i}"], item)
    assert counts(engine).hits == 2 * FULL, "once for each rank"


def test_loading_that_is_slower_than_computing_is_not_done(make: MakeEngine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiers, "is_loading_faster", is_loading_faster)
    engine = make()
    generate(engine, "first")
    clear_caches(engine)
    mine = engine.scheduler.tiers
    mine._rates["host"], mine.compute_rate = _rate(1.0), _rate(1e9)
    assert generate(engine, "again") == 0
    clear_caches(engine)
    mine._rates["host"], mine.compute_rate = _rate(1e9), _rate(1.0)
    assert generate(engine, "and again") == FULL
    clear_caches(engine)
    mine._rates["host"], mine.compute_rate = _rate(1.0), _rate(1e9)
    monkeypatch.setattr(counts_module, "_RATE_VALID_S", 0.0)
    assert generate(engine, "a minute later") == FULL, "what was slow once is tried again"


def _rate(value: float) -> Rate:
    rate = Rate()
    rate.update(value, 1.0)
    return rate


def test_flushing_empties_devices_and_host(make: MakeEngine):
    engine = make()
    generate(engine, "first")
    wait_until_stored(engine)
    engine.flush()
    assert engine.has_work
    engine.step()
    assert generate(engine, "again") == 0


def test_flushing_drops_pages_on_their_way_to_the_host(make: MakeEngine):
    engine = make()
    engine.add(request("first", PROMPT[:100], max_tokens=3))
    while not engine.scheduler.offload_queue:
        engine.step()
    engine.step()
    assert not engine.scheduler.offload_queue, "a step in flight copies the page"
    engine.flush()
    drain(engine)
    wait_until_stored(engine)
    assert counts(engine).bytes_held == 0


def test_batches_fit_their_memory():
    v3 = 61 * 64 * 576 * 2
    assert page_buckets(v3) == (1, 8)
    assert page_buckets(1000) == (1, 8, 64)
    assert page_buckets(2**30) == (1,)
