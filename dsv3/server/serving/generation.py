"""Runs the sequences of one request in the engine and turns their tokens into deltas as they arrive."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence

import msgspec

from dsv3.sampling_params import SamplingParams
from dsv3.scheduler.request import (
    EngineOutput,
    EngineRequest,
    ExpertIds,
    InvalidRequest,
    NotInVocabulary,
    PreparedRequest,
    PromptLogprobs,
    PromptTooLong,
    TokenLogprobs,
    prepare,
    sampling_for_sequence,
)
from dsv3.server.engine.client import SLICE, EngineBusy, EngineUnavailable, RequestRejected
from dsv3.server.engine.in_flight import EngineDied
from dsv3.server.protocol.errors import ENGINE_DIED, ApiError, internal, invalid, unavailable
from dsv3.server.protocol.openai import CompletionTokensDetails, FinishReason, PromptTokensDetails, Usage
from dsv3.server.serving.prompts import EncodedPrompt, not_in_vocabulary
from dsv3.server.serving.resume import ResumedChoice
from dsv3.server.serving.sampling import does_not_fit
from dsv3.server.serving.service import Service
from dsv3.server.serving.timeline import RequestTimeline
from dsv3.server.tenants import Tenant
from dsv3.text.deltas import AnswerDelta
from dsv3.text.output import OutputProcessor, OutputUpdate
from dsv3.text.parser import AnswerParser

# Prompts of more tokens together are prepared in a thread: hashing takes 0.6 ms for 8k tokens, 16 ms for 128k.
_INLINE_TOKENS = 8192
_log = logging.getLogger("dsv3.server")

ParserMaker = Callable[[EncodedPrompt], AnswerParser | None]


class ChoiceUpdate(msgspec.Struct, gc=False):
    """New output of one choice: deltas, the tokens they come from, and the finish reason at the end.

    The `prompt`'s log-probabilities come first, part by part, where they are requested. `routed_experts` are those of
    tokens that have been computed. `weight_version` names the weights of the tokens, where answers have it.
    """

    choice: int
    deltas: list[AnswerDelta]
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    prompt: PromptLogprobs | None = None
    routed_experts: ExpertIds | None = None
    weight_version: str | None = None


class Generation:
    """`n` choices for each of `prompts`, numbered prompt by prompt; their request ids start at `first`.

    `resumed` is the state of choices that another server began; `includes_resumed`: their earlier output is emitted
    too. With `prompt_only` the one token that the engine samples is dropped. `start` sends the requests; `close` must
    follow, and aborts what still runs. Between `hold` and `release` nothing is emitted; the tokens are collected.
    """

    def __init__(
        self,
        service: Service,
        prompts: list[EncodedPrompt],
        sampling: SamplingParams,
        requests: list[PreparedRequest],
        tenant: Tenant | None,
        timeline: RequestTimeline,
        *,
        first: int,
        resumed: Sequence[ResumedChoice],
        includes_resumed: bool,
        prompt_only: bool,
    ):
        self.id = secrets.token_hex(16)
        self.prompts = prompts
        self.n = sampling.n
        self.sampling = sampling
        self._service, self.tenant, self.timeline = service, tenant, timeline
        self._is_timed = timeline.is_wanted
        self._requests = requests
        self._first, self._resumed, self._includes_resumed = first, resumed, includes_resumed
        self._prompt_only = prompt_only
        self._num_prompt_tokens = sum(len(p.token_ids) for p in prompts)
        self._started_at = time.monotonic()
        self._choices: dict[int, ChoiceStream] = {}
        self._on_update: Callable[[ChoiceUpdate], None] = lambda _: None
        self._on_end: Callable[[ApiError | None], None] = lambda _: None
        self._is_open = self._is_paused = False
        self._completion_tokens = self._reasoning_tokens = 0
        self._cached_tokens: dict[int, int] = {}

    def prompt_of(self, choice: int) -> EncodedPrompt:
        """Returns the prompt of a choice."""
        return self.prompts[choice // self.n]

    @property
    def usage(self) -> Usage:
        """Token counts so far; each prompt counts once."""
        prompt = self._num_prompt_tokens
        cached = PromptTokensDetails(sum(self._cached_tokens.values()))
        details = CompletionTokensDetails(self._reasoning_tokens)
        return Usage(prompt, self._completion_tokens, prompt + self._completion_tokens, cached, details)

    def start(
        self,
        parser: ParserMaker,
        on_update: Callable[[ChoiceUpdate], None],
        on_end: Callable[[ApiError | None], None],
    ) -> None:
        """Sends the requests, each choice with its own parser; raises ApiError where they are refused.

        `on_update` receives the output, `on_end` is called once, last, with an error where a choice has failed.
        """
        self._on_update, self._on_end = on_update, on_end
        self._service.enter()
        self._is_open = True
        try:
            self._submit(parser)
        except BaseException:
            self.close()
            raise

    async def run(self, parser: ParserMaker, on_update: Callable[[ChoiceUpdate], None]) -> None:
        """Sends the requests and waits until all choices have ended; raises ApiError."""
        ended: asyncio.Future[ApiError | None] = asyncio.get_running_loop().create_future()

        def end(error: ApiError | None) -> None:
            if not ended.done():  # else the awaiting task was cancelled and closes this soon
                ended.set_result(error)

        try:
            self.start(parser, on_update, end)
            if (error := await ended) is not None:
                raise error
        finally:
            self.close()

    def hold(self) -> None:
        """Pauses the updates until `release`."""
        self._is_paused = True

    def release(self) -> None:
        """Resumes the updates, in slices of what has been collected."""
        self._is_paused = False
        for choice in list(self._choices.values()):
            if choice.pending or choice.resumed is not None:
                self._service.engine.requeue(choice)

    def close(self) -> None:
        """Aborts what is still running."""
        if not self._is_open:
            return
        self._is_open = False
        self._on_update, self._on_end = lambda _: None, lambda _: None
        if self._choices:
            self._service.engine.abort(list(self._choices))
            for _ in self._choices:
                self._service.metrics.record_finished("abort")
            self._choices.clear()
        if self.tenant is not None and self._cached_tokens:
            prompt = sum(len(self.prompts[index].token_ids) for index in self._cached_tokens)
            self._service.metrics.charge(self.tenant, prompt, self._completion_tokens)
        self._service.leave()

    def _submit(self, parser: ParserMaker) -> None:
        self._service.require_ready()
        requests, self._requests = self._requests, []  # the engine client keeps them from here on
        for index in range(self.n * len(self.prompts)):
            self._choices[self._first + index] = self._stream(index, parser)
        unfinished = [
            choice for choice in self._choices.values() if not (choice.resumed and choice.resumed.finish_reason)
        ]
        try:
            if requests:
                self._service.engine.submit(requests, unfinished)
        except (EngineBusy, EngineUnavailable) as error:
            self._choices.clear()
            raise _api_error(self._service, error) from None
        for choice in [choice for choice in self._choices.values() if choice.resumed is not None]:
            self._service.engine.requeue(choice)

    def _stream(self, index: int, parser: ParserMaker) -> "ChoiceStream":
        resumed = self._resumed[index] if self._resumed else None
        if resumed is not None and resumed.token_ids:
            return ChoiceStream(self, index, self._first + index, resumed.output, resumed)
        output = OutputProcessor(self._service.tokenizer, self.sampling, parser(self.prompt_of(index)))
        return ChoiceStream(self, index, self._first + index, output)

    def on_outputs(self, choice: "ChoiceStream") -> None:
        """Processes the pending outputs of a choice, unless paused."""
        if self._is_paused or not self._is_open:
            return
        try:
            self._process(choice)
        except ApiError as error:
            self._finish(error)
        except Exception:
            _log.exception("request %s failed", self.id)
            self._finish(internal())

    def fail(self, choice: "ChoiceStream", error: Exception) -> None:
        """Fails the whole request; aborts its other choices."""
        if not self._is_open or not self._choices:
            return
        if isinstance(error, EngineUnavailable | EngineDied):
            for _ in self._choices:
                self._service.metrics.record_finished("error")
        ended, self._choices = list(self._choices), {}
        self._service.engine.abort(ended)
        self._finish(_api_error(self._service, error))

    def _finish(self, error: ApiError | None) -> None:
        on_end = self._on_end
        self.close()
        on_end(error)

    def _start_resumed(self, choice: "ChoiceStream", resumed: ResumedChoice) -> None:
        """Counts a resumed choice's earlier tokens, and emits them if requested; the choice may have ended."""
        choice.resumed = None
        self._service.metrics.add("resumed", 1)
        choice.num_tokens = len(resumed.token_ids)
        self._completion_tokens += choice.num_tokens
        self._reasoning_tokens += resumed.num_reasoning_tokens
        update = ChoiceUpdate(choice.index, [], [], None, resumed.finish_reason, resumed.stop_reason)
        if self._includes_resumed:
            update.deltas, update.token_ids = resumed.deltas, resumed.token_ids.tolist()
        if resumed.finish_reason is not None:
            self._finish_choice(choice, resumed.finish_reason, engine_continues=False)
        if self._includes_resumed or resumed.finish_reason is not None:
            self._on_update(update)
        if not self._choices:
            self._finish(None)

    def _process(self, choice: "ChoiceStream") -> None:
        if choice.resumed is not None:
            self._start_resumed(choice, choice.resumed)
        items, choice.pending = choice.pending, []
        if len(items) > SLICE:
            items, choice.pending = items[:SLICE], items[SLICE:]
            self._service.engine.requeue(choice)
        if len(items) == 1 and isinstance(items[0], int):  # the usual case
            self._process_tokens(choice, items)  # type: ignore[arg-type]
            return
        first = 0
        for i, item in enumerate(items):
            if not isinstance(item, int):
                if first < i:
                    self._process_tokens(choice, items[first:i])  # type: ignore[arg-type]
                first = i + 1
                if not choice.has_ended:
                    self._process_output(choice, item)
                if item.prompt_logprobs is not None and first < len(items):
                    choice.pending = items[first:] + choice.pending  # one part at a time, so that other tasks run
                    self._service.engine.requeue(choice)
                    return
        if first < len(items):
            self._process_tokens(choice, items[first:] if first else items)  # type: ignore[arg-type]

    def _process_tokens(self, choice: "ChoiceStream", token_ids: list[int]) -> None:
        """Processes tokens that do not end the choice; updates its fields and the metrics once for all of them."""
        if choice.has_ended:
            return  # by a stop string
        began = time.monotonic() if self._is_timed else 0.0
        processed, now = choice.output.push(token_ids), time.monotonic()
        if self._is_timed:
            choice.detokenize_s += now - began
        self._service.metrics.tokens(processed.num_tokens, now - choice.last_token_at)
        choice.last_token_at = now
        self._emit(choice, processed, token_ids, None, engine_continues=True)

    def _process_output(self, choice: "ChoiceStream", output: EngineOutput) -> None:
        if output.finish_reason == "error":
            choice.has_ended = True
            del self._choices[output.request_id]
            self._service.metrics.record_finished("error")
            raise ApiError(500, output.error or "the request failed", kind="server_error", code="engine_error")
        if output.prompt_logprobs is not None:
            self._emit_prompt_logprobs(choice, output.prompt_logprobs)
            return
        if output.routed_experts is not None:
            self._on_update(ChoiceUpdate(choice.index, [], [], routed_experts=output.routed_experts))
            if not output.token_ids and output.finish_reason is None:
                return  # those of the prompt
        if output.weight_version is not None and self._service.config.options.enable_weight_updates:
            choice.weight_version = output.weight_version
        if output.weight_version is not None and not output.token_ids and output.finish_reason is None:
            return  # the weights have changed, between two tokens
        if output.timing is not None:
            self.timeline.on_record(choice.index, output.timing, choice.last_token_at)
        processed = choice.output.push(output.token_ids, output.finish_reason, output.stop_token_id)
        if self._prompt_only:
            processed = OutputUpdate([], 0, processed.finish_reason and "length")
        self._record_latency(choice, output, processed.num_tokens)
        self._emit(choice, processed, output.token_ids, output.logprobs, engine_continues=output.finish_reason is None)

    def _emit_prompt_logprobs(self, choice: "ChoiceStream", part: PromptLogprobs) -> None:
        """Emits the part not emitted yet: a preempted request computes its prompt again."""
        is_first, part = not choice.num_prompt_logprobs, part.behind(choice.num_prompt_logprobs)
        if is_first or len(part):
            choice.num_prompt_logprobs = part.start + len(part)
            self._on_update(ChoiceUpdate(choice.index, [], [], prompt=part))

    def _emit(
        self,
        choice: "ChoiceStream",
        processed: OutputUpdate,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None,
        engine_continues: bool,
    ) -> None:
        count = processed.num_tokens
        choice.num_tokens += count
        self._completion_tokens += count
        self._reasoning_tokens += processed.num_reasoning_tokens
        if count < len(token_ids):
            token_ids = token_ids[:count]
        if logprobs is not None:
            logprobs = logprobs[:count]
        update = ChoiceUpdate(choice.index, processed.deltas, token_ids, logprobs, weight_version=choice.weight_version)
        if processed.finish_reason is not None:
            update.finish_reason, update.stop_reason = processed.finish_reason, processed.stop_reason
            self._service.metrics.add("dropped_calls", processed.num_dropped_calls)
            self._finish_choice(choice, processed.finish_reason, engine_continues)
        self._on_update(update)
        if not self._choices:
            self._finish(None)

    def _record_latency(self, choice: "ChoiceStream", output: EngineOutput, num_tokens: int) -> None:
        metrics, now = self._service.metrics, time.monotonic()
        if not choice.has_tokens and output.token_ids:
            waited, choice.first_token_at = now - self._started_at, now
            self.timeline.first_token_at = self.timeline.first_token_at or now
            metrics.observe("ttft", waited)
            if output.queue_seconds is not None:
                metrics.observe("queue", output.queue_seconds)
                metrics.observe("prefill", max(0.0, waited - output.queue_seconds))
            prompt = choice.index // self.n
            metrics.add("prompt_tokens", len(self.prompts[prompt].token_ids))
            self._cached_tokens[prompt] = max(self._cached_tokens.get(prompt, 0), output.num_cached_tokens)
            choice.has_tokens = True
            metrics.add("generation_tokens", num_tokens)
        elif output.token_ids:
            metrics.tokens(num_tokens, now - choice.last_token_at)
        choice.last_token_at = now

    def _finish_choice(self, choice: "ChoiceStream", reason: str, engine_continues: bool) -> None:
        choice.has_ended = True
        self.timeline.on_choice_end(reason, choice.last_token_at, choice.detokenize_s)
        del self._choices[choice.request_id]
        if engine_continues:
            self._service.engine.abort([choice.request_id])
        metrics = self._service.metrics
        metrics.record_finished("stop" if reason == "tool_calls" else reason)
        metrics.observe("e2e", time.monotonic() - self._started_at)
        metrics.observe("prompt_length", len(self.prompt_of(choice.index).token_ids))
        metrics.observe("answer_length", choice.num_tokens)
        if choice.has_tokens:
            metrics.observe("decode", choice.last_token_at - choice.first_token_at)


class ChoiceStream:
    """The `RequestStream` (`dsv3.server.engine.in_flight`) of one choice."""

    __slots__ = (
        *("generation", "index", "request_id", "output", "pending"),
        *("has_ended", "has_tokens", "is_queued", "first_token_at", "last_token_at"),
        *("num_tokens", "resumed", "num_prompt_logprobs", "weight_version", "detokenize_s"),
    )

    def __init__(
        self,
        generation: Generation,
        index: int,
        request_id: int,
        output: OutputProcessor,
        resumed: ResumedChoice | None = None,
    ):
        self.generation, self.index, self.request_id, self.output = generation, index, request_id, output
        self.resumed = resumed
        self.pending: list[int | EngineOutput] = []
        self.is_queued = self.has_tokens = self.has_ended = False
        self.num_tokens, self.detokenize_s = 0, 0.0
        self.weight_version: str | None = None
        self.num_prompt_logprobs = 0  # prompt tokens, from the first on, whose log-probabilities were emitted
        self.first_token_at = self.last_token_at = time.monotonic()

    def on_outputs(self) -> None:
        """Processes `pending`."""
        self.generation.on_outputs(self)

    def fail(self, error: Exception) -> None:
        """Fails the whole request."""
        self.generation.fail(self, error)


async def prepare_requests(
    service: Service, prompts: list[EncodedPrompt], common: EngineRequest, resumed: Sequence[ResumedChoice]
) -> tuple[int, list[PreparedRequest]]:
    """Returns the first request id and the engine's requests, all like `common`; raises ApiError.

    There is one request per prompt, or one per unfinished resumed choice. Long prompts are hashed in a thread.
    """
    sampling = common.sampling
    if sampling.stop and service.tokenizer is None:
        raise invalid("stop: this model has no tokenizer; use stop_token_ids", "stop", "no_tokenizer")
    rules, capacity = service.require_ready().rules, service.engine.capacity
    if (count := sampling.n * len(prompts)) > capacity:
        raise invalid(
            f"{count} sequences in one request; at most {capacity}; lower n or send several requests",
            "n",
        )
    try:
        service.engine.require_capacity(count)
    except EngineBusy as error:
        raise _api_error(service, error) from None
    first = service.engine.new_ids(count)
    replace, n = msgspec.structs.replace, sampling.n
    if resumed:  # one per unfinished choice: resumed choices have different tokens
        requests = [
            replace(
                common,
                request_id=first + i,
                prompt_token_ids=prompts[i // n].token_ids,
                sampling=sampling_for_sequence(sampling, i % n),
                answer_token_ids=choice.token_ids,
            )
            for i, choice in enumerate(resumed)
            if choice.finish_reason is None
        ]
    else:
        requests = [
            replace(common, request_id=first + n * i, prompt_token_ids=prompt.token_ids)
            for i, prompt in enumerate(prompts)
        ]
    is_long = sum(len(r.prompt_token_ids) + len(r.answer_token_ids) for r in requests) > _INLINE_TOKENS
    try:
        return first, await service.run(is_long, lambda: [prepare(request, rules) for request in requests])
    except PromptTooLong as error:
        raise does_not_fit(error.length, sampling.max_tokens or 1, error.limit) from None
    except NotInVocabulary as error:
        raise not_in_vocabulary(error.vocab_size) from None
    except InvalidRequest as error:
        raise invalid(str(error)) from None


def _api_error(service: Service, error: Exception) -> ApiError:
    if isinstance(error, EngineBusy):
        service.metrics.record_rejected("queue_full")
        return unavailable(str(error), "queue_full")
    if isinstance(error, EngineUnavailable):
        return unavailable(str(error), "engine_unavailable", retry_after=5)
    if isinstance(error, EngineDied):
        service.metrics.add("given_up", 1)
        return ApiError(500, str(error), kind="server_error", code=ENGINE_DIED)
    return invalid(str(error)) if isinstance(error, RequestRejected) and error.invalid else internal()
