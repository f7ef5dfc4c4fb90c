"""Runs the sequences of one request in the engine and turns their tokens into pieces of text as they come."""

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
    InvalidRequest,
    NotInVocabulary,
    PreparedRequest,
    PromptLogprobs,
    PromptTooLong,
    TokenLogprobs,
    prepare,
    sampling_of,
)
from dsv3.server.engine.client import SLICE, Busy, EngineUnavailable, Refused
from dsv3.server.engine.in_flight import EngineDied
from dsv3.server.protocol.errors import ENGINE_DIED, ApiError, internal, invalid, unavailable
from dsv3.server.protocol.openai import CompletionTokensDetails, FinishReason, PromptTokensDetails, Usage
from dsv3.server.serving.prompts import EncodedPrompt, not_in_vocabulary
from dsv3.server.serving.resume import Resumed
from dsv3.server.serving.sampling import does_not_fit
from dsv3.server.serving.service import Service
from dsv3.server.tenants import Tenant
from dsv3.text.output import OutputDelta, OutputStream
from dsv3.text.parser import AnswerParser
from dsv3.text.pieces import Piece

# Prompts longer than this together are prepared in a thread: 0.6 ms of hashing for 8k tokens, 16 ms for 128k.
_INLINE_TOKENS = 8192
_log = logging.getLogger("dsv3.server")

ParserMaker = Callable[[EncodedPrompt], AnswerParser | None]


class Update(msgspec.Struct, gc=False):
    """What came for one choice: pieces, the tokens they were read from, and at the end why it ended.

    Before all else come log-probabilities of the `prompt`, part by part, where they are asked for.
    """

    choice: int
    pieces: list[Piece]
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    prompt: PromptLogprobs | None = None


class Generation:
    """`n` choices for each of `prompts`, prompt by prompt, choices numbered throughout, with ids from `first` on.

    Those that go on with an answer are `resumed`; `retells` says whether what they had told is told again. With
    `prompt_only` the one token that the engine gives is not told.
    Nothing is sent to the engine before `start`, and whoever has started it closes it, early or late: that frees what
    the engine still holds. While it is on `hold` nothing is told; tokens gather, and are told together after `release`.
    """

    def __init__(
        self,
        service: Service,
        prompts: list[EncodedPrompt],
        sampling: SamplingParams,
        requests: list[PreparedRequest],
        tenant: Tenant | None = None,
        *,
        first: int,
        resumed: Sequence[Resumed] = (),
        retells: bool = False,
        prompt_only: bool = False,
    ):
        self.id = secrets.token_hex(16)
        self.prompts = prompts
        self.n = sampling.n
        self._sampling = sampling
        self._service, self._tenant = service, tenant
        self._requests = requests
        self._first, self._resumed, self._retells = first, resumed, retells
        self._prompt_only = prompt_only
        self._num_prompt_tokens = sum(len(p.token_ids) for p in prompts)
        self._started_at = time.monotonic()
        self.first_token_at: float | None = None
        self._choices: dict[int, _ChoiceStream] = {}
        self._on_update: Callable[[Update], None] = lambda _: None
        self._on_end: Callable[[ApiError | None], None] = lambda _: None
        self._is_open = self._is_held = False
        self._completion_tokens = self._reasoning_tokens = 0
        self._cached_tokens: dict[int, int] = {}

    def prompt_of(self, choice: int) -> EncodedPrompt:
        """Returns the prompt that a choice continues."""
        return self.prompts[choice // self.n]

    @property
    def usage(self) -> Usage:
        """Tokens so far; each prompt is counted once."""
        prompt = self._num_prompt_tokens
        cached = PromptTokensDetails(sum(self._cached_tokens.values()))
        details = CompletionTokensDetails(self._reasoning_tokens)
        return Usage(prompt, self._completion_tokens, prompt + self._completion_tokens, cached, details)

    def start(
        self,
        parser: ParserMaker,
        on_update: Callable[[Update], None],
        on_end: Callable[[ApiError | None], None],
    ) -> None:
        """Sends the requests, each choice with a parser of its own; raises ApiError where they cannot be taken.

        `on_update` is called with what comes, and `on_end` once after it: with an error if not all choices
        have ended as they should.
        """
        self._on_update, self._on_end = on_update, on_end
        self._service.enter()
        self._is_open = True
        try:
            self._submit(parser)
        except BaseException:
            self.close()
            raise

    async def run(self, parser: ParserMaker, on_update: Callable[[Update], None]) -> None:
        """Sends the requests and waits until all choices have ended; raises ApiError."""
        ended: asyncio.Future[ApiError | None] = asyncio.get_running_loop().create_future()

        def end(error: ApiError | None) -> None:
            if not ended.done():  # else whoever waits was cancelled, and closes this soon
                ended.set_result(error)

        try:
            self.start(parser, on_update, end)
            if (error := await ended) is not None:
                raise error
        finally:
            self.close()

    def hold(self) -> None:
        """Tells nothing until `release`."""
        self._is_held = True

    def release(self) -> None:
        """Tells what has come meanwhile, in slices, and goes on."""
        self._is_held = False
        for choice in list(self._choices.values()):
            if choice.pending or choice.resumed is not None:
                self._service.engine.put_off(choice)

    def close(self) -> None:
        """Frees what is still running."""
        if not self._is_open:
            return
        self._is_open = False
        self._on_update, self._on_end = lambda _: None, lambda _: None
        if self._choices:
            self._service.engine.abort(list(self._choices))
            for _ in self._choices:
                self._service.metrics.finished("abort")
            self._choices.clear()
        if self._tenant is not None and self._cached_tokens:
            prompt = sum(len(self.prompts[index].token_ids) for index in self._cached_tokens)
            self._service.metrics.charge(self._tenant, prompt, self._completion_tokens)
        self._service.leave()

    def _submit(self, parser: ParserMaker) -> None:
        self._service.require_ready()
        requests, self._requests = self._requests, []  # from here on they are the engine's to hold
        for index in range(self.n * len(self.prompts)):
            self._choices[self._first + index] = self._stream(index, parser)
        going = [choice for choice in self._choices.values() if not (choice.resumed and choice.resumed.finish_reason)]
        try:
            if requests:
                self._service.engine.submit(requests, going)
        except (Busy, EngineUnavailable) as error:
            self._choices.clear()
            raise _api_error(self._service, error) from None
        for choice in [choice for choice in self._choices.values() if choice.resumed is not None]:
            self._service.engine.put_off(choice)

    def _stream(self, index: int, parser: ParserMaker) -> "_ChoiceStream":
        resumed = self._resumed[index] if self._resumed else None
        if resumed is not None and resumed.token_ids:
            return _ChoiceStream(self, index, self._first + index, resumed.stream, resumed)
        stream = OutputStream(self._service.tokenizer, self._sampling, parser(self.prompt_of(index)))
        return _ChoiceStream(self, index, self._first + index, stream)

    def take(self, choice: "_ChoiceStream") -> None:
        """Tells what has come for a choice, unless it is on hold."""
        if self._is_held or not self._is_open:
            return
        try:
            self._take(choice)
        except ApiError as error:
            self._finish(error)
        except Exception:
            _log.exception("an answer failed")
            self._finish(internal())

    def fail(self, choice: "_ChoiceStream", error: Exception) -> None:
        """Ends everything; the engine may hold other choices of it."""
        if not self._is_open or not self._choices:
            return
        if isinstance(error, EngineUnavailable | EngineDied):
            for _ in self._choices:
                self._service.metrics.finished("error")
        ended, self._choices = list(self._choices), {}
        self._service.engine.abort(ended)
        self._finish(_api_error(self._service, error))

    def _finish(self, error: ApiError | None) -> None:
        on_end = self._on_end
        self.close()
        on_end(error)

    def _go_on(self, choice: "_ChoiceStream", resumed: Resumed) -> None:
        """Counts what a choice had before, and tells it again where all is told; it may have ended."""
        choice.resumed = None
        self._service.metrics.add("resumed", 1)
        choice.num_tokens = len(resumed.token_ids)
        self._completion_tokens += choice.num_tokens
        self._reasoning_tokens += resumed.num_reasoning_tokens
        update = Update(choice.index, [], [], None, resumed.finish_reason, resumed.stop_reason)
        if self._retells:
            update.pieces, update.token_ids = resumed.pieces, resumed.token_ids.tolist()
        if resumed.finish_reason is not None:
            self._end(choice, resumed.finish_reason, engine_goes_on=False)
        if self._retells or resumed.finish_reason is not None:
            self._on_update(update)
        if not self._choices:
            self._finish(None)

    def _take(self, choice: "_ChoiceStream") -> None:
        if choice.resumed is not None:
            self._go_on(choice, choice.resumed)
        items, choice.pending = choice.pending, []
        if len(items) > SLICE:
            items, choice.pending = items[:SLICE], items[SLICE:]
            self._service.engine.put_off(choice)
        if len(items) == 1 and isinstance(items[0], int):  # nearly always
            self._continue(choice, items)  # type: ignore[arg-type]
            return
        first = 0
        for i, item in enumerate(items):
            if not isinstance(item, int):
                if first < i:
                    self._continue(choice, items[first:i])  # type: ignore[arg-type]
                first = i + 1
                if not choice.has_ended:
                    self._take_output(choice, item)
                if item.prompt_logprobs is not None and first < len(items):
                    choice.pending = items[first:] + choice.pending  # one part at a time: others have their turn
                    self._service.engine.put_off(choice)
                    return
        if first < len(items):
            self._continue(choice, items[first:] if first else items)  # type: ignore[arg-type]

    def _continue(self, choice: "_ChoiceStream", token_ids: list[int]) -> None:
        """Tells tokens after which the choice goes on; its fields and the metrics are touched once for all of them."""
        if choice.has_ended:
            return  # by a stop string
        delta, now = choice.stream.push(token_ids), time.monotonic()
        self._service.metrics.tokens(delta.num_tokens, now - choice.last_token_at)
        choice.last_token_at = now
        self._tell(choice, delta, token_ids, None, engine_goes_on=True)

    def _take_output(self, choice: "_ChoiceStream", output: EngineOutput) -> None:
        if output.finish_reason == "error":
            choice.has_ended = True
            del self._choices[output.request_id]
            self._service.metrics.finished("error")
            raise ApiError(500, output.error or "the request failed", kind="server_error", code="engine_error")
        if output.prompt_logprobs is not None:
            self._tell_prompt(choice, output.prompt_logprobs)
            return
        delta = choice.stream.push(output.token_ids, output.finish_reason, output.stop_token_id)
        if self._prompt_only:
            delta = OutputDelta([], 0, delta.finish_reason and "length")
        self._observe(choice, output, delta.num_tokens)
        self._tell(choice, delta, output.token_ids, output.logprobs, engine_goes_on=output.finish_reason is None)

    def _tell_prompt(self, choice: "_ChoiceStream", part: PromptLogprobs) -> None:
        """Tells of the prompt's tokens that have not been told of; a request that was pre-empted begins anew."""
        is_first, part = not choice.num_told, part.behind(choice.num_told)
        if is_first or len(part):
            choice.num_told = part.start + len(part)
            self._on_update(Update(choice.index, [], [], prompt=part))

    def _tell(
        self,
        choice: "_ChoiceStream",
        delta: OutputDelta,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None,
        engine_goes_on: bool,
    ) -> None:
        count = delta.num_tokens
        choice.num_tokens += count
        self._completion_tokens += count
        self._reasoning_tokens += delta.num_reasoning_tokens
        if count < len(token_ids):
            token_ids = token_ids[:count]
        if logprobs is not None:
            logprobs = logprobs[:count]
        update = Update(choice.index, delta.pieces, token_ids, logprobs)
        if delta.finish_reason is not None:
            update.finish_reason, update.stop_reason = delta.finish_reason, delta.stop_reason
            self._service.metrics.add("dropped_calls", delta.num_dropped_calls)
            self._end(choice, delta.finish_reason, engine_goes_on)
        self._on_update(update)
        if not self._choices:
            self._finish(None)

    def _observe(self, choice: "_ChoiceStream", output: EngineOutput, num_tokens: int) -> None:
        metrics, now = self._service.metrics, time.monotonic()
        if not choice.has_tokens and output.token_ids:
            waited, choice.first_token_at = now - self._started_at, now
            self.first_token_at = self.first_token_at or now
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

    def _end(self, choice: "_ChoiceStream", reason: str, engine_goes_on: bool) -> None:
        choice.has_ended = True
        del self._choices[choice.request_id]
        if engine_goes_on:
            self._service.engine.abort([choice.request_id])
        metrics = self._service.metrics
        metrics.finished("stop" if reason == "tool_calls" else reason)
        metrics.observe("e2e", time.monotonic() - self._started_at)
        metrics.observe("prompt_length", len(self.prompt_of(choice.index).token_ids))
        metrics.observe("answer_length", choice.num_tokens)
        if choice.has_tokens:
            metrics.observe("decode", choice.last_token_at - choice.first_token_at)


class _ChoiceStream:
    """Where the engine's outputs of one choice arrive; see `dsv3.server.engine.client.Sink`."""

    __slots__ = (
        *("generation", "index", "request_id", "stream", "pending"),
        *("has_ended", "has_tokens", "is_queued", "first_token_at", "last_token_at"),
        *("num_tokens", "resumed", "num_told"),
    )

    def __init__(
        self, generation: Generation, index: int, request_id: int, stream: OutputStream, resumed: Resumed | None = None
    ):
        self.generation, self.index, self.request_id, self.stream = generation, index, request_id, stream
        self.resumed = resumed
        self.pending: list[int | EngineOutput] = []
        self.is_queued = self.has_tokens = self.has_ended = False
        self.num_tokens = 0
        self.num_told = 0  # tokens of the prompt, from the first on, whose log-probabilities were told
        self.first_token_at = self.last_token_at = time.monotonic()

    def arrived(self) -> None:
        """Takes what has come."""
        self.generation.take(self)

    def fail(self, error: Exception) -> None:
        """Ends the whole answer."""
        self.generation.fail(self, error)


async def prepare_requests(
    service: Service,
    prompts: list[EncodedPrompt],
    sampling: SamplingParams,
    cache_salt: str,
    pages_from: str,
    rank: int | None,
    resumed: Sequence[Resumed],
    priority: int = 0,
    grammar: str = "",
) -> tuple[int, list[PreparedRequest]]:
    """Returns the first id of the choices, and the engine's requests; raises ApiError.

    There is one for each prompt, or one for each resumed choice that goes on. Long prompts are hashed off the event
    loop.
    """
    if sampling.stop and service.tokenizer is None:
        raise invalid("stop: this model has no tokenizer; use stop_token_ids", "stop", "no_tokenizer")
    rules, capacity = service.require_ready().rules, service.engine.capacity
    if (count := sampling.n * len(prompts)) > capacity:
        raise invalid(f"{count} sequences in one request; this server holds {capacity}", "n")
    try:
        service.engine.require_room(count)
    except Busy as error:
        raise _api_error(service, error) from None
    first = service.engine.new_ids(count)
    common = EngineRequest(
        request_id=first,
        prompt_token_ids=(),
        sampling=sampling,
        cache_salt=cache_salt,
        pages_from=pages_from,
        rank=rank,
        priority=priority,
        grammar=grammar,
    )
    requests = _resuming(common, prompts, resumed) if resumed else _for_prompts(common, prompts)
    is_long = sum(len(r.prompt_token_ids) + len(r.answer_token_ids) for r in requests) > _INLINE_TOKENS
    try:
        return first, await service.run(is_long, lambda: [prepare(request, rules) for request in requests])
    except PromptTooLong as error:
        raise does_not_fit(error.length, sampling.max_tokens or 1, error.limit) from None
    except NotInVocabulary as error:
        raise not_in_vocabulary(error.vocab_size) from None
    except InvalidRequest as error:
        raise invalid(str(error)) from None


def _for_prompts(common: EngineRequest, prompts: list[EncodedPrompt]) -> list[EngineRequest]:
    """Returns a request for each prompt, like `common` otherwise."""
    replace, n = msgspec.structs.replace, common.sampling.n
    return [
        replace(common, request_id=common.request_id + n * i, prompt_token_ids=prompt.token_ids)
        for i, prompt in enumerate(prompts)
    ]


def _resuming(common: EngineRequest, prompts: list[EncodedPrompt], resumed: Sequence[Resumed]) -> list[EngineRequest]:
    """Returns a request for each choice that has not ended: no two of them have the same tokens."""
    replace, n = msgspec.structs.replace, common.sampling.n
    return [
        replace(
            common,
            request_id=common.request_id + i,
            prompt_token_ids=prompts[i // n].token_ids,
            sampling=sampling_of(common.sampling, i % n),
            answer_token_ids=choice.token_ids,
        )
        for i, choice in enumerate(resumed)
        if choice.finish_reason is None
    ]


def _api_error(service: Service, error: Exception) -> ApiError:
    if isinstance(error, Busy):
        service.metrics.rejected("queue_full")
        return unavailable(str(error), "queue_full")
    if isinstance(error, EngineUnavailable):
        return unavailable(str(error), "engine_unavailable", retry_after=5)
    if isinstance(error, EngineDied):
        service.metrics.add("given_up", 1)
        return ApiError(500, str(error), kind="server_error", code=ENGINE_DIED)
    return invalid(str(error)) if isinstance(error, Refused) and error.invalid else internal()
