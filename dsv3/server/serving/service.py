"""`Service`: what the handlers share: engine client, tokenizer, chat template, metrics, and whether requests are taken.

`make_service` builds it for a model directory, `start_engines` starts its engines.
"""

import array
import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from dsv3.files import read_json
from dsv3.sampling_params import SamplingParams
from dsv3.server.config import ServerConfig
from dsv3.server.engine.client import EngineClient
from dsv3.server.engine.data_parallel import DataParallelClient, device_environments
from dsv3.server.engine.messages import FIRST_SENDER, EngineInfo, Start, StartProgress
from dsv3.server.engine.supervisor import EngineSupervisor
from dsv3.server.grammars import GrammarPool
from dsv3.server.limits import SMALL_BYTES, WAIT_S, BodyReader, Budget, ThreadQueue, WorkersBusy
from dsv3.server.protocol.errors import QUEUE_FULL, ApiError, invalid, too_long, unavailable
from dsv3.server.serving.logprobs import LogprobEncoder
from dsv3.server.serving.metrics import Metrics, SharedNumbers
from dsv3.server.serving.metrics_history import MetricsHistory, SnapshotPoller
from dsv3.server.templates import TemplatePool
from dsv3.server.tenants import OPERATOR, Tenant, Tenants, cache_salt
from dsv3.server.tracing import Tracer
from dsv3.server.worker_process import WorkerDied
from dsv3.text.chat_template import TemplateError, uses_tools, with_tool_preamble
from dsv3.text.parsers import Parsers
from dsv3.text.tokenizer import Tokenizer, TokenizerError, TokenizerNotFound, encoder_note

_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(model_dir: Path) -> dict[str, Any]:
    """Returns the default sampling parameters of generation_config.json; empty without the file.

    `do_sample` false means greedy. Raises ValueError with the file's name for invalid values.
    """
    path = model_dir / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        found = read_json(path)
        defaults = {name: found[name] for name in _NAMES if found.get(name) is not None}
        if found.get("do_sample") is False:
            defaults = {"temperature": 0.0}
        SamplingParams(**defaults)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: {error}") from None
    return defaults


# Shorter texts are encoded on the event loop: handing them to a thread would cost more.
_INLINE_CHARS = 1024
# A text with more characters per token of the limit is most likely too long: its tokens are counted first.
_LIKELY_CHARS_PER_TOKEN = 8


def _encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool, limit: int) -> array.array[int] | None:
    """Returns the token ids of a text; None where they certainly are more than `limit`."""
    if len(text) > _LIKELY_CHARS_PER_TOKEN * limit and tokenizer.surely_exceeds(text, limit):
        return None
    return array.array("i", tokenizer.encode(text, add_special_tokens))


class Service:
    """One served model, by default under the first of `config.model_names`.

    `chat_tokenizer` encodes what `templates` render, by default `tokenizer`. `parsers` make the parsers of chat
    answers; `shows_tools`: the chat template renders tools. `created` is the instance's start in Unix time, now by
    default. Requests wait at most `wait_s` seconds for shared workers, forever if it is None.
    """

    def __init__(
        self,
        config: ServerConfig,
        engine: EngineClient,
        tokenizer: Tokenizer | None = None,
        templates: TemplatePool | None = None,
        *,
        chat_tokenizer: Tokenizer | None = None,
        parsers: Parsers | None = None,
        shows_tools: bool = False,
        grammars: GrammarPool | None = None,
        numbers: SharedNumbers | None = None,
        created: int | None = None,
        wait_s: float | None = WAIT_S,
    ):
        self.config = config
        self.created = int(time.time()) if created is None else created
        self.sampling_defaults = sampling_defaults(config.model_dir)
        self.tenants = Tenants(config.tenants)
        self.engine = engine
        self.tokenizer = tokenizer
        self.chat_tokenizer = chat_tokenizer or tokenizer
        self.templates, self.grammars = templates, grammars
        self.parsers, self.shows_tools = parsers, shows_tools
        self.logprobs = LogprobEncoder(tokenizer)
        self.metrics = Metrics(config.model_names[0], numbers, self.tenants, config)
        self.history, self.snapshot_poller = MetricsHistory(self.metrics), SnapshotPoller(engine)
        self.tracer: Tracer | None = None
        self.leaving = False  # reports "draining", and still takes requests
        self.draining = False
        self.idle = asyncio.Event()
        self.idle.set()
        self.active = 0
        # A text is encoded whole, because no cut is exact for every tokenizer. One thread each for small and large
        # texts: encoding never takes more than two cores from the engine.
        self._small_texts, self._large_texts = ThreadQueue("encode-small", wait_s), ThreadQueue("encode-large", wait_s)
        self._preparing, self._bodies = ThreadQueue("prepare", wait_s), BodyReader(wait_s)
        self.budget = Budget()
        engine.on_stats = self.metrics.update
        self.metrics.info = lambda: engine.info
        self.metrics.engines = lambda: [(member.state == "ready", member.stats) for member in engine.members]
        engine.on_resumed = lambda: self.metrics.add("continued", 1)

    @property
    def status(self) -> Literal["ok", "starting", "restarting", "draining", "failed"]:
        if self.leaving or self.draining:
            return "draining"
        state = self.engine.state
        return {"ready": "ok", "closed": "failed"}.get(state, state)  # type: ignore[return-value]

    @property
    def reason(self) -> str:
        return "the server is shutting down" if self.status == "draining" else self.engine.reason

    def require_ready(self) -> EngineInfo:
        """Returns the engine's info; raises ApiError 503 where requests are not taken.

        Requests are taken while the engine restarts: they wait for it.
        """
        is_taken = self.engine.state in ("ready", "restarting") and not self.draining
        if not is_taken or self.engine.info is None:
            self.metrics.record_rejected(self.status)
            raise unavailable(self.reason, self.status, retry_after=5)
        return self.engine.info

    def require_model(self, name: str | None) -> str:
        """Returns the model name for the response; raises ApiError 404 for a model that is not served."""
        if name is None:
            return self.config.model_names[0]
        if name not in self.config.model_names:
            raise ApiError(
                404, "the model does not exist; GET /v1/models lists it", param="model", code="model_not_found"
            )
        return name

    def cache_salt(self, tenant: Tenant | None, given: str | None) -> str:
        """Returns the salt of a request's page keys; raises ApiError 400 where one is required and missing."""
        isolation = self.config.options.prefix_cache_isolation
        if given is None and isolation == "salt":
            raise invalid("cache_salt: this server requires one", "cache_salt", "cache_salt_required")
        return cache_salt(isolation, tenant, given)

    def priority(self, tenant: Tenant | None, given: int) -> int:
        """Returns a request's priority; raises ApiError 403 for one below 0 of a tenant other than the operator."""
        if given < 0 and self.tenants.has_several and (tenant is None or tenant.name != OPERATOR):
            text = f"priority: where there are several API keys, only the one named {OPERATOR} may go below 0"
            raise ApiError(403, text, kind="permission_error", param="priority", code="not_the_operator")
        return given

    @contextlib.contextmanager
    def busy_is_503(self) -> Iterator[None]:
        """Turns WorkersBusy in the block into ApiError 503, and counts it."""
        try:
            yield
        except WorkersBusy as error:
            self.metrics.record_rejected(QUEUE_FULL)
            raise unavailable(str(error), QUEUE_FULL) from None

    @contextlib.contextmanager
    def reserve_memory(self) -> Iterator[Callable[[int], None]]:
        """Yields a function that reserves bytes for a request until the end of the block.

        It raises ApiError 503 where all requests together exceed the limit.
        """
        with self.budget.reserve() as reservation:

            def grow(nbytes: int) -> None:
                with self.busy_is_503():
                    reservation.grow(nbytes)

            yield grow

    def enter(self) -> None:
        """Counts a request as active; draining waits for all active ones."""
        self.active += 1
        self.idle.clear()

    def leave(self) -> None:
        """Counts a request as ended."""
        self.active -= 1
        if not self.active:
            self.idle.set()

    async def encode(
        self, text: str, add_special_tokens: bool, param: str, tokenizer: Tokenizer | None = None
    ) -> array.array[int]:
        """Returns the token ids of a text; raises ApiError 400 if it cannot fit the context."""
        tokenizer = tokenizer or self.tokenizer
        if tokenizer is None:
            raise invalid("this model has no tokenizer: send the prompt as token ids", param, "no_tokenizer")
        limit, ids = self.require_ready().rules.max_model_len, None
        try:
            if len(text) <= limit * tokenizer.max_token_chars:
                ids = await self._encode(lambda: _encode(tokenizer, text, add_special_tokens, limit), text)
        except TokenizerError as error:
            raise invalid(str(error), param) from None
        if ids is None:
            raise too_long(limit, f"a text of {len(text)} characters, which is more tokens than that")
        return ids

    async def _encode[T](self, work: Callable[[], T], text: str) -> T:
        if len(text) <= _INLINE_CHARS:
            return work()
        nbytes = sys.getsizeof(text)
        with self.busy_is_503():
            return await (self._small_texts if nbytes <= SMALL_BYTES else self._large_texts).run(nbytes, work)

    async def run[T](self, is_long: bool, work: Callable[[], T]) -> T:
        """Runs `work` and returns its result, in a thread if it `is_long`.

        Raises ApiError 503 where the queue of that thread is full.
        """
        if not is_long:
            return work()
        with self.busy_is_503():
            return await self._preparing.run(0, work)

    async def read_body[T](self, nbytes: int, work: Callable[[], T]) -> T:
        """Runs `work`, which decodes a body of `nbytes`; raises ApiError 503 where too many bodies wait."""
        with self.busy_is_503():
            return await self._bodies.run(nbytes, work)

    async def close(self) -> None:
        """Stops the workers; texts that are being encoded are finished first."""
        for pool in (self.templates, self.grammars):
            if pool is not None:
                await pool.close()
        for thread in (self._small_texts, self._large_texts, self._preparing, self._bodies):
            await thread.close()


async def make_service(
    config: ServerConfig,
    engine: EngineClient,
    numbers: SharedNumbers | None = None,
    created: int | None = None,
    wait_s: float | None = WAIT_S,
) -> Service:
    """Builds the service of a model directory; `created` and `wait_s` are as in `Service`.

    Raises TokenizerError for an invalid tokenizer, ValueError for an invalid generation_config.json.
    """
    tokenizer = _tokenizer(config)
    chat_tokenizer = tokenizer
    if tokenizer is not None and config.options.escape_special_tokens:
        chat_tokenizer = tokenizer.hiding_special_tokens()
    parsers = template = None
    if tokenizer is not None:
        template, options = tokenizer.chat_template, config.options
        parsers = Parsers(tokenizer, template, options.reasoning_parser, options.tool_call_parser)
        template = None if template is None else with_tool_preamble(template, parsers.dialect)
    templates = await _templates(config, chat_tokenizer, template, wait_s)
    grammars = None
    if parsers is not None:
        file = config.model_dir / "tokenizer.json"
        grammars = GrammarPool(file, wait_s, dialect=parsers.dialect_name, marker_ids=parsers.marker_ids)
        reasoning = "separate" if parsers.splits_reasoning else "part of the content"
        config.notify(f"tool-call format: {parsers.dialect_name or 'unknown'}; reasoning: {reasoning}")
        if (note := encoder_note(config.model_dir)) is not None:
            config.notify(note)
    return Service(
        config,
        engine,
        tokenizer,
        templates,
        chat_tokenizer=chat_tokenizer,
        parsers=parsers,
        shows_tools=uses_tools(template or ""),
        grammars=grammars,
        numbers=numbers,
        created=created,
        wait_s=wait_s,
    )


def _tokenizer(config: ServerConfig) -> Tokenizer | None:
    try:
        return Tokenizer.from_directory(config.model_dir)
    except TokenizerNotFound:
        config.notify("the model has no tokenizer.json, tiktoken.model or tekken.json: prompts must be token ids")
        return None


async def _templates(
    config: ServerConfig, tokenizer: Tokenizer | None, template: str | None, wait_s: float | None
) -> TemplatePool | None:
    if tokenizer is None:
        return None
    if template is None:
        config.notify("the tokenizer has no chat template: /v1/chat/completions is off")
        return None
    tokens, hidden = tokenizer.special_tokens, tokenizer.markers.hidden or None
    pool = TemplatePool(template, tokens, config.template_deadline_s, wait_s, hidden)
    try:
        await pool.check()
    except (TemplateError, WorkerDied) as error:
        config.notify(f"{error}: /v1/chat/completions is off")
        await pool.close()
        return None
    return pool


def make_client(config: ServerConfig, sender: int = FIRST_SENDER) -> EngineClient:
    """Returns the engine client of an API server, by default number 0, not connected yet."""
    members = [
        EngineClient(
            max_num_queued_reqs=config.engine.max_num_queued_reqs,
            watchdog_s=config.watchdog_s,
            heartbeat_watchdog_s=config.heartbeat_watchdog_s,
            max_restarts=config.options.max_request_restarts,
            sender=sender,
        )
        for _ in range(config.num_engines)
    ]
    return members[0] if len(members) == 1 else DataParallelClient(members, sender)


async def start_engines(config: ServerConfig, service: Service) -> list[EngineSupervisor]:
    """Starts the engines and connects the service to them; `service.engine.state` becomes "ready" later.

    `config.notify` receives lines about the start. The processes are killed when no engine will follow. Raises
    ValueError where devices are missing.
    """
    engine, options = service.engine, config.engine_options
    start = Start(config.engine_factory, str(config.model_dir), options, config.cluster, config.factory_options)
    policy = config.restarts if config.options.max_request_restarts else None
    environments: list[Mapping[str, str] | None] = [None]
    if config.num_engines > 1:
        environments = device_environments(config.num_engines, options.tensor_parallel_size)
    supervisors = [
        EngineSupervisor(member, start, policy, environment)
        for member, environment in zip(engine.members, environments, strict=True)
    ]

    def show_progress(progress: StartProgress) -> None:
        """Prints the engine's progress while it starts; of counted steps every tenth."""
        if not progress.total:
            config.notify(progress.text)
        elif progress.done == progress.total or progress.done % max(1, progress.total // 10) == 0:
            config.notify(f"[{progress.done}/{progress.total}] {progress.text}")

    def kill(_: str) -> None:
        for supervisor in supervisors:
            supervisor.kill()

    engine.on_progress, engine.on_failure = show_progress, kill
    for supervisor in supervisors:
        await supervisor.connect()
    return supervisors
