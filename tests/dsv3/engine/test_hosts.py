"""Pages of an instance over two hosts: each stores, loads and serves those of its own ranks, and loses them alone."""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from dsv3.engine.engine import Engine
from dsv3.kv_cache.events import Removed, Stored
from dsv3.kv_cache.tiers import tiers
from dsv3.kv_cache.transfer import client
from tests.dsv3.engine import conftest, toy
from tests.dsv3.engine.driving import drain, number, request, run, take
from tests.dsv3.engine.test_disaggregation import free_address
from tests.dsv3.engine.test_engine_invariants import EngineMachine
from tests.dsv3.engine.two_hosts import over_two_hosts

PROMPT = [i % 60 + 1 for i in range(200)]
FULL = 192
FAR = 1
MakeEngine = Callable[..., Engine]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOOKUP_S", "LOAD_S", "FETCH_S"):
        monkeypatch.setattr(tiers, name, 300.0)
    monkeypatch.setattr(tiers, "is_loading_faster", lambda *_: True)


@pytest.fixture
def make(programs) -> MakeEngine:
    """Makes engines over two hosts, which share the programs of one."""

    def make(**changes: object) -> Engine:
        engine = over_two_hosts(conftest.parts(**({"kv_offloading_size": 1e-3, "identity": "{}"} | changes)))
        engine.executor.devices.programs = programs
        engine.warm_up()
        return engine

    return make


@pytest.fixture
def key(tmp_path: Path) -> str:
    path = tmp_path / "transfer.key"
    path.write_text("k" * 40)
    path.chmod(0o600)
    return str(path)


def generate(engine: Engine, name: str, prompt: list[int] = PROMPT, rank: int | None = None, **more) -> int:
    """Generates an answer, checks its text, and returns how many of its prompt's tokens were cached."""
    item = msgspec.structs.replace(request(name, prompt, max_tokens=3), rank=rank, **more)
    gathered = run(engine, item)[name]
    assert gathered.tokens == toy.expected_tokens(prompt, 3)
    return gathered.outputs[0].num_cached_tokens


def remote_tiers(engine: Engine):
    """The tiers of the second host."""
    return engine.executor.follower_handler.opened.tiers


def until(engine: Engine, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        engine.step()
        time.sleep(0.001)


def wait_until_stored(engine: Engine) -> None:
    """Waits until all offloaded pages are stored, and reported."""
    known = engine.scheduler.tiers.of(FAR)
    until(
        engine,
        lambda: not any((*engine.planners["pages"]._tiers._backlog.values(), *remote_tiers(engine)._backlog.values())),
    )
    until(engine, lambda: known._keys == remote_tiers(engine)._host_pool._block_of.keys() and not known.has_orders)


def clear_caches(engine: Engine) -> None:
    """Drops all pages from the devices."""
    wait_until_stored(engine)
    for cache in engine.scheduler.caches:
        cache.clear()


def test_each_host_keeps_the_pages_of_its_ranks_and_a_prompt_goes_where_they_are(make: MakeEngine) -> None:
    engine = make()
    assert generate(engine, "first", rank=FAR) == 0
    clear_caches(engine)
    here, there = engine.planners["pages"]._tiers._host_pool, remote_tiers(engine)._host_pool
    assert (len(here), len(there)) == (0, FULL // 64)
    assert generate(engine, "again") == FULL
    assert engine.scheduler.tiers.counts()["host"].hits == remote_tiers(engine).host.hits == FULL
    clear_caches(engine)
    assert generate(engine, "elsewhere", rank=0) == 0, "the other host has none of them"
    assert not engine.executor.follower_handler._ordered._loads and engine.stats().pages_in_use == 0


def test_a_page_that_the_other_host_has_lost_is_computed(make: MakeEngine) -> None:
    engine = make()
    generate(engine, "first", rank=FAR)
    clear_caches(engine)
    host_pool = remote_tiers(engine)._host_pool
    second = list(host_pool._block_of)[1]
    host_pool._blocks[host_pool._block_of[second]] ^= 1
    assert generate(engine, "again", rank=FAR) == 64
    assert engine.scheduler.tiers.counts()["host"].damaged == 1
    clear_caches(engine)
    assert generate(engine, "and again", rank=FAR) == FULL


def test_a_silent_host_is_not_waited_for(make: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    generate(engine, "first", rank=FAR)
    clear_caches(engine)
    monkeypatch.setattr(tiers, "LOAD_S", 0.05)
    monkeypatch.setattr(engine.executor.follower_handler._ordered, "execute_before_step", lambda orders: None)
    assert generate(engine, "again", rank=FAR) == 0
    assert engine.scheduler.tiers.of(FAR).num_loading_batches == 0 and engine.stats().pages_in_use == 0


def test_an_abort_drops_what_the_other_host_has_loaded(make: MakeEngine) -> None:
    engine = make()
    generate(engine, "first", rank=FAR)
    clear_caches(engine)
    ordered = engine.executor.follower_handler._ordered
    engine.add(msgspec.structs.replace(request("gone", PROMPT, max_tokens=3), rank=FAR))
    while not ordered._loads:
        engine.step()
    engine.abort(number("gone"))
    assert drain(engine)["gone"].finish_reason == "abort"
    wait_until_stored(engine)
    assert not ordered._loads and engine.scheduler.tiers.of(FAR).num_loading_batches == 0
    assert engine.stats().pages_in_use == 0


def test_invalidated_pages_leave_the_other_host(make: MakeEngine) -> None:
    engine = make()
    poisoned = [*PROMPT, toy.POISON]
    engine.add(msgspec.structs.replace(request("bad", poisoned, max_tokens=3), rank=FAR))
    assert drain(engine)["bad"].finish_reason == "error"
    wait_until_stored(engine)
    until(engine, lambda: not len(remote_tiers(engine)._host_pool))
    assert generate(engine, "good", rank=FAR) == 0


def test_flushing_empties_all_hosts(make: MakeEngine) -> None:
    engine = make()
    generate(engine, "first", rank=FAR)
    wait_until_stored(engine)
    engine.flush()
    drain(engine)
    until(engine, lambda: not len(remote_tiers(engine)._host_pool))
    assert generate(engine, "again") == 0


@pytest.mark.parametrize("full", [False, True])
def test_a_store_is_read_and_written_on_the_host_of_the_rank(
    make: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    """Where the disk of one host is full, that host continues without."""
    engine = make(kv_store=str(tmp_path / "store"))

    def fails(*_: object) -> int:
        raise OSError(28, "No space left on device")

    if full:
        monkeypatch.setattr(remote_tiers(engine)._store, "put", fails)
    generate(engine, "first", rank=FAR)
    clear_caches(engine)
    engine.flush()
    drain(engine)
    wait_until_stored(engine)
    assert generate(engine, "again", rank=FAR) == (0 if full else FULL)
    counts = engine.scheduler.tiers.counts()["store"]
    assert counts.hits == remote_tiers(engine).store.hits == (0 if full else FULL)
    assert (counts.dropped > 0) == full and counts.queries == 2 * FULL
    assert engine.planners["pages"]._tiers.store.stored_bytes == 0


def test_pages_go_from_two_hosts_to_two_hosts(make: MakeEngine, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process serves what it has and fetches for its own ranks; a prompt asks all, and may be requested early."""
    monkeypatch.setattr(tiers, "PATIENCE_S", 60.0)
    monkeypatch.setattr(client, "_ROUND_S", 0.001)
    addresses = free_address(), free_address()
    prefill = make(transfer_key_file=key, transfer_addresses=addresses)
    decode = make(transfer_key_file=key)
    source = ",".join(addresses)
    for rank, prompt in enumerate((PROMPT, PROMPT[::-1])):
        generate(prefill, f"computed {rank}", prompt, rank=rank)
    early = msgspec.structs.replace(request("early", PROMPT[50:], max_tokens=3), rank=FAR, pages_from=source)
    decode.add(early)
    gathered: dict = {}
    for _ in range(10):
        take(decode.step(), gathered)
    generate(prefill, "late", PROMPT[50:], rank=FAR)
    drain(decode, gathered, limit=10**6)
    assert gathered["early"].tokens == toy.expected_tokens(PROMPT[50:], 3)
    assert gathered["early"].outputs[0].num_cached_tokens == 128
    assert generate(decode, "far to near", PROMPT[::-1], rank=0, pages_from=source) == FULL
    assert generate(decode, "near to far", PROMPT, rank=FAR, pages_from=source) == FULL
    assert (decode.planners["pages"]._tiers.peer.hits, remote_tiers(decode).peer.hits) == (FULL, FULL + 128)
    servers = prefill.planners["pages"].server, prefill.executor.follower_handler.opened.server
    assert [server.pages_sent for server in servers] == [FULL // 64, FULL // 64 + 2]
    monkeypatch.setattr(tiers, "PATIENCE_S", 0.05)
    assert generate(decode, "not there", [*PROMPT[:70], *PROMPT[:150]], rank=FAR, pages_from=source) == 64


def test_events_of_a_hosts_pages_name_its_ranks_alone(make: MakeEngine) -> None:
    engine = make(kv_events_config={"enable_kv_cache_events": True, "endpoint": f"inproc://{time.monotonic_ns()}"})
    events: list = []
    append = engine.events.queue.append
    engine.events.queue.append = lambda each: events.append(each) or append(each)
    generate(engine, "near", [*PROMPT[:64], 3], rank=0)
    generate(engine, "far", PROMPT, rank=FAR)
    wait_until_stored(engine)
    stored = [(each.rank, len(each.keys)) for each in events if isinstance(each, Stored) and each.medium == "CPU"]
    assert stored.count((range(1), 1)) == 1 and stored.count((range(1, 2), 1)) == FULL // 64
    engine.flush()
    drain(engine)
    until(engine, lambda: sum(isinstance(each, Removed) and each.medium == "CPU" for each in events) == 1 + FULL // 64)
    gone = [each.rank for each in events if isinstance(each, Removed) and each.medium == "CPU"]
    assert gone.count(range(1)) == 1 and gone.count(range(1, 2)) == FULL // 64
    engine.events.close()


def test_pages_of_two_hosts_change_no_text_and_are_not_lost(make: MakeEngine) -> None:
    made: list[Engine] = []

    def small(**changes: object) -> Engine:
        made.append(make(kv_offloading_size=4e-5, **changes))  # eight pages each
        return made[-1]

    machine = type("Machine", (EngineMachine,), {"make_engine": staticmethod(small)})
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        machine, settings=settings(max_examples=15, stateful_step_count=30, deadline=None, suppress_health_check=checks)
    )
    for engine in made:
        wait_until_stored(engine)
        assert not engine.executor.follower_handler._ordered._loads


def test_a_request_moves_to_another_host_when_its_host_is_full(
    make: MakeEngine, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its pages travel to one host, others take the slots there: another host fetches them too."""
    monkeypatch.setattr(tiers, "PATIENCE_S", 60.0)
    monkeypatch.setattr(client, "_ROUND_S", 0.001)
    addresses = free_address(), free_address()
    prefill, decode = make(transfer_key_file=key, transfer_addresses=addresses), make(transfer_key_file=key)
    decode.add(msgspec.structs.replace(request("moves", PROMPT, max_tokens=3), pages_from=",".join(addresses)))
    gathered: dict = {}
    take(decode.step(), gathered)
    [asking] = decode.scheduler.admission.awaiting_lookup
    assert asking.lookup.tiers is decode.scheduler.tiers.of(0)
    for i in range(decode.cfg.max_num_seqs):
        others = request(f"other {i}", [i + 1] * 3, max_tokens=60, ignore_eos=True)
        decode.add(msgspec.structs.replace(others, rank=0))
    take(decode.step(), gathered)
    generate(prefill, "computed", PROMPT, rank=FAR)
    deadline = time.monotonic() + 60
    while not asking.lookup.is_over and time.monotonic() < deadline:
        time.sleep(0.001)
    drain(decode, gathered, limit=10**6)
    assert gathered["moves"].tokens == toy.expected_tokens(PROMPT, 3)
    assert gathered["moves"].outputs[0].num_cached_tokens == FULL
    assert asking.lookup.tiers is decode.scheduler.tiers.of(FAR) and asking.lookup.is_second
    assert remote_tiers(decode).peer.hits == decode.planners["pages"]._tiers.peer.hits == FULL
    assert decode.stats().pages_in_use == 0
