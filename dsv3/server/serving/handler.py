"""`RequestHandler`: what the handlers of all APIs have in common.

The JSON of a complete response is joined in slices, so that a large one does not block the event loop: the encoded
response has a gap (a control character) where the parts go. Encoded in one piece, log-probabilities of 200,000 tokens
with 20 alternatives each blocked the loop for 850 ms and took twice the memory.
"""

import abc
import array
import asyncio
import base64
import functools
import io
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np

from dsv3.scheduler.request import MAX_PRIORITY, EngineRequest, ExpertIds, RequestRules, routed_expert_rows
from dsv3.server.limits import SMALL_BYTES
from dsv3.server.otlp import Span
from dsv3.server.protocol.errors import ApiError, invalid
from dsv3.server.protocol.openai import FinishReason, SampledRequest, Usage
from dsv3.server.serving.generation import ChoiceUpdate, Generation, prepare_requests
from dsv3.server.serving.kv_transfer import pages_from, parse_bootstrap, prompt_experts, transfer_params
from dsv3.server.serving.prompts import EncodedPrompt
from dsv3.server.serving.request_parsing import read_request
from dsv3.server.serving.resume import ResumedChoice, replay_choices, resumed_tokens
from dsv3.server.serving.sampling import build_grammar, parse_constraint, sampling_params
from dsv3.server.serving.service import Service
from dsv3.server.serving.timeline import RequestTimeline
from dsv3.server.tenants import Tenant
from dsv3.text.call_grammar import AnswerConstraints
from dsv3.text.deltas import ReasoningDelta, TextDelta, ToolArgumentsDelta, ToolCallStart
from dsv3.text.parser import AnswerParser

# Bytes that are joined before the event loop runs other tasks: 1 ms where they come in records of 1 KiB.
_SLICE_BYTES = 2**20
_GAP = b"\x01"  # never part of encoded JSON, which escapes control characters

LIST_OF_GAP = msgspec.Raw(b"[%s]" % _GAP)
"""A list in a response whose items are filled in later."""
TEXT_OF_GAP = msgspec.Raw(b'"%s"' % _GAP)
"""A text in a response that is filled in later."""
_ENCODED_BYTES = 3 * 2**16  # encoded to base64 at a time
_MAX_ARRAY_BYTES = {"return_routed_experts": 2**30, "return_sampling_mask": 2**28}


def bound_arrays(name: str, num_bytes: int) -> None:
    """Raises ApiError where the arrays that `name` asks for are too long for a response that is not streamed."""
    if num_bytes > (limit := _MAX_ARRAY_BYTES[name]):
        raise invalid(
            f"{name}: more than {limit} bytes in a response; ask for fewer tokens or choices, or stream", name
        )


class CompleteChoice:
    """The output of one choice, collected; `columns` are the encoded log-probabilities, one list per JSON list."""

    def __init__(self, index: int):
        self.index = index
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.columns: list[list[bytes]] = []
        self._routed_experts: list[ExpertIds] = []
        self.kept: list[bytes] = []  # the tokens that each token was drawn from
        self._weight_versions: list[tuple[int, str]] = []
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

    @property
    def weights(self) -> dict[str, Any]:
        """The fields `weight_version` and `weight_versions` of a choice, without those that are absent."""
        if not (found := self._weight_versions):
            return {}
        return {"weight_version": found[-1][1]} | ({"weight_versions": found} if len(found) > 1 else {})

    def add(self, update: ChoiceUpdate, columns: Sequence[bytes]) -> None:
        """Appends an update; `columns` are those of its log-probabilities."""
        for delta in update.deltas:
            match delta:
                case TextDelta():
                    self._text.write(delta.text)
                case ReasoningDelta():
                    self._reasoning.write(delta.text)
                case ToolCallStart():
                    self._calls.append((delta, io.StringIO()))
                case ToolArgumentsDelta():
                    self._calls[delta.index][1].write(delta.text)
        version = update.weight_version
        if version is not None and (not self._weight_versions or self._weight_versions[-1][1] != version):
            self._weight_versions.append((len(self._token_ids), version))
        self._token_ids.extend(update.token_ids)
        if update.routed_experts is not None:
            self._routed_experts.append(update.routed_experts)
        self.kept += _kept(update)
        self.finish_reason, self.stop_reason = update.finish_reason, update.stop_reason
        self.columns = self.columns or [[] for _ in columns]
        for column, items in zip(self.columns, columns, strict=True):
            if items:
                column.append(items)

    def routed_experts(self, prompt_tokens: int) -> Iterator[bytes]:
        """Yields the base64 of a .npy file: the experts of all tokens behind which the response has another."""
        return _encoded(self._expert_rows(prompt_tokens + len(self._token_ids) - 1))

    def prompt_experts(self, tokens: int) -> Iterator[bytes]:
        """Yields the base64 of the ids of the experts of the prompt's `tokens` tokens."""
        return _base64(map(_raw, self._expert_rows(tokens)))

    def _expert_rows(self, tokens: int) -> list[np.ndarray]:
        return list(routed_expert_rows(self._routed_experts, tokens))


def _kept(update: ChoiceUpdate) -> list[bytes]:
    return [token.kept for token in update.logprobs or () if token.kept is not None]


def _encoded(rows: Sequence[np.ndarray]) -> Iterator[bytes]:
    """Yields the base64 of a .npy file that has the rows of these arrays, `[n, L, K]` each."""
    like, head = rows[0] if rows else np.zeros((0, 0, 0), np.uint8), io.BytesIO()
    shape = (sum(map(len, rows)), *like.shape[1:])
    fields = {"descr": like.dtype.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(head, fields)
    return _base64([head.getbuffer(), *map(_raw, rows)])


def _encoded_mask(kept: list[bytes]) -> Iterator[bytes]:
    """Yields the base64 of a .npz file: `counts` int32 `[tokens]`, and the `ids` int32 of all tokens in turn."""
    counts = np.array([len(each) // 4 for each in kept], np.int32)
    file = io.BytesIO()
    np.savez(file, counts=counts, ids=np.frombuffer(b"".join(kept), "<i4"))
    return _base64([file.getbuffer()])


def _raw(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _base64(parts: Iterable[memoryview]) -> Iterator[bytes]:
    """Yields the base64 of bytes that come in parts, of at most `_ENCODED_BYTES` of them at a time."""
    left = b""
    for part in parts:
        for start in range(0, len(part), _ENCODED_BYTES):
            some = left + part[start : start + _ENCODED_BYTES]
            whole = len(some) - len(some) % 3  # only the last piece may be padded
            yield base64.b64encode(some[:whole])
            left = some[whole:]
    yield base64.b64encode(left)


def _text(pieces: Iterable[bytes]) -> msgspec.Raw:
    return msgspec.Raw(b'"%s"' % b"".join(pieces))


def with_commas(items: Iterable[bytes]) -> Iterator[bytes]:
    """Yields the items of a JSON list, commas between them."""
    for i, item in enumerate(items):
        if i:
            yield b","
        yield item


def fill_gaps(json: bytes, gaps: Sequence[Iterable[bytes]]) -> Iterator[bytes]:
    """Yields JSON with each gap replaced by its parts."""
    head, *tails = json.split(_GAP)
    yield head
    for pieces, tail in zip(gaps, tails, strict=True):
        yield from pieces
        yield tail


async def join_slices(pieces: Iterable[bytes]) -> bytes:
    """Joins parts to one bytes object; other tasks run after each slice."""
    whole, since = io.BytesIO(), 0
    for piece in pieces:
        since += whole.write(piece)
        if since >= _SLICE_BYTES:
            since = 0
            await asyncio.sleep(0)
    return whole.getvalue()  # without a copy: a BytesIO holds a bytes object


to_json: Callable[[object], bytes] = msgspec.json.Encoder().encode


def to_event(value: object, name: str | None = None) -> bytes:
    """Returns the lines of a server-sent event with the JSON of a value, without the blank line behind them."""
    data = b"data: " + to_json(value)
    return data if name is None else b"event: %b\n%b" % (name.encode(), data)


class RequestHandler[Request: SampledRequest](abc.ABC):
    """One request: call `prepare`, then `whole` for the complete response, or `start` for events; close `generation`.

    `tenant` is the sender, if known. The request's priority number is raised to `min_priority`.
    """

    request_type: type[Request]
    id_prefix: ClassVar[str]
    stream_end: ClassVar[bytes] = b"data: [DONE]\n\n"
    """Written after the last event of a stream."""
    request: Request
    model: str
    rank: int | None = None
    """The data-parallel rank that must run it; None: the least loaded."""

    def __init__(self, service: Service, body: bytes | bytearray, tenant: Tenant | None = None):
        self.service = service
        self._tenant = tenant
        self.timeline = RequestTimeline()
        self.min_priority = -MAX_PRIORITY
        self.created = int(time.time())
        self._body = body
        self.started: set[int] = set()
        """Choices whose first events the client has."""
        self._num_experts_sent: dict[int, int] = {}  # tokens, by choice
        self._expert_bytes = self._mask_bytes = 0

    @property
    def id(self) -> str:
        """The response's id; set by `prepare`."""
        return f"{self.id_prefix}{self.generation.id}"

    @property
    def usage(self) -> Usage:
        """Token counts so far, and where the time went if the client asks."""
        usage = self.generation.usage
        if not self.timeline.is_shown:
            return usage
        return msgspec.structs.replace(usage, timing=self.timeline.split())

    def summary(self) -> tuple[str, int, int, float | None]:
        """Returns model, prompt tokens, completion tokens and the first token's time, as of now, after `prepare`."""
        usage = self.generation.usage
        return self.model, usage.prompt_tokens, usage.completion_tokens, self.timeline.first_token_at

    @property
    def streams(self) -> bool:
        """Whether the client asks for events; known after `prepare`."""
        return bool(self.request.stream)

    @property
    def includes_usage(self) -> bool:
        """Whether events have a field `usage`, null in all but the last."""
        options = self.request.stream_options
        return options is not None and bool(options.include_usage)

    @property
    def prompt_only(self) -> bool:
        """Whether the response has the prompt alone, without generated text; known after `read`."""
        return False

    @property
    def continuous_usage(self) -> bool:
        """Whether each event has the usage so far (vLLM's `continuous_usage_stats`)."""
        options = self.request.stream_options
        return self.includes_usage and options is not None and bool(options.continuous_usage_stats)

    async def prepare(self) -> None:
        """Parses and validates the request and tokenizes its prompts; raises ApiError. Nothing is generated yet."""
        self.request = await self.read()
        self._body = b""
        self.model = self.service.require_model(self.request.model)
        self.check()
        salt = self.service.cache_salt(self._tenant, self.request.cache_salt)
        priority = self.service.priority(self._tenant, max(self.request.priority or 0, self.min_priority))
        info = self.service.require_ready()
        source = pages_from(self.request.kv_transfer_params, info)
        experts = await self._prompt_experts(info.rules)
        bootstrap = parse_bootstrap(self.request, info)
        with self.timeline.phase("tokenize"):
            prompts = await self.read_prompts()
        if experts is not None and len(prompts) > 1:
            raise invalid("remote_routed_experts: those of one prompt, but there are several", "kv_transfer_params")
        if bootstrap is not None:
            bootstrap.check(len(prompts), self.request.resume is not None)
        sampling = sampling_params(self.service, self.request, prompts, self.max_tokens(), self.num_logprobs())
        began = time.monotonic()
        if grammar := await self.grammar(prompts):
            self.timeline.phases.append(Span("grammar", began, time.monotonic()))
        answered = resumed_tokens(self.service, self.request, sampling, prompts)
        self.request.resume = None  # frees the second copy
        self._resumed = await replay_choices(self.service, prompts, sampling, answered, self.parser, bool(grammar))
        common = EngineRequest(
            request_id=0,
            prompt_token_ids=(),
            sampling=sampling,
            cache_salt=salt,
            pages_from=source,
            rank=self.rank,
            priority=priority,
            grammar=grammar,
            prompt_experts=experts,
            return_timing=self.timeline.is_wanted,
        )
        first, requests = await prepare_requests(self.service, prompts, common, self._resumed)
        if bootstrap is not None:
            requests = bootstrap.with_rooms(requests)
        length = sum(len(prompt.token_ids) for prompt in prompts)
        self._transfer_params = transfer_params(self.request.kv_transfer_params, info, length, streams=self.streams)
        self.generation = Generation(
            self.service,
            prompts,
            sampling,
            requests,
            self._tenant,
            self.timeline,
            first=first,
            resumed=self._resumed,
            includes_resumed=not self.streams,
            prompt_only=self.prompt_only,
        )

    async def read(self) -> Request:
        """Returns the request in the body; raises ApiError."""
        return await read_request(self.service, self.request_type, self._body)

    async def _prompt_experts(self, rules: RequestRules) -> ExpertIds | None:
        """Returns the experts of the prompt that the request brings, None without any; raises ApiError."""
        given = self.request.kv_transfer_params
        if given is None or not (text := given.remote_routed_experts):
            return None
        given.remote_routed_experts = None  # frees the second copy
        return await self.service.run(len(text) > SMALL_BYTES, lambda: prompt_experts(text, rules))

    async def whole(self) -> bytes:
        """Returns the JSON of the complete response; raises ApiError. Cancelling it aborts the engine's requests."""
        choices: dict[int, CompleteChoice] = {}

        def collect(update: ChoiceUpdate) -> None:
            if (choice := choices.get(update.choice)) is None:
                choice = choices[update.choice] = CompleteChoice(update.choice)
            choice.add(update, self.logprob_columns(update))
            self._mask_bytes += sum(map(len, _kept(update)))
            bound_arrays("return_sampling_mask", self._mask_bytes)
            self._expert_bytes += 0 if update.routed_experts is None else len(update.routed_experts.ids)
            bound_arrays("return_routed_experts", self._expert_bytes)

        await self.generation.run(self.parser, collect)
        response, gaps = self.response(LIST_OF_GAP), self.gaps([choices[index] for index in sorted(choices)])
        if (params := self._transfer_params) is not None:
            if self.request.return_routed_experts and len(self.generation.prompts) == 1:
                params |= {"remote_routed_experts": TEXT_OF_GAP}  # all responses have it before their choices
                gaps.insert(0, choices[0].prompt_experts(len(self.generation.prompts[0].token_ids)))
            response = msgspec.structs.replace(response, kv_transfer_params=params)
        return await join_slices(fill_gaps(to_json(response), gaps))

    def gaps(self, wholes: list[CompleteChoice]) -> list[Iterable[bytes]]:
        """Returns what fills the gaps of the complete response: its choices."""
        return [self._choices(wholes)]

    @property
    def returns_arrays(self) -> bool:
        """Whether choices have arrays: `routed_experts` or a `sampling_mask`."""
        return bool(self.request.return_routed_experts or self.request.return_sampling_mask)

    @functools.cached_property
    def is_plain(self) -> bool:
        """Whether events have nothing but deltas until the choice ends."""
        return self.num_logprobs() is None and not self.request.return_token_ids and not self.returns_arrays

    def plain_event(self, choice: msgspec.Struct) -> bytes:
        """Returns the event of a chunk with this choice alone.

        All of a stream's are one struct with another choice: making it takes longer than encoding it.
        """
        self._plain_chunk.choices[0] = choice
        return to_event(self._plain_chunk)

    @functools.cached_property
    def _plain_chunk(self) -> Any:
        return self.chunk([None])

    def fields_of(self, whole: CompleteChoice) -> dict[str, Any]:
        """Returns the fields that a complete choice has in every API; `fill_choice` fills the arrays among them."""
        names = [name for name in ("routed_experts", "sampling_mask") if getattr(self.request, f"return_{name}")]
        return {
            "index": whole.index,
            "finish_reason": whole.finish_reason,
            "token_ids": whole.token_ids if self.request.return_token_ids else msgspec.UNSET,
            **dict.fromkeys(names, TEXT_OF_GAP),
            **whole.weights,
        }

    def fill_choice(
        self, choice: msgspec.Struct, whole: CompleteChoice, columns: Iterable[list[bytes]]
    ) -> Iterator[bytes]:
        """Yields the JSON of a choice with the arrays and the `columns` of log-probabilities in its gaps."""
        arrays = []
        if self.request.return_routed_experts:
            arrays.append(whole.routed_experts(len(self.generation.prompt_of(whole.index).token_ids)))
        if self.request.return_sampling_mask:
            arrays.append(_encoded_mask(whole.kept))
        return fill_gaps(to_json(choice), [*arrays, *map(with_commas, columns)])

    def new_fields_of(self, update: ChoiceUpdate) -> dict[str, Any]:
        """Returns the fields that an event's choice has in every API."""
        return {
            "index": update.choice,
            "finish_reason": update.finish_reason,
            "token_ids": update.token_ids if self.request.return_token_ids else msgspec.UNSET,
            "weight_version": update.weight_version or msgspec.UNSET,
            **self._new_arrays(update),
        }

    def _new_arrays(self, update: ChoiceUpdate) -> dict[str, Any]:
        """Returns the arrays of an event: the experts of tokens that no event has had, and the masks of its tokens."""
        found: dict[str, Any] = {}
        if (part := update.routed_experts) is not None:
            sent = self._num_experts_sent.get(update.choice, 0)
            if len(rows := part.array()[max(0, sent - part.start) :]):
                self._num_experts_sent[update.choice] = max(sent, part.start) + len(rows)
                found["routed_experts"] = _text(_encoded([rows]))
        if kept := _kept(update):
            found["sampling_mask"] = _text(_encoded_mask(kept))
        return found

    def _choices(self, wholes: list[CompleteChoice]) -> Iterator[bytes]:
        for i, whole in enumerate(wholes):
            if i:
                yield b","
            yield from self.choice(whole)

    def start(self, on_event: Callable[[bytes], None], on_end: Callable[[ApiError | None], None]) -> None:
        """Starts to generate; raises ApiError. `on_event` gets each event's lines; `on_end` is called once, last."""

        for choice, resumed in enumerate(self._resumed):
            if resumed.token_ids:
                self.skip(choice, resumed)

        def emit(update: ChoiceUpdate) -> None:
            for event in self.events(update):
                on_event(event)

        def emit_with_usage(update: ChoiceUpdate) -> None:
            usage = b'"usage":' + to_json(self.usage)
            for event in self.events(update):  # inside of a JSON string the quotes would be escaped
                on_event(event.replace(b'"usage":null', usage, 1))

        def end(error: ApiError | None) -> None:
            if error is None and self.includes_usage:
                on_event(to_event(self.chunk([], usage=self.usage)))
            on_end(error)

        self.generation.start(self.parser, emit_with_usage if self.continuous_usage else emit, end)

    def failure(self, error: ApiError) -> bytes:
        """Returns the lines of the event that ends a stream with an error."""
        return b"data: " + error.envelope()

    @abc.abstractmethod
    def check(self) -> None:
        """Raises ApiError for fields that exclude each other."""

    @abc.abstractmethod
    async def read_prompts(self) -> list[EncodedPrompt]:
        """Returns the tokenized prompts."""

    @abc.abstractmethod
    def max_tokens(self) -> int | None:
        """Returns the request's limit on the tokens of each choice; None without one."""

    async def grammar(self, prompts: list[EncodedPrompt]) -> str:
        """Returns the grammar that constrains the answers to `prompts`, "" without one; raises ApiError."""
        if (constraint := parse_constraint(self.request)) is None:
            return ""
        field = "structured_outputs" if self.request.structured_outputs is not None else "response_format"
        return await build_grammar(self.service, AnswerConstraints(constraint=constraint), field, len(prompts))

    @abc.abstractmethod
    def num_logprobs(self) -> int | None:
        """Returns how many alternatives each token comes with; None without log-probabilities."""

    @abc.abstractmethod
    def parser(self, prompt: EncodedPrompt) -> AnswerParser | None:
        """Returns a new parser for one choice; None where its text is not parsed."""

    @abc.abstractmethod
    def response(self, choices: msgspec.Raw) -> msgspec.Struct:
        """Returns the complete response around its encoded choices."""

    @abc.abstractmethod
    def choice(self, whole: CompleteChoice) -> Iterator[bytes]:
        """Yields the JSON of one choice of the complete response."""

    @abc.abstractmethod
    def logprob_columns(self, update: ChoiceUpdate) -> tuple[bytes, ...]:
        """Returns the encoded items of each JSON list of log-probabilities; empty where none are asked for."""

    @abc.abstractmethod
    def events(self, update: ChoiceUpdate) -> list[bytes]:
        """Returns the lines of an update's events."""

    def skip(self, choice: int, resumed: ResumedChoice) -> None:
        """Skips the first events of a choice that is resumed: the client has them from another server."""
        self.started.add(choice)

    @abc.abstractmethod
    def chunk(self, choices: list, usage: object = None) -> msgspec.Struct:
        """Returns one event around its choices."""
