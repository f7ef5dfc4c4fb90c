"""A request over instances that refuse it, break off at any byte, fall silent or die: it ends, and is told once."""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Literal

from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsv3.server.protocol.errors import ApiError
from router.instance import Broken, Instance
from router.members import Pool
from router.options import RouterOptions
from router.policy import InstanceLoad
from router.relay import Fleet, Numbers, Relay
from tests.router.test_gather import ANSWERS, asked, spelled, tell

URLS = tuple(f"http://127.0.0.1:{port}" for port in range(1, 13))
OPTIONS = RouterOptions(instances=URLS, max_resumes=3)
REFUSAL = b'{"error": {"message": "busy", "type": "server_error", "code": "queue_full"}}'


@dataclasses.dataclass(frozen=True)
class Turn:
    """What becomes of the request at one instance: it is refused, not taken, or ends behind so many bytes."""

    kind: Literal["refuses", "is not there", "ends"]
    num_bytes: int = 0
    dies: bool = False
    size: int = 1  # tokens per update


class Script:
    """The turns of all instances, in the order in which these are asked; the last one goes on for ever."""

    def __init__(self, turns: Sequence[Turn], answers: list[list[int]], piece: int):
        self.turns, self.answers, self.piece = [*turns, Turn("ends", 10**9)], answers, piece
        self.resumes = self.deaths = 0

    def body(self, turn: Turn, sent: bytes) -> bytes:
        """What an instance tells that is sent a request; notes what the router must make of it."""
        had = json.loads(sent).get("resume", {"output_token_ids": [[] for _ in self.answers]})["output_token_ids"]
        whole = b"".join(b"data: %b\n\n" % data for data in tell(self.answers, had, turn.size, True))
        if turn.num_bytes < len(whole):
            self.resumes, self.deaths = self.resumes + 1, self.deaths + turn.dies
        return whole[: turn.num_bytes]


class Scripted(Instance):
    """An instance that does what the script says."""

    def __init__(self, url: str, script: Script):
        super().__init__(url, None, 4, 1.0)
        self.script, self.status, self.next_status = script, "ok", "ok"

    @contextlib.asynccontextmanager
    async def ask(self, path, body, headers):
        turn = self.script.turns.pop(0)
        if turn.kind == "is not there":
            raise Broken("connect", has_arrived=False)
        if turn.kind == "refuses":
            yield SimpleNamespace(status=503, headers={}, body=REFUSAL, is_whole=True)
            return
        self.next_status = "gone" if turn.dies else "ok"
        told = self.script.body(turn, b"".join(body))
        yield SimpleNamespace(status=200, headers={}, body=told, is_whole=turn.num_bytes > len(told))

    async def pieces(self, response):
        for start in range(0, len(response.body), self.script.piece):
            await asyncio.sleep(0)
            yield response.body[start : start + self.script.piece]
        if not response.is_whole:
            raise Broken("it has ended")

    async def probe(self):
        self.status = self.next_status


TURNS = st.builds(
    Turn,
    st.sampled_from(["refuses", "is not there", "ends", "ends", "ends"]),
    st.integers(0, 2500),
    st.sampled_from([False, False, True]),
    st.integers(1, 3),
)


@settings(deadline=None)
@given(ANSWERS, st.lists(TURNS, max_size=6), st.integers(1, 200))
@example([[1, 2, 3, 1]], [Turn("ends", 200), Turn("ends", 300, True), Turn("refuses"), Turn("ends", 100)], 7)
@example([[1, 2, 3, 1]], [Turn("ends", 200, True), Turn("ends", 200, True)], 7)
def test_a_request_ends_and_is_told_once_whatever_becomes_of_its_instances(answers, turns, piece):
    script = Script(turns, answers, piece)
    lines: list[bytes] = []

    async def note(data: bytes) -> None:
        lines.append(data)

    async def run() -> tuple[ApiError | None, list[Instance]]:
        instances = [Scripted(url, script) for url in URLS]
        pool = Pool(instances, decodes=True, max_queued=1, queue_s=60)
        relay = Relay(Fleet(pool, None, Numbers((pool,)), OPTIONS), asked(n=len(answers)), {})
        try:
            async with asyncio.timeout(60):
                assert await relay.run(note) is None
        except ApiError as error:
            return error, instances
        return None, instances

    error, instances = asyncio.run(run())
    assert all(dataclasses.replace(each.load, ranks=1) == InstanceLoad() for each in instances)
    *events, last = b"".join(lines).split(b"\n\n")[:-1] or [b""]
    assert (error is None) == (last == b"data: [DONE]")
    assert (error is None) == (script.resumes <= OPTIONS.max_resumes and script.deaths < 2)
    told = [json.loads(line.removeprefix(b"data: ")) for line in (events if error is None else [*events, last]) if line]
    for i, answer in enumerate(answers):
        text = f"echo{i}" + "".join(piece for token in answer for piece in spelled(token))
        mine = "".join(each["text"] for event in told for each in event["choices"] if each["index"] == i)
        assert mine == text if error is None else text.startswith(mine)
