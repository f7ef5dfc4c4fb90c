"""One request on its way to its answer: what chat and text completions have in common.

The JSON of a whole answer is joined from what came, without keeping the event loop: the response has a gap (a control
character) where the pieces go. Encoded at once, log-probabilities of 200,000 tokens with 20 alternatives each kept the
loop for 850 ms and took twice the memory.
"""

import abc
import array
import asyncio
import io
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar, NamedTuple

import msgspec

from dsv3.scheduler.request import MAX_PRIORITY
from dsv3.server.protocol.errors import ApiError
from dsv3.server.protocol.openai import FinishReason, SampledRequest, Usage
from dsv3.server.serving.generation import Generation, Update, prepare_requests
from dsv3.server.serving.kv_transfer import bootstrap_of, pages_from, told
from dsv3.server.serving.prompts import EncodedPrompt
from dsv3.server.serving.request_parsing import read_request
from dsv3.server.serving.resume import Resumed, answered_tokens, replayed
from dsv3.server.serving.sampling import constraint_of, made_grammar, sampling_params
from dsv3.server.serving.service import Service
from dsv3.server.tenants import Tenant
from dsv3.text.call_grammar import Wanted
from dsv3.text.parser import AnswerParser
from dsv3.text.pieces import Reasoning, Text, ToolArguments, ToolCallStart

# Bytes that are joined before others of the event loop have their turn: 1 ms where they come in records of 1 KiB.
_SLICE_BYTES = 2**20
_GAP = b"\x01"  # no JSON has it: control characters are escaped

GAP, LIST_OF_GAP = msgspec.Raw(_GAP), msgspec.Raw(b"[%s]" % _GAP)
"""Stand in a response for what is put there later: a value, the items of a list."""


class WholeChoice:
    """All that came for one choice; `columns` are the JSON of its log-probabilities, as far as they are asked for."""

    def __init__(self, index: int):
        self.index = index
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.columns: list[list[bytes]] = []
        self._text, self._reasoning = io.StringIO(), io.StringIO()
        self._calls: list[tuple[ToolCallStart, io.StringIO]] = []
        self._token_ids = array.array("i")

    @property
    def text(self) -> str:
        return self._text.getvalue()

    @property
    def reasoning(self) -> str:
        return self._reasoning.getvalue()

    @property
    def calls(self) -> list[tuple[ToolCallStart, str]]:
        """The calls with their arguments."""
        return [(call, arguments.getvalue()) for call, arguments in self._calls]

    @property
    def token_ids(self) -> list[int]:
        return self._token_ids.tolist()

    def add(self, update: Update, columns: Sequence[bytes]) -> None:
        """Takes what one update brings; `columns` are those of its log-probabilities."""
        for piece in update.pieces:
            match piece:
                case Text():
                    self._text.write(piece.text)
                case Reasoning():
                    self._reasoning.write(piece.text)
                case ToolCallStart():
                    self._calls.append((piece, io.StringIO()))
                case ToolArguments():
                    self._calls[piece.index][1].write(piece.text)
        self._token_ids.extend(update.token_ids)
        self.finish_reason, self.stop_reason = update.finish_reason, update.stop_reason
        self.columns = self.columns or [[] for _ in columns]
        for column, items in zip(self.columns, columns, strict=True):
            if items:
                column.append(items)


def with_commas(items: Iterable[bytes]) -> Iterator[bytes]:
    """Yields the items of a JSON list, commas between them."""
    for i, item in enumerate(items):
        if i:
            yield b","
        yield item


def filled(json: bytes, gaps: Sequence[Iterable[bytes]]) -> Iterator[bytes]:
    """Yields JSON with the pieces of each gap in its place."""
    head, *tails = json.split(_GAP)
    yield head
    for pieces, tail in zip(gaps, tails, strict=True):
        yield from pieces
        yield tail


async def joined(pieces: Iterable[bytes]) -> bytes:
    """Returns the pieces as one; the event loop looks around after each slice of them."""
    whole, since = io.BytesIO(), 0
    for piece in pieces:
        since += whole.write(piece)
        if since >= _SLICE_BYTES:
            since = 0
            await asyncio.sleep(0)
    return whole.getvalue()  # not copied: a BytesIO holds a bytes object


to_json: Callable[[object], bytes] = msgspec.json.Encoder().encode


class Summary(NamedTuple):
    """What the log tells of an answer; `first_token_at` is a time of `time.monotonic`."""

    model: str
    prompt_tokens: int
    completion_tokens: int
    first_token_at: float | None


def to_event(value: object, name: str | None = None) -> bytes:
    """Returns the lines of a server-sent event with the JSON of a value, without the blank line behind them."""
    head = b"" if name is None else b"event: %b\n" % name.encode()
    return b"%bdata: %b" % (head, to_json(value))


class RequestHandler[Request: SampledRequest](abc.ABC):
    """The answer to the JSON of one request: `prepare` it, then ask for the `whole`, or `start` its events.

    `tenant` sent it, if that is known. Its priority number is `earliest_priority` at least, whatever the request says.
    Whoever has called `start` calls `close`.
    """

    request_type: type[Request]
    id_prefix: ClassVar[str]
    farewell: ClassVar[bytes] = b"data: [DONE]\n\n"
    """What ends a stream, behind its last event."""
    request: Request
    model: str
    rank: int | None = None
    """Where it must run, None for wherever it costs least."""

    def __init__(self, service: Service, body: bytes | bytearray, tenant: Tenant | None = None):
        self.service = service
        self._tenant = tenant
        self.earliest_priority = -MAX_PRIORITY
        self.created = int(time.time())
        self._body = body

    @property
    def id(self) -> str:
        """The answer's id; there is one once it is prepared."""
        return f"{self.id_prefix}-{self.generation.id}"

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        return self.generation.usage

    def summary(self) -> Summary:
        """Returns what the log tells of the answer as far as it has come; there is one once it is prepared."""
        usage = self.usage
        return Summary(self.model, usage.prompt_tokens, usage.completion_tokens, self.generation.first_token_at)

    @property
    def streams(self) -> bool:
        """Whether the client wants events; known once it is prepared."""
        return bool(self.request.stream)

    @property
    def includes_usage(self) -> bool:
        """Whether events carry a field for the usage, null but for the last."""
        options = self.request.stream_options
        return options is not None and bool(options.include_usage)

    @property
    def prompt_only(self) -> bool:
        """Whether the prompt is told and no answer; known once the request is read."""
        return False

    @property
    def continuous_usage(self) -> bool:
        """Whether each event has the usage so far."""
        options = self.request.stream_options
        return self.includes_usage and options is not None and bool(options.continuous_usage_stats)

    async def prepare(self) -> None:
        """Reads the request and its prompts; raises ApiError for one that is refused. Nothing is generated yet."""
        self.request = await self.read()
        self._body = b""
        self.model = self.service.require_model(self.request.model)
        self.check()
        salt = self.service.cache_salt(self._tenant, self.request.cache_salt)
        priority = self.service.priority(self._tenant, max(self.request.priority or 0, self.earliest_priority))
        info = self.service.require_ready()
        source = pages_from(self.request.kv_transfer_params, info)
        bootstrap = bootstrap_of(self.request, info)
        prompts = await self.read_prompts()
        if bootstrap is not None:
            bootstrap.check(len(prompts), self.request.resume is not None)
        sampling = sampling_params(self.service, self.request, prompts, self.max_tokens(), self.num_logprobs())
        grammar = await self.grammar(prompts)
        answered = answered_tokens(self.service, self.request, sampling, prompts)
        self.request.resume = None  # held once
        self._resumed = await replayed(self.service, prompts, sampling, answered, self.parser, bool(grammar))
        first, requests = await prepare_requests(
            self.service, prompts, sampling, salt, source, self.rank, self._resumed, priority, grammar
        )
        if bootstrap is not None:
            requests = bootstrap.joined(requests)
        length = sum(len(prompt.token_ids) for prompt in prompts)
        self._told = told(self.request.kv_transfer_params, info, length, streams=self.streams)
        self.generation = Generation(
            self.service,
            prompts,
            sampling,
            requests,
            self._tenant,
            first=first,
            resumed=self._resumed,
            retells=not self.streams,
            prompt_only=self.prompt_only,
        )

    async def read(self) -> Request:
        """Returns the request in the body; raises ApiError."""
        return await read_request(self.service, self.request_type, self._body)

    async def whole(self) -> bytes:
        """Returns the JSON of the complete answer; raises ApiError. A cancelled call leaves nothing in the engine."""
        choices: dict[int, WholeChoice] = {}

        def take(update: Update) -> None:
            if (choice := choices.get(update.choice)) is None:
                choice = choices[update.choice] = WholeChoice(update.choice)
            choice.add(update, self.logprob_columns(update))

        await self.generation.run(self.parser, take)
        response = self.response(LIST_OF_GAP)
        if self._told is not None:
            response = msgspec.structs.replace(response, kv_transfer_params=self._told)
        return await joined(filled(to_json(response), [self._choices([choices[index] for index in sorted(choices)])]))

    def _choices(self, wholes: list[WholeChoice]) -> Iterator[bytes]:
        for i, whole in enumerate(wholes):
            if i:
                yield b","
            yield from self.choice(whole)

    def start(self, on_event: Callable[[bytes], None], on_end: Callable[[ApiError | None], None]) -> None:
        """Begins to generate; raises ApiError. `on_event` gets each event's lines, `on_end` is called last, once."""

        for choice, resumed in enumerate(self._resumed):
            if resumed.token_ids:
                self.skip(choice, resumed)

        def tell(update: Update) -> None:
            for event in self.events(update):
                on_event(event)

        def tell_with_usage(update: Update) -> None:
            usage = b'"usage":' + to_json(self.usage)
            for event in self.events(update):  # inside of a JSON string the quotes would be escaped
                on_event(event.replace(b'"usage":null', usage, 1))

        def end(error: ApiError | None) -> None:
            if error is None and self.includes_usage:
                on_event(to_event(self.chunk([], usage=self.usage)))
            on_end(error)

        self.generation.start(self.parser, tell_with_usage if self.continuous_usage else tell, end)

    def failure(self, error: ApiError) -> bytes:
        """Returns the lines of the event that ends a stream with an error."""
        return b"data: " + error.envelope()

    def close(self) -> None:
        """Frees what is still running."""
        self.generation.close()

    @abc.abstractmethod
    def check(self) -> None:
        """Raises ApiError for fields that exclude each other."""

    @abc.abstractmethod
    async def read_prompts(self) -> list[EncodedPrompt]:
        """Returns the prompts, encoded."""

    @abc.abstractmethod
    def max_tokens(self) -> int | None:
        """Returns the bound on each choice's tokens, None if the request has none."""

    async def grammar(self, prompts: list[EncodedPrompt]) -> str:
        """Returns what the answers to `prompts` are held to, "" where they are free; raises ApiError."""
        if (constraint := constraint_of(self.request)) is None:
            return ""
        field = "structured_outputs" if self.request.structured_outputs is not None else "response_format"
        return await made_grammar(self.service, Wanted(constraint=constraint), field, len(prompts))

    @abc.abstractmethod
    def num_logprobs(self) -> int | None:
        """Returns how many alternatives are told per token, None for no log-probabilities."""

    @abc.abstractmethod
    def parser(self, prompt: EncodedPrompt) -> AnswerParser | None:
        """Returns a new parser for one choice, None where its text is told as it is."""

    @abc.abstractmethod
    def response(self, choices: msgspec.Raw) -> msgspec.Struct:
        """Returns the complete answer around its choices."""

    @abc.abstractmethod
    def choice(self, whole: WholeChoice) -> Iterator[bytes]:
        """Yields the JSON of one choice of the complete answer."""

    @abc.abstractmethod
    def logprob_columns(self, update: Update) -> tuple[bytes, ...]:
        """Returns the JSON of an update's log-probabilities, the items of each list; none where none are wanted."""

    @abc.abstractmethod
    def events(self, update: Update) -> list[bytes]:
        """Returns the lines of the events that one update makes."""

    @abc.abstractmethod
    def skip(self, choice: int, resumed: Resumed) -> None:
        """Notes that a choice's first events have been told elsewhere."""

    @abc.abstractmethod
    def chunk(self, choices: list, usage: object = None) -> msgspec.Struct:
        """Returns one event."""
