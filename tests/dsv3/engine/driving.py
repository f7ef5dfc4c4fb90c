"""Helpers that feed an engine and collect its outputs; tests name their requests, the engine numbers them."""

import dataclasses
import itertools
from collections.abc import Iterable
from concurrent.futures import Future

from dsv3.engine.engine import Engine
from dsv3.engine.operations import UpdateWeights
from dsv3.sampling_params import SamplingParams
from dsv3.scheduler.request import EngineOutput, EngineRequest, fan_out, prepare
from dsv3.scheduler.timing import RequestTiming
from tests.dsv3.engine import toy

_SPACING = 1000  # ids after a name's number are those of a fan-out
_numbers: dict[str, int] = {}
_counter = itertools.count()


def number(name: str) -> int:
    """The request id of a name."""
    return _SPACING * _numbers.setdefault(name, next(_counter))


def name_of(request_id: int) -> str:
    """The name of a request id; those of a fan-out are `name+1` and on."""
    first, more = divmod(request_id, _SPACING)
    name = next(name for name, value in _numbers.items() if value == first)
    return f"{name}+{more}" if more else name


@dataclasses.dataclass
class Gathered:
    """All outputs of a request."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    outputs: list[EngineOutput] = dataclasses.field(default_factory=list)

    @property
    def last(self) -> EngineOutput:
        return self.outputs[-1]

    @property
    def finish_reason(self) -> str | None:
        return self.last.finish_reason


def request(name: str, prompt: list[int], *, salt: str = "", **sampling) -> EngineRequest:
    """A request, greedy by default."""
    params = SamplingParams(**({"temperature": 0.0} | sampling))
    return EngineRequest(request_id=number(name), prompt_token_ids=prompt, sampling=params, cache_salt=salt)


def drain(engine: Engine, into: dict[str, Gathered] | None = None, limit: int = 5000) -> dict[str, Gathered]:
    """Steps until nothing is left to do."""
    gathered = {} if into is None else into
    for _ in range(limit):
        if not engine.has_work:
            return gathered
        take(engine.step(), gathered)
    raise AssertionError(f"the engine still has work after {limit} steps: {engine.stats()}")


def take(outputs: Iterable[EngineOutput], into: dict[str, Gathered]) -> None:
    """Records the outputs of one step; nothing may follow a request's last output."""
    for output in outputs:
        entry = into.setdefault(name_of(output.request_id), Gathered())
        assert not entry.outputs or entry.finish_reason is None, f"{output} came after the end"
        entry.outputs.append(output)
        entry.tokens += output.token_ids


def begin_update(engine: Engine, update: UpdateWeights, into: dict[str, Gathered]) -> Future[None]:
    """Queues an update and waits until it is planned: the next step settles the requests."""
    done = engine.operate(update)
    take(engine.step(), into)
    if (planning := engine.control._planning) is not None:
        planning[1].exception(timeout=60)
    return done


def run(engine: Engine, *requests: EngineRequest) -> dict[str, Gathered]:
    """Adds requests, each with all its sequences, and steps until all have ended."""
    for item in requests:
        for one in fan_out(prepare(item, engine.rules)):
            engine.submit(one)
    return drain(engine)


def timing_of(gathered: Gathered) -> RequestTiming:
    """Checks what holds for every record of a request that has ended, and returns it."""
    first = next(output for output in gathered.outputs if output.token_ids)
    timing = gathered.last.timing
    assert timing is not None and first.timing is timing
    assert all(output.timing is None for output in gathered.outputs if output not in (first, gathered.last))
    times = [begun for _, begun in timing.phases]
    assert times == sorted(times) and timing.ended_at >= max(times[-1], timing.first_token_at)
    spans = [(begun, stop) for begun, stop, _ in timing.chunks]
    assert all(begun <= stop for begun, stop in spans)
    assert all(stop <= begun for (_, stop), (begun, _) in itertools.pairwise(spans))
    assert first.num_cached_tokens <= sum(timing.cached.values())
    return timing


def run_out_of_pages(engine: Engine) -> None:
    """Makes six requests of the toy share few pages, so that some are pre-empted in the middle; checks each text."""
    before = engine.stats().preemptions
    long = [(11 * i) % 60 + 1 for i in range(40)]
    prompts = [long, [5] * 60, long[:20], [9] * 60, long, [3] * 61]
    for i, prompt in enumerate(prompts):
        engine.add(request(str(i), prompt, max_tokens=140, ignore_eos=True))
    gathered = drain(engine)
    assert engine.stats().preemptions > before
    for i, prompt in enumerate(prompts):
        assert gathered[str(i)].tokens == toy.expected_tokens(prompt, 140, ())
