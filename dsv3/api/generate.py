"""Runs the sequences of one HTTP request in the engine and turns their tokens into text as they come."""

import dataclasses
import secrets
import time
from collections.abc import AsyncGenerator

from dsv3.api.engine_client import Busy, EngineDead, Refused, Subscription
from dsv3.api.errors import ApiError, internal, invalid, unavailable
from dsv3.api.prepare import Prompt
from dsv3.api.responses import PromptTokensDetails, Usage
from dsv3.api.service import Service
from dsv3.prepare import PreparedRequest, prepare_all
from dsv3.request import EngineOutput, FinishReason, InvalidRequest, TokenLogprobs, fan_out
from dsv3.sampling_params import SamplingParams
from dsv3.text.output import TextStream


@dataclasses.dataclass(slots=True)
class Update:
    """What came for one choice: text, the tokens it was read from, and at the end why it ended."""

    choice: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclasses.dataclass(slots=True)
class _Choice:
    index: int
    request_id: int
    stream: TextStream
    last_token_at: float | None = None


class Generation:
    """`n` choices for each of `prompts`, prompt by prompt, choices numbered throughout.

    Nothing is sent to the engine before iteration starts. Ending the iteration early, for whatever reason, frees what
    the engine holds. Raises ApiError.
    """

    def __init__(self, service: Service, prompts: list[Prompt], sampling: SamplingParams, cache_salt: str | None):
        if sampling.stop and service.tokenizer is None:
            raise invalid("stop: this model has no tokenizer; use stop_token_ids", "stop", "no_tokenizer")
        self.id = secrets.token_hex(16)
        self.prompts = prompts
        self.n = sampling.n
        self._service = service
        self._sampling = sampling
        self._salt = cache_salt or ""
        self._started_at = time.monotonic()
        self._choices: dict[int, _Choice] = {}
        self._completion_tokens = 0
        self._cached_tokens: dict[int, int] = {}

    def prompt_of(self, choice: int) -> Prompt:
        """The prompt that a choice continues."""
        return self.prompts[choice // self.n]

    @property
    def usage(self) -> Usage:
        """Tokens so far; each prompt is counted once."""
        prompt = sum(len(p.token_ids) for p in self.prompts)
        cached = PromptTokensDetails(sum(self._cached_tokens.values()))
        return Usage(prompt, self._completion_tokens, prompt + self._completion_tokens, cached)

    async def updates(self) -> AsyncGenerator[list[Update]]:
        """All updates that have come since the last time, until every choice has ended."""
        self._service.enter()
        try:
            subscription = self._submit()
            while self._choices:
                yield [
                    update for output in await self._receive(subscription) if (update := self._take(output)) is not None
                ]
        finally:
            self._abort()
            self._service.leave()

    def _submit(self) -> Subscription:
        self._service.require_ready()
        total = self.n * len(self.prompts)
        if total > self._service.engine.capacity:
            text = f"{total} sequences in one request; this server holds {self._service.engine.capacity}"
            raise invalid(text, "n")
        if not self._service.engine.has_room_for(total):
            raise self._busy("the queue is full")
        requests = [request for i in range(len(self.prompts)) for request in self._requests(i)]
        for index, request in enumerate(requests):
            stream = TextStream(self._service.tokenizer, request.sampling)
            self._choices[request.request_id] = _Choice(index, request.request_id, stream)
        try:
            return self._service.engine.submit(requests)
        except (Busy, EngineDead) as error:
            self._choices.clear()
            raise self._api_error(error) from None

    def _requests(self, prompt: int) -> list[PreparedRequest]:
        engine, rules = self._service.engine, self._service.require_ready().rules
        first = engine.new_ids(self.n)
        try:
            return prepare_all(fan_out(first, self.prompts[prompt].token_ids, self._sampling, self._salt), rules)
        except InvalidRequest as error:
            raise invalid(str(error)) from None

    async def _receive(self, subscription: Subscription) -> list[EngineOutput]:
        try:
            return await subscription.get()
        except (Busy, Refused, EngineDead) as error:
            if isinstance(error, EngineDead):
                for _ in self._choices:
                    self._service.metrics.finished("error")
            self._choices.clear()  # the engine holds none of them
            raise self._api_error(error) from None

    def _api_error(self, error: Exception) -> ApiError:
        if isinstance(error, Busy):
            return self._busy(str(error))
        if isinstance(error, EngineDead):
            return unavailable(str(error), "engine_unavailable", retry_after=5)
        return invalid(str(error)) if isinstance(error, Refused) and error.invalid else internal()

    def _busy(self, text: str) -> ApiError:
        self._service.metrics.rejected("queue_full")
        return unavailable(text, "queue_full")

    def _take(self, output: EngineOutput) -> Update | None:
        choice = self._choices.get(output.request_id)
        if choice is None:
            return None  # it has ended by a stop string
        if output.finish_reason == "error":
            del self._choices[output.request_id]
            self._service.metrics.finished("error")
            raise self._failed(output)
        delta = choice.stream.push(output.token_ids, output.finish_reason, output.stop_token_id)
        self._observe(choice, output, delta.num_tokens)
        if delta.finish_reason is not None:
            self._end(choice, delta.finish_reason, engine_goes_on=output.finish_reason is None)
        logprobs = None if output.logprobs is None else output.logprobs[: delta.num_tokens]
        tokens = output.token_ids[: delta.num_tokens]
        return Update(choice.index, delta.text, tokens, logprobs, delta.finish_reason, delta.stop_reason)

    def _failed(self, output: EngineOutput) -> ApiError:
        if self._service.engine.state == "failed":
            return unavailable(self._service.engine.reason, "engine_unavailable", retry_after=5)
        return ApiError(500, output.error or "the request failed", kind="server_error", code="engine_error")

    def _observe(self, choice: _Choice, output: EngineOutput, num_tokens: int) -> None:
        metrics, now = self._service.metrics, time.monotonic()
        if choice.last_token_at is None and output.token_ids:
            metrics.observe("ttft", now - self._started_at)
            if output.queue_seconds is not None:
                metrics.observe("queue", output.queue_seconds)
            prompt = choice.index // self.n
            metrics.prompt_tokens.inc(len(self.prompts[prompt].token_ids))
            self._cached_tokens[prompt] = max(self._cached_tokens.get(prompt, 0), output.num_cached_tokens)
        elif choice.last_token_at is not None and output.token_ids:
            metrics.observe("itl", (now - choice.last_token_at) / len(output.token_ids))
        choice.last_token_at = now
        self._completion_tokens += num_tokens
        metrics.generation_tokens.inc(num_tokens)

    def _end(self, choice: _Choice, reason: FinishReason, engine_goes_on: bool) -> None:
        del self._choices[choice.request_id]
        if engine_goes_on:
            self._service.engine.abort([choice.request_id])
        self._service.metrics.finished(reason)
        self._service.metrics.observe("e2e", time.monotonic() - self._started_at)

    def _abort(self) -> None:
        """Frees what is still running; the client has gone, or another choice has failed."""
        if self._choices:
            self._service.engine.abort(list(self._choices))
            for _ in self._choices:
                self._service.metrics.finished("abort")
            self._choices.clear()


def whole(updates: list[Update]) -> Update:
    """All updates of one choice as one."""
    last = updates[-1]
    logprobs = [entry for u in updates for entry in u.logprobs or []]
    return Update(
        last.choice,
        "".join(u.text for u in updates),
        [token for u in updates for token in u.token_ids],
        logprobs or None,
        last.finish_reason,
        last.stop_reason,
    )


async def collect(generation: Generation) -> list[Update]:
    """Runs a generation to its end; one update for each choice, in order."""
    by_choice: dict[int, list[Update]] = {}
    async for updates in generation.updates():
        for update in updates:
            by_choice.setdefault(update.choice, []).append(update)
    return [whole(by_choice[choice]) for choice in sorted(by_choice)]
