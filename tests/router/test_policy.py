"""Where a router sends requests: the least cost, bounded loads and queues, and nobody who fails again and again."""

import asyncio
import contextlib
import errno
import json
import random
import re
import time
from types import SimpleNamespace

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv3.config.server_options import ServerOptions
from dsv3.scheduler.sent_pages import SentPages
from dsv3.server.http.exchange import ADMIT, REQUEST_ID
from dsv3.server.http.registration import make_registrar
from dsv3.server.protocol.errors import ENGINE_DIED, ApiError
from dsv3.server.tenants import Tenants, load_tenants
from router import members
from router.app import RouterSite, fleet_of, make_app, maker, members_of
from router.instance import Booking, CircuitBreaker, Instance, InstanceFailed
from router.members import Members, Pool, Registration, read_registration
from router.options import RouterOptions
from router.policy import InstanceLoad, choose
from router.relay import RetryAttempts
from router.request import Prompt, parse_request
from tests.dsv3.server.serving import ROOT

URL = "http://127.0.0.1:1"
LOADS = st.lists(
    st.builds(InstanceLoad, st.floats(0, 1e6), st.integers(0, 10**6), st.integers(0, 500)), min_size=2, max_size=6
)


def prompt_in(body: dict) -> Prompt:
    """What a router knows of the prompt in a request."""
    return parse_request("/v1/responses", json.dumps(body).encode()).prompt


@given(LOADS, st.integers(1, 200_000), st.randoms(use_true_random=False))
def test_nobody_else_has_less_of_everything(loads, tokens, chance):
    chosen = loads[choose(Prompt((), tokens), loads, [0] * len(loads), decodes=True, chance=chance)]
    for other in loads:
        is_less = other.prefill < chosen.prefill - 1 and other.held < chosen.held and other.requests < chosen.requests
        assert not is_less


def test_pages_that_went_there_outweigh_a_backlog_of_their_size():
    prompt = Prompt(tuple(bytes([i]) for i in range(10)), 640)
    for backlog, expected in ((500, 1), (800, 0)):
        loads = [InstanceLoad(), InstanceLoad(prefill=backlog, requests=0)]
        assert choose(prompt, loads, [0, 9], decodes=False, chance=random.Random(0)) == expected


def test_equals_share():
    chance = random.Random(0)
    chosen = {
        choose(Prompt((), 9), [InstanceLoad(), InstanceLoad(), InstanceLoad()], [0, 0, 0], decodes=True, chance=chance)
        for _ in range(99)
    }
    assert chosen == {0, 1, 2}


@given(st.lists(st.integers(0, 1), min_size=0, max_size=700), st.integers(0, 700))
def test_prompts_that_begin_alike_have_keys_that_begin_alike(ids, length):
    one, other = (prompt_in({"prompt": each}) for each in (ids, ids[:length]))
    assert one.keys[: len(other.keys)] == other.keys
    assert len(one.keys) == len(ids) // 64
    assert not one.keys or prompt_in({"prompt": ids, "cache_salt": "s"}).keys[0] != one.keys[0]


def test_the_next_turn_of_a_chat_begins_like_the_one_before():
    turns = [{"role": "user", "content": "word " * 300}, {"role": "assistant", "content": "more " * 300}]
    first, second = prompt_in({"messages": turns[:1]}), prompt_in({"messages": turns})
    assert len(first.keys) >= 5 and second.keys[: len(first.keys)] == first.keys


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=40))
def test_memory_of_pages_is_bounded_and_keeps_beginnings(prompts):
    """It remembers what a list does in which each page of a prompt moves to the end, the first one last."""
    sent, pages = SentPages(limit=8), list[bytes]()
    for keys in prompts:
        names = [bytes(keys[: i + 1]) for i in range(len(keys))]
        sent.record(names)
        pages = [page for page in pages if page not in names] + names[::-1]
        pages = pages[-8:]
        assert len(sent) == len(pages) and sent.overlap(names) == len(names)
        other = [bytes([*keys[:2], 9])] if len(keys) > 1 else []
        assert all(sent.overlap(names[:2] + other, near) == len(names[:2]) for near in range(5))
        assert all(sent.overlap([page]) for page in pages)


ENDS = st.sampled_from(["fail", "succeed", "nothing", "answer"])


@given(st.lists(st.sampled_from(["wait", "ask"]) | st.tuples(st.integers(0, 5), ENDS), max_size=60))
def test_a_breaker_lets_one_try_while_it_is_open(steps):
    """Many requests are on their way, also from before it opened; any of them may end in any way."""
    breaker, now, running, on_trial = CircuitBreaker(), 0.0, [], []
    for step in steps:
        if step == "wait":
            now += 31
        elif step == "ask":
            if breaker.allows(now):
                request = object()
                running.append(request)
                if breaker.is_open:
                    assert not on_trial
                    on_trial.append(request)
                breaker.on_send(request)
        elif step[0] < len(running):
            request = running[step[0]]
            if step[1] == "answer":
                breaker.on_first_tokens(request)
                assert not breaker.is_open or request not in on_trial
            else:
                running.remove(request)
                if step[1] == "succeed":
                    breaker.on_success()
                elif step[1] == "fail":
                    breaker.on_failure(request, now)
                breaker.on_end(request)
                on_trial = [each for each in on_trial if each is not request]
        if not breaker.is_open:
            on_trial.clear()
        assert breaker.allows(now + 31) == (not on_trial)
    breaker.on_success()
    assert breaker.allows(now)


def test_many_failures_at_once_are_one_rest():
    breaker = CircuitBreaker()
    for request in range(50):
        breaker.on_failure(request, 10.0)
    assert not breaker.allows(10.9) and breaker.allows(11.0)
    breaker.on_send("trial")
    breaker.on_failure("one from before", 11.0)
    assert breaker.open_until == 11.0
    breaker.on_failure("trial", 11.0)
    breaker.on_end("trial")
    assert not breaker.allows(12.9) and breaker.allows(13.0)


def test_one_request_alone_tries_an_instance_that_has_failed():
    """Another one that ends meanwhile, sent before, does not let a second one try."""
    [instance] = pool_of(1, limit=9).instances
    before = Booking(instance, Prompt((), 1), 0)
    for _ in range(3):
        instance.breaker.on_failure(object(), time.monotonic() - 2)
    assert instance.accepts_requests
    trial = Booking(instance, Prompt((), 1), 0)
    assert not instance.accepts_requests
    before.close()
    assert not instance.accepts_requests
    trial.close()
    assert instance.accepts_requests
    trial = Booking(instance, Prompt((), 1), 0)
    trial.on_tokens(0)
    assert not instance.accepts_requests
    trial.on_tokens(1)
    assert instance.accepts_requests
    instance.breaker.on_failure(trial, time.monotonic())
    assert not instance.accepts_requests


def pool_of(count: int, *, limit: int = 2, max_queued: int = 3, queue_s: float = 60) -> Pool:
    instances = [Instance(URL, None, limit, 1.0) for _ in range(count)]
    for instance in instances:
        instance.status = "ok"
    return Pool(instances, decodes=True, max_queued=max_queued, queue_s=queue_s)


@settings(deadline=None)
@given(st.lists(st.integers(-1, 9), max_size=40))
def test_loads_and_queue_are_bounded_and_places_go_in_order(steps):
    """A number ends the request of that place in the order of arrival, -1 sends one."""

    async def run() -> None:
        pool, tasks, arrived = pool_of(2), {}, []

        async def work(number: int, end: asyncio.Event) -> None:
            async with pool.book(Prompt((b"%d" % number,), 70)) as booking:
                arrived.append(number)
                booking.on_tokens(3)
                await end.wait()

        for number, step in enumerate(steps):
            if step < 0:
                is_full = pool.num_waiting == 3
                end = asyncio.Event()
                task = asyncio.create_task(work(number, end))
                await asyncio.sleep(0)
                if is_full:
                    with pytest.raises(ApiError, match="queue is full"):
                        await task
                else:
                    tasks[number] = task, end
            elif step < len(tasks):
                number = list(tasks)[step]
                task, end = tasks.pop(number)
                end.set() if number in arrived else task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert all(each.load.requests <= 2 for each in pool.instances) and pool.num_waiting <= 3
            assert arrived == sorted(arrived)
            assert not pool.num_waiting or not any(each.accepts_requests for each in pool.instances)
        for task, _ in tasks.values():
            task.cancel()
        await asyncio.gather(*(task for task, _ in tasks.values()), return_exceptions=True)
        assert all(each.load == InstanceLoad() for each in pool.instances) and not pool.num_waiting

    asyncio.run(run())


def test_nobody_overtakes_and_a_place_that_comes_too_late_is_given_back():
    async def run() -> None:
        pool, arrived = pool_of(1, limit=1), []

        async def work(name: str) -> None:
            async with pool.book(Prompt((), 1)):
                arrived.append(name)

        pool.instances[0].status = "gone"
        first = asyncio.create_task(work("first"))
        await asyncio.sleep(0)
        pool.instances[0].status = "ok"
        second = asyncio.create_task(work("second"))
        await asyncio.sleep(0)
        assert not arrived and pool.num_waiting == 2
        pool.dispatch()
        first.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        assert arrived == ["second"] and pool.instances[0].load == InstanceLoad()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_who_waits_too_long_is_refused():
    async def run() -> None:
        pool = pool_of(1, limit=1, queue_s=0.05)
        async with pool.book(Prompt((), 1)):
            with pytest.raises(ApiError) as refused:
                async with pool.book(Prompt((), 1)):
                    pass
        assert (refused.value.status, refused.value.body.code, refused.value.retry_after) == (503, "no_instance", 1)

    asyncio.run(run())


def test_requests_are_refused_soon_after_the_last_instance_has_gone(monkeypatch):
    """And not at once: it may start again, and an instance that runs registers with a router that has started again."""
    monkeypatch.setattr(members, "_ABSENT_S", 0.3)

    async def refusal(pool: Pool) -> str:
        with pytest.raises(ApiError) as refused:
            async with pool.book(Prompt((), 1)):
                pass
        assert (refused.value.status, refused.value.body.code) == (503, "no_instance")
        return str(refused.value)

    async def run() -> None:
        pool = pool_of(2, limit=1, queue_s=60)
        dispatching = asyncio.create_task(pool.keep_dispatching())
        async with pool.book(Prompt((), 1)), pool.book(Prompt((), 1)):
            pool.instances[0].status = "gone"
            waiting = asyncio.create_task(refusal(pool))
            await asyncio.sleep(0.6)
            assert pool.num_waiting == 1  # the other one is only busy
            pool.instances[1].status = "silent"
            assert await waiting == await refusal(pool) == "no instance is reachable"
            assert not pool.num_waiting
        pool.instances[0].status = "ok"
        async with pool.book(Prompt((), 1)):
            pass
        pool.instances.clear()
        assert await refusal(pool) == "no instance is reachable"
        dispatching.cancel()

    asyncio.run(asyncio.wait_for(run(), 20))


def test_an_instance_is_there_until_its_lease_ends_or_it_leaves(monkeypatch):
    monkeypatch.setattr(members, "LEASE_S", 0.2)

    async def run() -> None:
        pool, told = pool_of(1), []
        await pool.instances[0].close()
        fleet = Members({"both": pool}, lambda url: Instance(url, None, 2, 1.0), 0.01, told.append)
        fleet.register(Registration(f"{URL}23"))
        again = fleet.register(Registration(f"{URL}23"))
        assert again == {"lease_s": 0.2} and len(pool.instances) == 2
        pool.instances[1].status = "ok"
        with contextlib.closing(Booking(pool.instances[1], Prompt((), 1), 0)):
            while pool.instances[1].is_leased(time.monotonic()):
                await asyncio.sleep(0.01)
            assert not pool.instances[1].accepts_requests
            await asyncio.sleep(0.05)
            assert len(pool.instances) == 2  # what it has it may finish
        while len(pool.instances) > 1:
            await asyncio.sleep(0.01)
        fleet.register(Registration(f"{URL}23"))
        fleet.register(Registration(f"{URL}23", leaves=True))
        while len(pool.instances) > 1:
            await asyncio.sleep(0.01)
        assert told.count(f"{URL}23: left") == 2
        with pytest.raises(ApiError, match="no pool for prefill"):
            fleet.register(Registration(URL, role="prefill"))
        await fleet.close()

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize(
    "url", ["http://a..b:80", "http://" + "x" * 64, "http://a b", "http://ü/ü", "http://h:x", "ftp://h", ""]
)
def test_a_name_that_nobody_can_connect_to_is_refused(url):
    """Its watcher would end, and nobody would see it leave. An instance that is to register there does not start."""
    with pytest.raises(ApiError, match="url: ") as refused:
        read_registration(json.dumps({"url": url}).encode())
    assert refused.value.status == 400
    if url.startswith("http"):
        with pytest.raises(ValueError, match="register: "):
            make_registrar(SimpleNamespace(options=ServerOptions(register=(url,))), 8000)


def test_an_instance_that_comes_back_in_another_role_changes_its_pool_and_its_counts_go(monkeypatch):
    async def run() -> None:
        url, names = f"{URL}23", ("both", "prefill")
        counted = f'dsv3:router_sent_total{{instance="{url}"}}'.encode()
        options = RouterOptions(registration=True, health_interval=0.05)
        fleet = fleet_of(options, maker(options, None))
        found = members_of(fleet, maker(options, None), None, lambda text: None)
        pools = dict(zip(names, (fleet.answering, fleet.prefilling), strict=True))
        for role in (*names, "both"):
            while [each for each in names if pools[each].instances] != [role]:
                found.register(Registration(url, role))
                await asyncio.sleep(0.01)
            assert counted not in fleet.metrics.text()
            fleet.metrics.sent.labels(url).inc()
            assert counted in fleet.metrics.text()
        await found.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_all_that_a_router_counts_is_documented():
    options = RouterOptions(instances=(URL,))
    fleet = fleet_of(options, maker(options, None))
    fleet.metrics.sent.labels(URL).inc()
    exported = set(re.findall(rb"^# TYPE (\S+)", fleet.metrics.text(), re.MULTILINE))
    exported = {name.decode() for name in exported if not name.endswith(b"_created")}
    documented = re.findall(r"^\| `(dsv3:router_.*?)` \|", (ROOT / "docs/router.md").read_text(), re.MULTILINE)
    assert {name for each in documented for name in re.findall(r"dsv3:\w+", each)} == exported


def test_trials_end():
    trials = RetryAttempts(max_resumes=2, patience_s=5, since=0)
    trials.on_failure(InstanceFailed("x"), has_died=True, now=1)
    with pytest.raises(ApiError, match="2 instances have died"):
        trials.on_failure(InstanceFailed("x"), has_died=True, now=2)
    trials = RetryAttempts(max_resumes=2, patience_s=5, since=0)
    for now in (1, 2):
        trials.on_failure(InstanceFailed("x"), has_died=False, now=now)
    with pytest.raises(ApiError, match="not complete its response"):
        trials.on_failure(InstanceFailed("x"), has_died=False, now=3)
    fatal = ApiError(500, "the engine has died 3 times with this request", code=ENGINE_DIED)
    with pytest.raises(ApiError, match="3 times"):  # one instance knows enough: no other one is asked
        RetryAttempts(max_resumes=9, patience_s=5, since=0).on_failure(
            InstanceFailed("x", error=fatal), has_died=False, now=1
        )
    trials = RetryAttempts(max_resumes=0, patience_s=5, since=0)
    trials.on_failure(InstanceFailed("x", has_arrived=False), has_died=True, now=4)
    with pytest.raises(ApiError, match="no instance"):
        trials.on_busy(6)


@pytest.mark.parametrize(
    "given", [{}, {"instances": (URL,), "prefill": (URL,), "decode": (URL,)}, {"prefill": (URL,)}, {"decode": (URL,)},
              {"instances": (URL, URL)}, {"instances": ("x",)}, {"instances": (URL,), "max_resumes": -1},
              {"registration": True, "host": "0.0.0.0"}, {"instances": (URL,), "ssl_keyfile": "x"}],
)  # fmt: skip
def test_options_that_cannot_be(given):
    with pytest.raises(ValueError):
        RouterOptions(**given)


@pytest.mark.parametrize("given", [{"instances": (URL, f"{URL}/v1")}, {"prefill": (URL,), "decode": (URL,)}])
def test_an_instance_that_is_named_twice_is_refused(given):
    """Its gauges and labels would be there twice."""
    with pytest.raises(ValueError, match=re.escape(URL)):
        RouterOptions(**given)


def test_an_instance_named_at_the_start_registers_in_no_other_role():
    async def run() -> None:
        options = RouterOptions(prefill=(URL,), decode=(f"{URL}2",), registration=True)
        fleet = fleet_of(options, maker(options, None))
        found = members_of(fleet, maker(options, None), None, lambda text: None)
        found.start()
        found.register(Registration(URL, "prefill"))
        with pytest.raises(ApiError, match=f"role: {URL} "):
            found.register(Registration(URL, "decode"))
        assert [each.url for each in fleet.instances] == [f"{URL}2", URL]
        await found.close()

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize(
    ("number", "ends"), [(errno.ECONNREFUSED, False), (errno.EHOSTUNREACH, True), (errno.ENETUNREACH, True)]
)
def test_reads_from_a_host_without_a_route_end_and_those_of_a_closed_port_go_on(monkeypatch, number, ends):
    """Nothing ends an open connection to a host that is gone. A server that drains closes its port first."""

    async def fail(*_, **__):
        raise aiohttp.ClientConnectorError(SimpleNamespace(host="h", port=1, ssl=True), OSError(number, "x"))

    async def pieces():
        await asyncio.Event().wait()
        yield b""

    async def run() -> None:
        monkeypatch.setattr(aiohttp.ClientSession, "request", fail)
        instance = Instance(URL, None, 1, 1.0)
        reading = asyncio.create_task(instance.read(SimpleNamespace(pieces=pieces), 9))
        for count in range(1, 4):
            await instance.probe()
            await asyncio.wait({reading}, timeout=0.01)
            assert (instance.status, reading.done()) == ("gone", ends and count == 3)
        reading.cancel()
        [found] = await asyncio.gather(reading, return_exceptions=True)
        assert isinstance(found, InstanceFailed if ends else asyncio.CancelledError)
        await instance.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_large_response_is_no_failure_of_its_instance():
    """The next instance would send as much; three of them would keep all requests from each."""

    async def pieces():
        for _ in range(3):
            yield b"x" * 10

    async def run() -> None:
        instance = Instance(URL, None, 1, 1.0)
        assert await instance.read(SimpleNamespace(pieces=pieces), 30) == b"x" * 30
        with pytest.raises(ApiError, match="more than 29 bytes; send the request with stream") as error:
            await instance.read(SimpleNamespace(pieces=pieces), 29)
        assert error.value.status == 502
        await instance.close()

    asyncio.run(asyncio.wait_for(run(), 60))


DEEP = b"[" * 50_000
PUBLISHES = b'{"data": [{"version": "v", "kv_events": {"endpoint": "tcp://*:5557"}}]}'


def test_an_instance_that_was_silent_before_it_came_up_is_listened_to(monkeypatch):
    found: list = [TimeoutError()] * 3 + [(200, b"{}"), (200, PUBLISHES)]

    async def fetch(self, method, path, *_):
        if isinstance(answer := found.pop(0), Exception):
            raise answer
        return answer

    async def run() -> None:
        monkeypatch.setattr(Instance, "fetch", fetch)
        instance = Instance(URL, None, 1, 1.0)
        for _ in range(3):
            await instance.probe()
        assert instance.status == "silent"
        await instance.probe()
        assert (instance.status, instance.version) == ("ok", "v") and instance.listener is not None
        await instance.close()

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize("answers", [[(503, DEEP)], [(200, b"{}"), (200, b'{"x": %b' % DEEP)]])
def test_an_answer_that_is_nested_too_deeply_ends_no_probe(monkeypatch, answers):
    """Without its probes an instance would keep its last status for ever."""
    found = list(answers)

    async def fetch(self, method, path, *_):
        return found.pop(0)

    async def run() -> None:
        monkeypatch.setattr(Instance, "fetch", fetch)
        instance = Instance(URL, None, 1, 1.0)
        await instance.probe()
        assert instance.status == ("ok" if answers[0][0] == 200 else "unwell")
        await instance.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def status_of(key: str | None, path: str, body: bytes, admitted: bool = True, **headers: str) -> int:
    """The status of a POST to a router whose instances have this key, and whose clients have another one."""

    async def run() -> int:
        options, sent = RouterOptions(registration=True), []
        make = maker(options, None)
        fleet = fleet_of(options, make)
        members = members_of(fleet, make, key, lambda text: None)
        site = RouterSite(fleet, Tenants(load_tenants(ServerOptions(api_key="sk-client"))), members, None)

        async def send(message):
            sent.append(message)

        async def receive():
            return {"type": "http.request", "body": body, "more_body": False}

        fields = {"host": "localhost:8000", "content-type": "application/json"} | headers
        raw = [(name.encode(), value.encode()) for name, value in fields.items()]
        scope = {"type": "http", "method": "POST", "path": path, "headers": raw, "query_string": b""}
        await make_app(site, "127.0.0.1")(
            scope | {"extensions": {ADMIT: lambda: admitted, REQUEST_ID: "id"}}, receive, send
        )
        await site.close()
        await members.close()
        return sent[0]["status"]

    return asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize(("key", "status"), [(None, 421), ("a key of the instances", 401)])
def test_a_web_page_registers_no_instance_where_that_needs_no_key(key, status):
    """Also where clients need keys: a page's own name may resolve to this machine."""
    assert status_of(key, "/instances", b"{}", host="page.example:8000") == status


def test_leases_are_renewed_while_clients_have_all_connections():
    """Else all instances would leave a router that has too many clients."""
    key, body = "a key of the instances", json.dumps({"url": URL}).encode()
    assert status_of(key, "/instances", body, admitted=False, authorization=f"Bearer {key}") == 200
    assert status_of(key, "/v1/completions", b"{}", admitted=False, authorization="Bearer sk-client") == 503
