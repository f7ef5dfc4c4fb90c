"""Watchdogs of the engine process: suspended API servers, and engines that hang while busy, idle or restarting."""

import asyncio
import contextlib
import signal
import socket
import stat
import tempfile
import threading
import time
from pathlib import Path

import pytest
import uvloop

from dsv3.config.options import EngineOptions
from dsv3.processes import frames
from dsv3.processes.child import RestartPolicy
from dsv3.sampling_params import SamplingParams
from dsv3.scheduler.request import EngineRequest, StepOutputs, prepare
from dsv3.server.engine import client as client_module
from dsv3.server.engine import messages, process
from dsv3.server.engine import supervisor as supervisor_module
from dsv3.server.engine.client import EngineClient
from tests.dsv3.server import serving
from tests.dsv3.server.test_engine_api_servers import INFO, Ends
from tests.dsv3.server.test_lifecycle import ENDLESS, Requests

IDLE, WORKING = ({"running": number, "waiting": 0.0} for number in (0.0, 1.0))


def step_frame(stats: messages.Stats) -> bytearray:
    """The frame of a step without tokens."""
    return frames.encode(messages.Outputs.from_outputs(StepOutputs(), stats))


async def connected(engine: EngineClient, stats: messages.Stats) -> socket.socket:
    """Connects a client to a ready engine; returns the engine's end."""
    ours, theirs = socket.socketpair()
    await engine.connect(ours)
    theirs.sendall(frames.encode(INFO) + step_frame(stats))
    while not engine.stats:
        await asyncio.sleep(0.01)
    return theirs


def test_a_suspended_api_server_does_not_report_the_engine_as_silent(model_dir) -> None:
    """Its clock runs on while the engine's frames wait to be read."""
    with serving.running(model_dir, watchdog_s=3.0, factory_options={"step_s": 0.01}) as server:
        requests = Requests(server)
        requests.send(ENDLESS | {"max_tokens": 800})
        server.wait_for(lambda: server.metric("vllm:num_requests_running") == 1)
        server.process.send_signal(signal.SIGSTOP)
        time.sleep(6.0)
        server.process.send_signal(signal.SIGCONT)
        [answer] = requests.wait()
        assert answer.status_code == 200, answer.text


def test_any_exception_in_a_restart_fails_the_waiting_requests(monkeypatch) -> None:
    """Nothing else would: there is no process, no deadline and no frame."""

    class Process:
        pid, starts, address = 7, 0, "/nowhere/engine"

        def __init__(self, address: str, imports: tuple[str, ...], environment: object) -> None:
            Process.starts += 1
            if Process.starts > 1:
                raise RuntimeError("can't start new thread")

        def kill(self) -> None:
            """Does nothing."""

        def end(self) -> int:
            return -9

    async def run() -> str:
        engine = EngineClient(max_num_queued_reqs=4)
        supervisor = supervisor_module.EngineSupervisor(
            engine, messages.Start("", "", EngineOptions()), RestartPolicy()
        )
        engine.info, engine.state = INFO, "ready"
        supervisor.engine_lost(0, "it has died")
        assert engine.state == "restarting"
        await asyncio.wait_for(engine.ended.wait(), 60)
        return engine.reason

    monkeypatch.setattr(supervisor_module, "EngineProcess", Process)
    assert asyncio.run(run()) == "the engine could not be restarted (RuntimeError)"


@pytest.mark.parametrize("depth", [0, 20])
def test_the_socket_of_the_engine_is_private_for_any_tmpdir(monkeypatch, tmp_path, depth) -> None:
    """A Unix socket has a path of at most 103 bytes, and TMPDIR may be longer."""
    temporary = tmp_path.joinpath(*["temporary"] * depth)
    temporary.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    addresses: list[str] = []
    monkeypatch.setattr(supervisor_module, "EngineProcess", lambda address, *_: addresses.append(address))

    async def run() -> None:
        supervisor_module.EngineSupervisor(
            EngineClient(max_num_queued_reqs=4), messages.Start("", "", EngineOptions()), None
        )
        directory = Path(addresses[0]).parent
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700 and len(addresses[0]) <= 103

    asyncio.run(run())


def test_what_an_engine_has_sent_before_it_was_given_up_is_ignored() -> None:
    async def give_up() -> EngineClient:
        engine = EngineClient(max_num_queued_reqs=0)
        theirs = await connected(engine, {"running": 1.0})
        theirs.sendall(step_frame({"running": 2.0}))
        theirs.close()
        engine.flush()  # cannot be written, which the next callback reports
        engine.suspend("the engine is silent")
        for _ in range(5):
            await asyncio.sleep(0)
        return engine

    engine = uvloop.run(give_up())
    assert (engine.state, engine.stats) == ("restarting", {})


async def beat(ends: list[socket.socket]) -> None:
    while True:
        for end in ends:
            with contextlib.suppress(OSError):
                end.sendall(frames.encode(messages.EngineHeartbeat()))
        await asyncio.sleep(0.2)


class Waiting:
    """A stream that accepts only errors."""

    is_queued = False

    def __init__(self) -> None:
        self.pending: list = []
        self.errors: list[str] = []

    def on_outputs(self) -> None:
        raise AssertionError("an output came")

    def fail(self, error: Exception) -> None:
        self.errors.append(str(error))


def test_the_watchdogs_of_idle_busy_and_stopped_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of an idle engine is shorter than that of a busy one; a stopped process sends no heartbeat."""
    monkeypatch.setattr(client_module, "_IDLE_WATCHDOG_S", 0.1)

    async def run() -> None:
        idle, working, stopped = (EngineClient(max_num_queued_reqs=0, heartbeat_watchdog_s=1.5) for _ in range(3))
        beating = [await connected(working, WORKING), await connected(idle, IDLE)]
        ends = [*beating, await connected(stopped, WORKING)]
        pulses = asyncio.create_task(beat(beating))
        silences: list[str] = []
        idle.on_failure = silences.append
        request = EngineRequest(request_id=1, prompt_token_ids=[5], sampling=SamplingParams())
        idle.submit(
            [prepare(request, INFO.rules)], [waiting := Waiting()]
        )  # the first, to an engine that hangs already
        await asyncio.wait_for(asyncio.gather(idle.ended.wait(), stopped.ended.wait()), 60)
        assert (idle.state, working.state) == ("failed", "ready")
        pulses.cancel()
        assert silences == [idle.reason] == waiting.errors and "has not answered" in idle.reason
        working._end()
        for end in ends:
            end.close()

    uvloop.run(run())


@pytest.mark.parametrize("speaks", [True, False])
def test_the_watchdog_notices_an_engine_that_stops_during_a_restart(monkeypatch: pytest.MonkeyPatch, speaks) -> None:
    """After its first frame, and before it; heartbeats come while it loads and compiles."""
    monkeypatch.setattr(client_module, "FIRST_FRAME_S", 1e9 if speaks else 0.1)

    async def run() -> None:
        engine = EngineClient(max_num_queued_reqs=0, watchdog_s=0.5 if speaks else 1e9)
        silences: list[str] = []
        engine.on_loss = engine.on_silence = silences.append
        first = await connected(engine, IDLE)
        engine.suspend("it has died")
        ours, theirs = socket.socketpair()
        await engine.connect(ours)
        if speaks:
            for _ in range(12):  # longer than the bound
                theirs.sendall(frames.encode(messages.EngineHeartbeat()))
                await asyncio.sleep(0.1)
            assert not silences
        async with asyncio.timeout(60):
            while not silences:
                await asyncio.sleep(0.01)
        assert engine.state == "restarting" and "has not answered" in silences[0]
        engine._end()
        first.close()
        theirs.close()

    uvloop.run(run())


class Engine:
    """An engine whose only step ends on `go_on`."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self.has_work = False
        self.go_on = threading.Event()

    def submit(self, request: object) -> None:
        self.has_work = True

    def abort(self, request_id: int) -> None:
        self.submit(None)

    def step(self) -> StepOutputs:
        self.go_on.wait(60)
        self.failure = ValueError("the end")
        return StepOutputs()

    def stats(self) -> dict[str, float]:
        return {"running": 0.0, "waiting": float(self.has_work)}


def test_an_idle_engine_sends_frames_and_one_before_its_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stepping thread sends them, so they stop when it hangs."""
    monkeypatch.setattr(process, "_HEARTBEAT_S", 0.05)
    ends, engine = Ends(1), Engine()

    def run() -> None:
        with contextlib.suppress(process.StepFailed):
            process.serve(engine, ends.api_servers)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert [ends.receive(0).stats for _ in range(4)] == [{"running": 0.0, "waiting": 0.0}] * 4
    ends.send(0, messages.Abort([1]))
    while ends.receive(0).stats is not None:
        pass
    engine.go_on.set()
    thread.join(60)
    assert not thread.is_alive()


def test_an_engine_that_hangs_while_idle_fails_health_without_a_request(model_dir) -> None:
    options = {"max_request_restarts": 0}
    with serving.running(model_dir, watchdog_s=2.0, failure_linger_s=2.0, options=options) as server:
        server.engine_process().send_signal(signal.SIGSTOP)
        server.wait_for(lambda: server.http.get("/health").status_code == 503)
        assert "has not answered" in server.http.get("/health").json()["reason"]
