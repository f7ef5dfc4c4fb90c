"""What all answers share: the engine, the tokenizer, the chat template, the metrics, and whether we still serve.

`make_service` makes it for a model's directory, `start_engine` starts its engine.
"""

import array
import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from dsv3.files import read_json
from dsv3.sampling_params import SamplingParams
from dsv3.server.config import ServerConfig
from dsv3.server.engine.client import EngineClient
from dsv3.server.engine.messages import EngineInfo, Start, StartProgress
from dsv3.server.engine.supervisor import EngineSupervisor
from dsv3.server.grammars import GrammarPool
from dsv3.server.limits import SMALL_BYTES, WAIT_S, BodyReader, Budget, Reservation, Thread, WorkersBusy
from dsv3.server.protocol.errors import QUEUE_FULL, ApiError, invalid, too_long, unavailable
from dsv3.server.serving.logprobs import LogprobEncoder
from dsv3.server.serving.metrics import Metrics, SharedNumbers
from dsv3.server.serving.metrics_history import MetricsHistory, SnapshotPoller
from dsv3.server.templates import TemplatePool
from dsv3.server.tenants import OPERATOR, Tenant, Tenants, cache_salt
from dsv3.server.worker_process import WorkerDied
from dsv3.text.chat_template import TemplateError, names_tools, telling_tools
from dsv3.text.parsers import ParserOptions, Parsers
from dsv3.text.tokenizer import Tokenizer, TokenizerError, TokenizerNotFound

_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(model_dir: Path) -> dict[str, Any]:
    """Returns what requests that do not say otherwise are sampled with; empty without the file.

    `do_sample` false means greedy. Raises ValueError, naming the file, for values that cannot be used.
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


# Shorter texts are encoded on the event loop: the hand-over to a thread would cost more.
_INLINE_CHARS = 1024
# A text with more characters per token of the limit is most likely too long, and is counted before it is encoded.
_LIKELY_CHARS_PER_TOKEN = 8


def _encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool, limit: int) -> array.array[int] | None:
    """Returns the token ids of a text, None where they are surely more than `limit`."""
    if len(text) > _LIKELY_CHARS_PER_TOKEN * limit and tokenizer.surely_exceeds(text, limit):
        return None
    return array.array("i", tokenizer.encode(text, add_special_tokens))


class Service:
    """One model being served, the first of `config.model_names` by name.

    `chat_tokenizer` reads what `templates` render, by default the same as `tokenizer`. `parsers` make those of a chat's
    answers; `shows_tools` says whether its template shows tools to the model. `created` is the time of the instance's
    start, now if not given. Requests wait at most `wait_s` for what they share, without end if it is None.
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
        self.metrics = Metrics(config.model_names[0], numbers, self.tenants)
        self.history, self.onlooker = MetricsHistory(self.metrics), SnapshotPoller(engine)
        self.leaving = False  # says so, and still takes requests
        self.draining = False
        self.idle = asyncio.Event()
        self.idle.set()
        self.active = 0
        # A text is not cut into pieces, because no cut is exact for every tokenizer: so one of a kind at a time, and
        # encoding never takes more than two cores from the engine.
        self._small_texts, self._large_texts = Thread("encode-small", wait_s), Thread("encode-large", wait_s)
        self._preparing, self._bodies = Thread("prepare", wait_s), BodyReader(wait_s)
        self.budget = Budget()
        engine.on_stats = self.metrics.update
        engine.on_again = lambda: self.metrics.add("continued", 1)

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
        """Returns what is known of the engine; ApiError 503 when requests are not taken.

        They are while the engine is started anew: then they wait for it.
        """
        is_taken = self.engine.state in ("ready", "restarting") and not self.draining
        if not is_taken or self.engine.info is None:
            self.metrics.rejected(self.status)
            raise unavailable(self.reason, self.status, retry_after=5)
        return self.engine.info

    def require_model(self, name: str | None) -> str:
        """Returns the name to answer with; ApiError 404 for a model that is not served."""
        if name is None:
            return self.config.model_names[0]
        if name not in self.config.model_names:
            raise ApiError(
                404, "the model does not exist; GET /v1/models lists it", param="model", code="model_not_found"
            )
        return name

    def cache_salt(self, tenant: Tenant | None, given: str | None) -> str:
        """Returns what a request's prefix keys start from; ApiError 400 without the salt that this server asks for."""
        isolation = self.config.options.prefix_cache_isolation
        if given is None and isolation == "salt":
            raise invalid("cache_salt: this server asks for one", "cache_salt", "cache_salt_required")
        return cache_salt(isolation, tenant, given)

    def priority(self, tenant: Tenant | None, given: int) -> int:
        """Returns a request's priority; ApiError 403 where a tenant asks to be served before all others."""
        if given < 0 and self.tenants.are_several and (tenant is None or tenant.name != OPERATOR):
            text = f"priority: where there are several API keys, only the one named {OPERATOR} may go below 0"
            raise ApiError(403, text, kind="permission_error", param="priority", code="not_the_operator")
        return given

    def busy(self, error: WorkersBusy) -> ApiError:
        """Counts and returns the 503 for work that workers have no room for."""
        self.metrics.rejected(QUEUE_FULL)
        return unavailable(str(error), QUEUE_FULL)

    def grow(self, reservation: Reservation, nbytes: int) -> None:
        """Has a request hold some more bytes; ApiError 503 where all requests together hold too many."""
        try:
            reservation.grow(nbytes)
        except WorkersBusy as error:
            raise self.busy(error) from None

    def enter(self) -> None:
        """Notes that a request begins; draining waits until all have left."""
        self.active += 1
        self.idle.clear()

    def leave(self) -> None:
        """Notes that a request has ended."""
        self.active -= 1
        if not self.active:
            self.idle.set()

    async def encode(
        self, text: str, add_special_tokens: bool, param: str, tokenizer: Tokenizer | None = None
    ) -> array.array[int]:
        """Returns the token ids of a text; ApiError 400 if it cannot fit the context."""
        tokenizer = tokenizer or self.tokenizer
        if tokenizer is None:
            raise invalid("this model has no tokenizer: send the prompt as token ids", param, "no_tokenizer")
        limit, ids = self.require_ready().rules.max_model_len, None
        try:
            if len(text) <= limit * tokenizer.max_token_chars:
                ids = await self._encode(lambda: _encode(tokenizer, text, add_special_tokens, limit), text)
        except TokenizerError as error:
            raise invalid(str(error), param) from None
        except WorkersBusy as error:
            raise self.busy(error) from None
        if ids is None:
            raise too_long(limit, f"a text of {len(text)} characters, which is more tokens than that")
        return ids

    async def _encode[T](self, work: Callable[[], T], text: str) -> T:
        if len(text) <= _INLINE_CHARS:
            return work()
        nbytes = sys.getsizeof(text)
        return await (self._small_texts if nbytes <= SMALL_BYTES else self._large_texts).run(nbytes, work)

    async def run[T](self, is_long: bool, work: Callable[[], T]) -> T:
        """Returns the result of `work`, which is done in a thread if it would keep the event loop for long.

        Raises ApiError 503 where too much waits for that thread.
        """
        if not is_long:
            return work()
        try:
            return await self._preparing.run(0, work)
        except WorkersBusy as error:
            raise self.busy(error) from None

    async def read_body[T](self, nbytes: int, work: Callable[[], T]) -> T:
        """Returns the result of `work`, which decodes a body of `nbytes`; ApiError 503 where too much waits."""
        try:
            return await self._bodies.run(nbytes, work)
        except WorkersBusy as error:
            raise self.busy(error) from None

    async def close(self) -> None:
        """Ends the workers; texts that are being encoded are still encoded."""
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
    """Returns the service of a model directory; `created` is the time of the instance's start, now if not given.

    Requests wait at most `wait_s` for workers that they share, without end if it is None.
    Raises TokenizerError for a tokenizer, ValueError for a generation_config.json that cannot be used.
    """
    tokenizer = _tokenizer(config)
    chat_tokenizer = tokenizer
    if tokenizer is not None and config.options.escape_special_tokens:
        chat_tokenizer = tokenizer.hiding_markers()
    parsers = _parsers(config, tokenizer)
    template = None
    if tokenizer is not None and parsers is not None and tokenizer.chat_template is not None:
        template = telling_tools(tokenizer.chat_template, parsers.dialect)
    templates = await _templates(config, chat_tokenizer, template, wait_s)
    grammars = None
    if parsers is not None:
        file = config.model_dir / "tokenizer.json"
        grammars = GrammarPool(file, wait_s, dialect=parsers.dialect_name, marker_ids=parsers.marker_ids)
    return Service(
        config,
        engine,
        tokenizer,
        templates,
        chat_tokenizer=chat_tokenizer,
        parsers=parsers,
        shows_tools=names_tools(template or ""),
        grammars=grammars,
        numbers=numbers,
        created=created,
        wait_s=wait_s,
    )


def _tokenizer(config: ServerConfig) -> Tokenizer | None:
    try:
        return Tokenizer.from_directory(config.model_dir)
    except TokenizerNotFound:
        config.notify("no tokenizer.json, tiktoken.model or tekken.json with the model: prompts must be token ids")
        return None


def _parsers(config: ServerConfig, tokenizer: Tokenizer | None) -> Parsers | None:
    if tokenizer is None:
        return None
    options = ParserOptions(config.options.reasoning_parser, config.options.tool_call_parser)
    return Parsers(options, tokenizer, tokenizer.chat_template)


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


def make_client(config: ServerConfig) -> EngineClient:
    """Returns the first front's client, not connected yet."""
    return EngineClient(
        max_num_queued_reqs=config.engine.max_num_queued_reqs,
        watchdog_s=config.watchdog_s,
        pulse_watchdog_s=config.pulse_watchdog_s,
        max_restarts=config.max_restarts,
    )


async def start_engine(config: ServerConfig, service: Service) -> EngineSupervisor:
    """Starts the engine and connects the service to it; `service.engine.state` tells when it is ready.

    `config.notify` gets lines about the start. The process is killed when the engine fails.
    """
    engine = service.engine
    start = Start(config.engine_factory, str(config.model_dir), config.engine, config.cluster, config.factory_options)
    supervisor = EngineSupervisor(engine, start, config.restarts if config.max_restarts else None)
    supervisor.on_loss = lambda *_: service.metrics.add("engine_restarts", 1)
    engine.on_progress = _ProgressLines(config.notify)
    engine.on_failure = lambda _: supervisor.kill()
    await supervisor.connect()
    return supervisor


class _ProgressLines:
    """Tells what the engine does while it starts; a tenth of the lines where it counts."""

    def __init__(self, notify: Callable[[str], None]):
        self._notify = notify

    def __call__(self, progress: StartProgress) -> None:
        if not progress.total:
            self._notify(progress.text)
        elif progress.done == progress.total or progress.done % max(1, progress.total // 10) == 0:
            self._notify(f"[{progress.done}/{progress.total}] {progress.text}")
