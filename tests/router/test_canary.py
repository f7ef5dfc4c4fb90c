"""Two versions behind one router: who gets which, and an upgrade under load."""

import asyncio
import concurrent.futures
import contextlib
import json
import math
import signal
from types import SimpleNamespace

import pytest

from dsv3.config.server_options import ServerOptions
from router.canary import Canary, choose_version
from router.instance import Instance
from router.members import Pool
from router.options import RouterOptions
from router.relay import Fleet, Relay, RouterMetrics
from router.request import parse_request
from tests.dsv3.server import serving
from tests.dsv3.server.test_resume import CHAT, COMPLETIONS, collect
from tests.router.conftest import routing, wait_until
from tests.router.test_router import stream

URL = "http://127.0.0.1:1"
USER = {"role": "user", "content": 'a "first" question: [{'}
SYSTEM = {"role": "system", "content": "Be brief. " * 100}


def conversation(path: str, body: dict, salt: str = "") -> bytes:
    return parse_request(path, json.dumps(body).encode(), salt).conversation


def test_a_share_is_exact_within_sampling_error_and_only_grows():
    found = [conversation(COMPLETIONS, {"prompt": f"prompt {i}"}) for i in range(5000)]
    before: set[bytes] = set()
    for share in (0.0, 0.05, 0.3, 1.0):
        taken = {each for each in found if choose_version(Canary("v2", share), {"v1": 3, "v2": 1}, each) == "v2"}
        assert abs(len(taken) - 5000 * share) <= 4 * math.sqrt(5000 * share * (1 - share))
        assert before <= taken
        before = taken


def test_a_version_without_instances_gives_its_conversations_to_the_others():
    keys = [conversation(COMPLETIONS, {"prompt": f"prompt {i}"}) for i in range(300)]
    canary = Canary("v2", 0.5)
    assert {choose_version(canary, {"v1": 2}, key) for key in keys} == {"v1"}
    assert {choose_version(canary, {"v2": 2}, key) for key in keys} == {"v2"}
    assert {choose_version(canary, {}, key) for key in keys} == {None}
    of = {key: choose_version(canary, {"v0": 1, "v1": 3, "v2": 1}, key) for key in keys}
    stable = [key for key in keys if of[key] != "v2"]
    assert [key for key in stable if canary.takes(key)] == []
    assert 0.6 < sum(of[key] == "v1" for key in stable) / len(stable) < 0.9  # by the number of instances


@pytest.mark.parametrize(
    ("path", "first", "later"),
    [
        (CHAT, {"messages": [SYSTEM, USER]}, {"messages": [SYSTEM, USER, {"role": "assistant", "content": "}"}, USER]}),
        ("/v1/messages", {"system": "s", "messages": [USER]}, {"system": "s", "messages": [USER, SYSTEM, USER]}),
        ("/v1/responses", {"input": [USER]}, {"input": [USER, SYSTEM, USER], "temperature": 0}),
        (COMPLETIONS, {"prompt": "x", "user": "u"}, {"prompt": "x and more", "user": "u"}),
        (CHAT, {"messages": [USER], "prompt_cache_key": "k"}, {"messages": [SYSTEM], "prompt_cache_key": "k"}),
    ],
)
def test_the_turns_of_a_conversation_stay_together_and_others_apart(path, first, later):
    mine = conversation(path, first)
    assert conversation(path, later) == mine
    assert conversation(path, first, "another tenant") != mine
    other = json.loads(json.dumps(first).replace("first", "other").replace('"u"', '"w"').replace('"k"', '"l"'))
    assert conversation(path, other) != mine


class Recorder(Instance):
    """An instance that answers at once, and keeps what it is sent."""

    def __init__(self, name: str, version: str):
        super().__init__(URL, None, 4, 1.0)
        self.name, self.version, self.status, self.bodies = name, version, "ok", []

    @contextlib.asynccontextmanager
    async def post_stream(self, path, body, headers):
        self.bodies.append(json.loads(b"".join(body)))
        yield SimpleNamespace(status=200, headers={})

    async def chunks(self, response):
        yield json.dumps({"kv_transfer_params": {"from": self.name}}).encode()


def test_prefill_and_decode_instances_of_two_versions_never_mix():
    async def run(up: list[Recorder]) -> list[list[str | None]]:
        """Returns where the pages of the requests that each decode instance got came from."""
        for instance in (prefill, decode):
            for each in instance:
                each.status, each.bodies = "ok" if each in up else "gone", []
        pools = [Pool(each, decodes=each is decode, max_queued=9, queue_s=9) for each in (decode, prefill)]
        fleet = Fleet(*pools, RouterMetrics(tuple(pools)), options, Canary("v2", 0.5))
        for i in range(40):
            body = json.dumps({"prompt": f"{i} " * 200}).encode()
            await Relay(fleet, parse_request(COMPLETIONS, body), {}).run(None)
        return [[(body.get("kv_transfer_params") or {}).get("from") for body in each.bodies] for each in decode]

    options = RouterOptions(prefill=(URL,), decode=(f"{URL}2",))
    prefill, decode = ([Recorder(f"{what}{i}", f"v{i}") for i in (1, 2)] for what in "pd")
    everything = [*prefill, *decode]
    one, two = asyncio.run(run(everything))
    assert set(one) == {"p1"} and set(two) == {"p2"} and len(one) + len(two) == 40
    without_p2 = asyncio.run(run([each for each in everything if each.name != "p2"]))
    assert [set(each) for each in without_p2] == [{"p1"}, {None}] and list(map(len, without_p2)) == [len(one), len(two)]
    without_d2 = asyncio.run(run([each for each in everything if each.name != "d2"]))
    assert [set(each) for each in without_d2] == [{"p1"}, set()] and len(without_d2[0]) == 40


def test_a_share_and_a_version_that_cannot_be_are_refused():
    for text in (
        "5%",
        "=5%",
        "v2=5",
        "v2=101%",
        "v2=-1%",
        "v2",
        "v2=5%\n",
        "v2=\u0665%",
        "v 2=5%",
        "v2=v3=5%",
        "v2=1e1%",
    ):
        with pytest.raises(ValueError, match="canary: "):
            RouterOptions(instances=(URL,), canary=text)
    for version in ("a b", "", "v" * 65, "v\u00e9", 'v"', "v\n"):
        with pytest.raises(ValueError, match="served_version: "):
            ServerOptions(served_version=version)


def by_version(router, count: int) -> dict[str, float]:
    """How many of `count` requests each version has answered; the last is counted just after its answer."""

    def found() -> dict[str, float]:
        lines = [line for line in router.http.get("/metrics").text.splitlines() if "version_requests_total{" in line]
        return {line.split('version="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}

    wait_until(lambda: sum(found().values()) == count)
    return found()


def test_instances_are_upgraded_under_32_streams_and_no_text_is_lost(dialect_dir):
    bodies = [{"prompt": f"{i} def add(x, y)", "max_tokens": 80, "ignore_eos": True} for i in range(32)]
    chats = [{"messages": [{"role": "user", "content": f"question {i}"}], "max_tokens": 2} for i in range(16)]

    def turn(number: int) -> None:
        """Each conversation's next turn."""
        for body in chats:
            more = [{"role": "assistant", "content": "yes"}, body["messages"][0]] * number
            answer = router.http.post(CHAT, json=body | {"messages": body["messages"] + more})
            assert answer.status_code == 200, answer.text

    with contextlib.ExitStack() as stack:
        router = stack.enter_context(routing("--registration", "--canary=v2=50%", ready=False))

        def start(version: str) -> serving.Server:
            options = {"register": [router.url], "served_version": version, "shutdown_timeout": 0.2}
            made = serving.running(dialect_dir, options=options, factory_options={"step_s": 0.02})
            return stack.enter_context(made)

        old = [start("v1"), start("v1")]
        wait_until(lambda: router.metric("dsv3:router_instance_up") == 2)
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(32))
        streams = [pool.submit(stream, router.http, COMPLETIONS, body) for body in bodies]
        wait_until(lambda: old[0].metric("vllm:num_requests_running") >= 4)
        old[0].process.send_signal(signal.SIGTERM)
        new = start("v2")
        wait_until(lambda: router.metric("dsv3:router_instance_up") == 2)
        found = [collect(each.result(), 1) for each in streams]
        alone = [pool.submit(stream, new.http, COMPLETIONS, body) for body in bodies]
        assert [each.text for each in found] == [collect(each.result(), 1).text for each in alone]
        assert all(each.ends[0] for each in found)
        assert router.metric("dsv3:router_resumed_total") >= 4

        turn(0)
        split = by_version(router, 48)
        turn(2)
        after = by_version(router, 64)
        first = {"v1": split["v1"] - 32, "v2": split["v2"]}
        assert min(first.values()) > 0 and sum(first.values()) == 16
        assert {name: after[name] - split[name] for name in after} == first
        for share in ("101%", "x" * 100_000):
            refused = router.http.post("/canary", json={"share": share})
            assert refused.status_code == 400 and len(refused.content) < 400
        assert router.http.post("/canary", json={"share": "0%"}).json() == {"version": "v2", "share": 0.0}
        turn(1)
        assert by_version(router, 80) == {"v1": after["v1"] + 16, "v2": after["v2"]}
        old[1].process.send_signal(signal.SIGTERM)
        turn(1)
        wait_until(lambda: router.http.get("/health").json()["instances"] == ["ok"])
        turn(1)
        assert by_version(router, 112)["v2"] >= after["v2"] + 16
