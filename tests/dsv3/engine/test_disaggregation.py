"""One engine computes a prompt, another goes on with its pages: the same text, whatever happens to the first."""

import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from dsv3.engine.engine import Engine
from dsv3.kv_cache.tiers import tiers
from dsv3.kv_cache.transfer import client
from dsv3.scheduler.request import InvalidRequest, prepare
from tests.dsv3.engine import toy
from tests.dsv3.engine.driving import Gathered, drain, number, request, run, take

PROMPT = [i % 60 + 1 for i in range(200)]
FULL = 192
MakeEngine = Callable[..., Engine]


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "FETCH_S", 300.0)
    monkeypatch.setattr(tiers, "loading_pays", lambda *_: True)


@pytest.fixture
def options(tmp_path: Path) -> dict[str, object]:
    key = tmp_path / "transfer.key"
    key.write_text("k" * 40)
    key.chmod(0o600)
    return {"kv_offloading_size": 1e-3, "identity": '{"weights": "w"}', "transfer_key_file": str(key)}


@pytest.fixture
def prefill(make_engine: MakeEngine, options: dict[str, object]) -> Engine:
    return make_engine(**options, role="prefill", transfer_address=free_address())


@pytest.fixture
def decode(make_engine: MakeEngine, options: dict[str, object]) -> Engine:
    return make_engine(**options, role="decode")


def handed_over(prefill: Engine, name: str, prompt: list[int] = PROMPT, salt: str = "", **sampling):
    """Has a prompt computed; returns the request for the other engine."""
    item = request(name, prompt, salt=salt, **sampling)
    first = request(
        f"{name} first", prompt, salt=salt, **(sampling | {"max_tokens": 1, "min_tokens": 0, "ignore_eos": True})
    )
    assert len(run(prefill, first)[f"{name} first"].tokens) == 1
    return _from(prefill, item)


def _from(prefill: Engine, item):
    return msgspec.structs.replace(item, pages_from=prefill.cfg.transfer_address)


def check(gathered: Gathered, item) -> None:
    assert gathered.tokens == toy.expected_tokens(item.prompt_token_ids, item.sampling.max_tokens, (toy.EOS,))


def peer(engine: Engine):
    return engine.stats().jobs["pages"].tiers["peer"]


def test_the_text_is_that_of_one_engine(prefill: Engine, decode: Engine, engine: Engine):
    item = handed_over(prefill, "a", max_tokens=20)
    gathered = run(decode, item)["a"]
    check(gathered, item)
    assert gathered.outputs[0].num_cached_tokens == FULL
    assert decode.stats().prompt_tokens == len(PROMPT) - FULL
    assert (peer(decode).hits, peer(decode).queries) == (FULL, FULL)
    sampled = {"temperature": 1.5, "seed": 7, "max_tokens": 30, "presence_penalty": 0.5, "logprobs": 2, "min_tokens": 9}
    item = handed_over(prefill, "sampled", PROMPT[::-1], **sampled)
    there, here = run(decode, item)["sampled"], run(engine, request("sampled", PROMPT[::-1], **sampled))["sampled"]
    assert there.tokens == here.tokens
    assert [o.logprobs for o in there.outputs] == [o.logprobs for o in here.outputs]
    assert prefill.stats().recompilations == decode.stats().recompilations == 0


def test_only_what_it_lacks_travels(prefill: Engine, decode: Engine):
    run(decode, request("known", PROMPT[:70], max_tokens=2))
    item = handed_over(prefill, "b", max_tokens=4)
    check(run(decode, item)["b"], item)
    assert peer(decode).hits == FULL - 64
    again = _from(prefill, request("again", PROMPT, max_tokens=4))
    check(run(decode, again)["again"], again)
    assert peer(decode).hits == FULL - 64, "and nothing the second time"


def test_pages_of_another_tenant_do_not_answer(prefill: Engine, decode: Engine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiers, "PATIENCE_S", 0.05)
    handed_over(prefill, "theirs", salt="one", max_tokens=2)
    item = _from(prefill, request("mine", PROMPT, salt="two", max_tokens=4))
    check(run(decode, item)["mine"], item)
    assert peer(decode).hits == 0


def test_a_prefill_instance_gives_one_token(prefill: Engine):
    with pytest.raises(InvalidRequest, match="only computes prompts"):
        prefill.add(request("long", PROMPT, max_tokens=2))
    assert "decode" not in prefill.planners


def test_a_prompt_may_be_asked_for_before_it_is_computed(prefill: Engine, decode: Engine, monkeypatch):
    """A router may hand a request to both at once: pages travel while later ones are computed."""
    monkeypatch.setattr(tiers, "PATIENCE_S", 60.0)
    item = _from(prefill, request("early", PROMPT, max_tokens=5))
    decode.add(item)
    other = request("other", [3, 4, 5], max_tokens=30, ignore_eos=True)
    decode.add(other)
    gathered: dict[str, Gathered] = {}
    for _ in range(10):
        take(decode.step(), gathered)
    assert "early" not in gathered and gathered["other"].tokens, "the other one does not wait"
    run(prefill, request("first", PROMPT, max_tokens=1))
    drain(decode, gathered, limit=10**6)
    check(gathered["early"], item)
    assert peer(decode).hits == FULL


@pytest.mark.parametrize("death", ["before", "key", "model"])
def test_an_instance_that_gives_nothing_costs_no_answer(
    make_engine: MakeEngine, options, prefill: Engine, decode: Engine, tmp_path: Path, death: str
):
    if death == "before":
        prefill.planners["pages"].server.close()
    elif death == "key":
        other = tmp_path / "other.key"
        other.write_text("o" * 40)
        other.chmod(0o600)
        decode = make_engine(**(options | {"transfer_key_file": str(other)}))
    else:
        decode = make_engine(**(options | {"identity": '{"weights": "v"}'}))
    item = handed_over(prefill, "a", max_tokens=6)
    check(run(decode, item)["a"], item)
    assert (peer(decode).hits, peer(decode).failures) == (0, 1)
    item = _from(prefill, request("b", PROMPT[::-1], max_tokens=6))
    check(run(decode, item)["b"], item)


def test_a_death_in_the_middle_keeps_what_came(prefill: Engine, decode: Engine, monkeypatch: pytest.MonkeyPatch):
    item = handed_over(prefill, "a", max_tokens=6)
    read_into, calls = client.protocol.read_into, []

    def dying(connection, view) -> None:
        calls.append(len(view))
        if calls.count(512) == 2:  # the second page
            raise OSError("Connection reset by peer")
        read_into(connection, view)

    monkeypatch.setattr(client.protocol, "read_into", dying)
    gathered = run(decode, item)["a"]
    check(gathered, item)
    assert gathered.outputs[0].num_cached_tokens == 64


def check_abort(decode: Engine) -> None:
    """Aborts the request `gone` while its pages are asked for: slot and pages are free."""
    decode.step()
    decode.abort(number("gone"))
    assert drain(decode, limit=10**6)["gone"].finish_reason == "abort"
    deadline = time.monotonic() + 30
    while decode.scheduler.admission.asking and time.monotonic() < deadline:
        decode.step()
    assert not decode.scheduler.admission.asking and decode.stats().pages_in_use == 0


def test_an_abort_while_pages_travel(prefill: Engine, decode: Engine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiers, "PATIENCE_S", 0.2)
    decode.add(_from(prefill, request("gone", PROMPT, max_tokens=5)))
    check_abort(decode)


def meet(prefill: Engine, name: str, bootstrap_room: int, there: int | None = None, **sampling):
    """Returns a request as a router hands it to both: for the prefill engine, and for one that asks it for `there`."""
    number_there = bootstrap_room if there is None else there
    item = request(name, PROMPT, **sampling)
    first = request(f"{name} first", PROMPT, max_tokens=1, ignore_eos=True)
    address = f"{prefill.cfg.transfer_address}#{number_there}"
    return (
        prepare(msgspec.structs.replace(first, bootstrap_room=bootstrap_room), prefill.rules),
        msgspec.structs.replace(item, pages_from=address),
    )


def test_a_request_handed_to_both_meets_though_it_waits_in_the_queue(prefill: Engine, decode: Engine):
    """The decode engine is first, and asks for pages only once the prompt is begun."""
    first, item = meet(prefill, "a", 2**63 - 1, max_tokens=6)
    decode.add(item)
    gathered: dict[str, Gathered] = {}
    take(decode.step(), gathered)
    prefill.submit(first)
    prefill._ingest()  # it is in the queue, and no step is made
    stages = prefill.planners["pages"].server.bootstrap_rooms.stages
    assert stages([2**63 - 1]) == ["queued"] and not gathered
    drain(prefill)
    drain(decode, gathered, limit=10**6)
    check(gathered["a"], item)
    assert gathered["a"].outputs[0].num_cached_tokens == peer(decode).hits == FULL
    assert stages([2**63 - 1]) == ["begun"]
    assert prefill.stats().pages_in_use == decode.stats().pages_in_use == 0


@pytest.mark.parametrize("what", ["another number", "never handed in", "given up", "it dies"])
def test_a_meeting_that_does_not_come_about_costs_no_answer(
    prefill: Engine, decode: Engine, monkeypatch: pytest.MonkeyPatch, what: str
):
    monkeypatch.setattr(client, "COMES_S", 0.05 if what in ("another number", "never handed in") else 300.0)
    monkeypatch.setattr(client, "BEGINS_S", 300.0)
    first, item = meet(prefill, "a", 5, 6 if what == "another number" else 5, max_tokens=6)
    if what != "never handed in":
        prefill.submit(first)
    if what == "another number":
        drain(prefill)
    elif what == "given up":
        prefill._ingest()
        prefill.abort(first.request_id)
        drain(prefill)
    elif what == "it dies":
        prefill.planners["pages"].server.close()
    check(run(decode, item)["a"], item)
    assert (peer(decode).hits, peer(decode).failures) == (0, 1)
    drain(prefill)
    assert prefill.stats().pages_in_use == decode.stats().pages_in_use == 0


def test_an_abort_while_a_meeting_is_waited_for(prefill: Engine, decode: Engine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(client, "COMES_S", 0.2)
    _, item = meet(prefill, "gone", 9, max_tokens=5)
    decode.add(item)
    check_abort(decode)
