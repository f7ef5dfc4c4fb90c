"""An engine without a model: repeats the prompt, in the same processes as the real one.

A sequence's tokens are its prompt's, again and again; a prompt that begins with the beginning-of-sequence token ends
with the end-of-sequence token after one repetition. Token ids from `TROUBLE` on cause failures.
"""

import dataclasses
import functools
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import msgspec
import numpy as np

from dsv3.config.publishing import KvEventsConfig
from dsv3.engine.operations import (
    ContinueGeneration,
    OperatedState,
    Operation,
    OperationRefused,
    PauseGeneration,
    Sleep,
    UpdateWeights,
    Wake,
    WeightsLost,
)
from dsv3.engine.step_log import EngineSnapshot, JobRecord, StepLog
from dsv3.kv_cache.event_publisher import Publisher
from dsv3.kv_cache.events import PageTokens, Stored
from dsv3.sampling_params import SamplingParams
from dsv3.scheduler.listing import ListedRequest, RequestList
from dsv3.scheduler.request import (
    EngineOutput,
    ExpertIds,
    InvalidRequest,
    NotServing,
    PreparedRequest,
    PromptLogprobs,
    QueueFull,
    RequestRules,
    StepOutputs,
    TokenLogprobs,
    Tokens,
)
from dsv3.scheduler.timing import RequestTiming, begin_timing
from dsv3.server.engine.messages import EngineInfo

BOS, EOS = 0, 1
VOCAB = 500
CRASH_STEP, FAIL_STEP, CRASH_ADD, INVALID, HANG, BAD_OUTPUT = range(VOCAB - 6, VOCAB)
TROUBLE = CRASH_STEP


@dataclasses.dataclass
class _Sequence:
    request: PreparedRequest
    prompt: list[int]
    trouble: frozenset[int]
    done: int = 0
    timing: RequestTiming = dataclasses.field(default_factory=lambda: begin_timing("queue"))

    @property
    def pages(self) -> int:
        return (len(self.prompt) + self.done) // 64 + 1


@functools.lru_cache(maxsize=4)
def _read(tokens: bytes) -> tuple[list[int], frozenset[int]]:
    """A prompt and the failures in it; the sequences of one prompt share both."""
    prompt = np.frombuffer(tokens, "<i4")
    return prompt.tolist(), frozenset(prompt[prompt >= TROUBLE].tolist())


class FakeEngine:
    """`Engine`'s interface; one token a step for each running sequence, `step_s` seconds a step."""

    def __init__(
        self, max_model_len: int, max_num_seqs: int, max_num_queued_reqs: int, step_s: float, caches: bool = False
    ):
        self.failure: BaseException | None = None
        self.state = OperatedState()
        self.log = StepLog()
        self._max_model_len, self._max_num_seqs = max_model_len, max_num_seqs
        self._max_waiting, self._step_s = max_num_queued_reqs, step_s
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._changed: list[int] = []  # running requests whose weights have changed
        self._aborts = False  # those that run, with the next step
        self._steps = self._flushed = 0
        self._cached: set[bytes] | None = set() if caches else None
        self.events: Publisher | None = None  # publishes the pages of a prompt on submission

    @property
    def has_work(self) -> bool:
        return self._aborts or (bool(self._waiting or self._running) and not self.state.is_paused)

    @property
    def room(self) -> int:
        return self._max_waiting + self._max_num_seqs - len(self._running) - len(self._waiting)

    def submit(self, request: PreparedRequest) -> None:
        prompt, trouble = _read(request.tokens)
        if self.state.sleep_level:
            raise NotServing("the engine sleeps")
        if CRASH_ADD in trouble:
            raise RuntimeError("secret /path/of/this/machine")
        if INVALID in trouble:
            raise InvalidRequest("prompt: the engine refuses it")
        if self.room <= 0:
            raise QueueFull("the queue is full")
        if done := request.num_answered:  # else the sequences of a prompt share it
            prompt = prompt[:-done]
        self._waiting.append(_Sequence(request, prompt, trouble, done))
        if self.events is not None:
            keys, tokens = request.prefix_keys, np.frombuffer(request.tokens, "<i4")
            self.events.queue.append(Stored(0, "GPU", keys, PageTokens(keys, None, tokens[: 64 * len(keys)])))

    def abort(self, request_id: int) -> None:
        self._waiting = deque(s for s in self._waiting if s.request.request_id != request_id)
        self._running = [s for s in self._running if s.request.request_id != request_id]

    def flush(self) -> None:
        self._flushed += 1

    def operate(self, operation: Operation, on_progress: Callable[[], None]) -> Future[None]:
        """Changes the state as the engine does; a source may be refused, or lost."""
        done: Future[None] = Future()
        state = msgspec.structs.asdict(self.state)
        match operation:
            case PauseGeneration(mode=mode):
                state["is_paused"] = True
                self._aborts = mode == "abort"
            case ContinueGeneration():
                state["is_paused"] = False
            case Sleep(level=level):
                state["sleep_level"] = level
            case Wake():
                state["sleep_level"] = 0
            case UpdateWeights(source="refused"):
                done.set_exception(OperationRefused("missing tensors (1): norm"))
            case UpdateWeights(source="lost"):
                done.set_exception(WeightsLost("update them again"))
            case UpdateWeights(version=version, source=source):
                state |= {"weight_version": version or "1", "weights": source}
                self._changed = [sequence.request.request_id for sequence in self._running]
        self.state = OperatedState(**state)
        on_progress()
        if not done.done():
            done.set_result(None)
        return done

    def snapshot(self) -> EngineSnapshot:
        return EngineSnapshot(self.log.snapshot(), None)

    def requests(self) -> RequestList:
        states = [(s, "decoding", "") for s in self._running] + [(s, "waiting", "slot") for s in self._waiting]
        found = [
            ListedRequest(s.request.request_id, state, why, s.request.priority, 0.5, len(s.prompt), 0, 0, {}, 0, 0)
            for s, state, why in states
        ]
        return RequestList(found, len(found))

    def step(self) -> StepOutputs:
        self.log.begin(time.perf_counter())
        outputs = self._step()
        self.log.done("wait")
        jobs = [JobRecord("decode", len(self._running))]
        self.log.end(self._steps, self._steps - 1, jobs, len(self._running), len(self._waiting))
        return outputs

    def _step(self) -> StepOutputs:
        if self._aborts:
            ended, self._running, self._aborts = self._running, [], False
            return StepOutputs([], [_aborted(sequence) for sequence in ended])
        while self._waiting and len(self._running) < self._max_num_seqs:
            self._running.append(self._waiting.popleft())
            self._running[-1].timing.enter("prefill")
        time.sleep(self._step_s)
        self._steps += 1
        version = self.state.weight_version
        outputs = [EngineOutput(request_id=i, token_ids=[], weight_version=version) for i in self._changed]
        self._changed = []
        outputs += [
            output for s in self._running if not s.done for output in (*_prompt_logprobs(s), *_prompt_experts(s))
        ]
        outputs += [self._advance(sequence) for sequence in self._running]
        ended = {o.request_id for o in outputs if o.finish_reason}
        self._running = [s for s in self._running if s.request.request_id not in ended]
        self.log.done("launch")
        return _columns(outputs)

    def stats(self) -> dict[str, object]:
        pages = sum(s.pages for s in self._running)
        return {
            "running": len(self._running),
            "waiting": len(self._waiting),
            "pages_in_use": pages,
            "cache_usage": pages / 1000,
            "steps": self._steps,
            "flushed": self._flushed,
            "host_time_counts": (1,) * 10,
        }

    def _advance(self, sequence: _Sequence) -> EngineOutput:
        request, prompt = sequence.request, sequence.prompt
        if request.grammar:  # not constrained here: the test reads the grammar from the error
            return EngineOutput(
                request_id=request.request_id, token_ids=[], finish_reason="error", error=request.grammar
            )
        self._make_trouble(sequence.trouble)
        if BAD_OUTPUT in sequence.trouble and sequence.done == 2:
            return EngineOutput(request_id=request.request_id, token_ids=[], finish_reason="error", error="not finite")
        sampling, first = request.sampling, int(prompt[0] == BOS)
        ends = first and not sampling.ignore_eos and sequence.done >= len(prompt) - 1
        token = EOS if ends else prompt[first + sequence.done % (len(prompt) - first)]
        sequence.done += 1
        limit = sampling.max_tokens or self._max_model_len - len(prompt)
        is_first = sequence.done == 1 + request.num_answered
        stopped = token == EOS or token in sampling.stop_token_ids
        reason = "stop" if stopped else "length" if sequence.done >= limit else None
        num_cached = self._lookup(request, len(prompt)) if is_first else 0
        if is_first:
            timing, now = sequence.timing, time.monotonic()
            timing.device = num_cached
            timing.add_chunk(timing.phases[-1][1], now, len(prompt) - num_cached, True)
            timing.first_token_at = now
        sequence.timing.ended_at = time.monotonic() if reason else None
        return EngineOutput(
            request_id=request.request_id,
            token_ids=[token],
            logprobs=None if sampling.logprobs is None else [_logprobs(token, sampling)],
            routed_experts=None if sequence.done == 1 else _experts(sequence, len(prompt) + sequence.done - 2, 1),
            finish_reason=reason,
            stop_token_id=token if stopped else None,
            num_cached_tokens=num_cached,
            queue_seconds=0.0 if is_first else None,
            weight_version=self.state.weight_version if is_first else None,
            timing=sequence.timing if request.return_timing and (is_first or reason) else None,
        )

    def _lookup(self, request: PreparedRequest, length: int) -> int:
        """All full pages, of those keys seen before if it caches."""
        if self._cached is None:
            return 64 * (length // 64)
        found = sum(key in self._cached for key in request.prefix_keys)
        self._cached.update(request.prefix_keys)
        return 64 * found

    def _make_trouble(self, trouble: frozenset[int]) -> None:
        if CRASH_STEP in trouble:
            raise RuntimeError("secret /path/of/this/machine")
        if HANG in trouble:
            time.sleep(3600)
        if FAIL_STEP in trouble:
            self.failure = FloatingPointError("secret")


def _columns(outputs: list[EngineOutput]) -> StepOutputs:
    """Outputs that are only a token go into columns, as in the real engine."""
    plain = [o for o in outputs if o == EngineOutput(request_id=o.request_id, token_ids=o.token_ids)]
    ids, tokens = [o.request_id for o in plain], [o.token_ids[0] for o in plain]
    rows = Tokens(np.array(ids, np.int64), np.ones(len(plain), np.int64), np.array(tokens, np.int32))
    return StepOutputs([rows] if plain else [], [o for o in outputs if o not in plain])


def _logprobs(token: int, sampling: SamplingParams) -> TokenLogprobs:
    """Each token was drawn from itself and the next one."""
    count, others = sampling.logprobs, [i for i in range(4, 30) if i != token]
    kept = np.array([token, token + 1], "<i4").tobytes() if sampling.return_sampling_mask else None
    return TokenLogprobs(-0.5, [token, *others][:count], [-0.5, -2.0, float("-inf"), *[-9.0] * 20][:count], kept)


def _experts(sequence: _Sequence, start: int, count: int) -> ExpertIds | None:
    """Layer l of two has experts i + l and i + l + 1 for token i."""
    if not sequence.request.sampling.return_routed_experts:
        return None
    ids = np.arange(start, start + count, dtype="<u2")[:, None, None] + np.array([[0, 1], [1, 2]], "<u2")
    return ExpertIds(start, 2, 2, "<u2", ids.tobytes())


def _aborted(sequence: _Sequence) -> EngineOutput:
    """The end of an aborted request, with those of its last token but one."""
    left = _experts(sequence, len(sequence.prompt) + sequence.done - 2, 1)
    ended = EngineOutput(request_id=sequence.request.request_id, token_ids=[], finish_reason="abort")
    return msgspec.structs.replace(ended, routed_experts=left)


def _prompt_experts(sequence: _Sequence) -> list[EngineOutput]:
    """Those of the prompt in parts of 3 tokens, the first part twice, as if another engine had begun."""
    if not sequence.request.sampling.return_routed_experts:
        return []  # without a loop over all parts of long prompts, which would delay a step
    count = len(sequence.prompt)
    parts = [_experts(sequence, start, min(3, count - start)) for start in (0, *range(0, count, 3))]
    ids = sequence.request.request_id
    return [EngineOutput(request_id=ids, token_ids=[], routed_experts=part) for part in parts if part is not None]


def _prompt_logprobs(sequence: _Sequence) -> list[EngineOutput]:
    """Each token but the first has -0.25 and rank 2; in parts of 4 tokens, the first twice, as if preempted."""
    count = sequence.request.sampling.prompt_logprobs
    if count is None:
        return []
    own = np.array(sequence.prompt[1:], "<i4")
    top = np.stack([np.full_like(own, 4), own, *[np.full_like(own, 5 + i) for i in range(18)]], 1)[:, :count]
    scores = np.broadcast_to(np.array([-0.125, -0.25, *[-9.0] * 18], "<f4")[:count], top.shape)
    columns = np.full(len(own), -0.25, "<f4"), np.full(len(own), 2, "<i4"), top, scores
    parts = []
    for start in (0, *range(0, max(1, len(own)), 4)):
        part = (np.ascontiguousarray(column[start : start + 4]).tobytes() for column in columns)
        parts.append(PromptLogprobs(start + 1, *part))
    ids = sequence.request.request_id
    return [EngineOutput(request_id=ids, token_ids=[], prompt_logprobs=part) for part in parts]


def make(start, host):
    """The engine factory of the server under test."""
    options, engine = start.factory_options, start.engine
    if "fail" in options:
        raise ValueError(options["fail"])
    for i in range(3):
        host.progress(f"compiling program {i}", i + 1, 3)
    time.sleep(options.get("start_s", 0))
    limits = engine.max_model_len or 2048, engine.max_num_seqs or 64, engine.max_num_queued_reqs
    address = options.get("transfer_address", "")
    fake = FakeEngine(*limits, options.get("step_s", 0.001), options.get("caches", False))
    if events := start.engine.kv_events_config:
        fake.events = Publisher(KvEventsConfig.from_json(events), 1, 64)
    return fake, EngineInfo(
        RequestRules(
            vocab_size=VOCAB,
            max_model_len=limits[0],
            eos_token_ids=(EOS,),
            fingerprint="print",
            takes_grammars=options.get("tells_grammars", False),
            routed_experts=(2, 2, "<u2") if engine.enable_return_routed_experts else None,
            returns_sampling_masks=engine.enable_return_sampling_mask,
        ),
        limits[1],
        1000,
        transfer_address=address,
        fetches_pages=bool(address),
        kv_events=KvEventsConfig.from_json(events).address(1) if events else None,
    )
