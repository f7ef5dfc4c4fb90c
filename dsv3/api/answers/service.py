"""What all answers share: the engine, the tokenizer, the chat template, the metrics, and whether we still serve."""

import asyncio
import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from dsv3.api.answers.defaults import sampling_defaults
from dsv3.api.answers.errors import ApiError, invalid, too_long, unavailable
from dsv3.api.answers.logprobs import LogprobEncoder
from dsv3.api.answers.metrics import Metrics
from dsv3.api.answers.numbers import SharedNumbers
from dsv3.api.config import ServerConfig
from dsv3.api.engine.client import EngineClient
from dsv3.api.engine.messages import EngineInfo
from dsv3.api.templates.pool import TemplatePool
from dsv3.text.chat_template import TemplateError
from dsv3.text.parsers import ParserOptions
from dsv3.text.reasoning import writes_reasoning
from dsv3.text.tokenizer import Tokenizer, TokenizerError, TokenizerNotFound

# Shorter texts are encoded on the event loop: the hand-over to a thread would cost more.
_INLINE_CHARS = 1024


@dataclasses.dataclass(frozen=True)
class ServiceConfig:
    """Settings of a service.

    The first of `model_names` is the one answers carry. `sampling_defaults` hold where a request is silent.
    """

    model_names: tuple[str, ...]
    parsers: ParserOptions = dataclasses.field(default_factory=ParserOptions)
    sampling_defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))


class Service:
    """One model being served."""

    def __init__(
        self,
        config: ServiceConfig,
        engine: EngineClient,
        tokenizer: Tokenizer | None,
        templates: TemplatePool | None,
        numbers: SharedNumbers | None = None,
    ):
        self.config = config
        self.engine = engine
        self.tokenizer = tokenizer
        self.templates = templates
        self.logprobs = LogprobEncoder(tokenizer)
        self.metrics = Metrics(config.model_names[0], numbers)
        self.draining = False
        self.idle = asyncio.Event()
        self.idle.set()
        self.active = 0
        self.readers = ThreadPoolExecutor(1, "read")  # one large body at a time: each piece of it stops the event loop
        self._encoders = ThreadPoolExecutor(2, "encode")  # two huge prompts at most compete with the engine for cores
        engine.on_stats = self.metrics.update

    @property
    def status(self) -> Literal["ok", "starting", "draining", "failed"]:
        if self.draining:
            return "draining"
        return {"ready": "ok", "starting": "starting"}.get(self.engine.state, "failed")  # type: ignore[return-value]

    @property
    def reason(self) -> str:
        return "the server is shutting down" if self.draining else self.engine.reason

    def require_ready(self) -> EngineInfo:
        """Returns what is known of the engine; ApiError 503 when requests are not taken."""
        if self.status != "ok" or self.engine.info is None:
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

    def enter(self) -> None:
        """Notes that a request begins; draining waits until all have left."""
        self.active += 1
        self.idle.clear()

    def leave(self) -> None:
        """Notes that a request has ended."""
        self.active -= 1
        if not self.active:
            self.idle.set()

    async def encode(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        """Returns the token ids of a text; ApiError 400 if it cannot fit the context."""
        if self.tokenizer is None:
            raise invalid("this model has no tokenizer: send the prompt as token ids", param, "no_tokenizer")
        limit = self.require_ready().rules.max_model_len
        if len(text) > limit * self.tokenizer.max_token_chars:
            raise too_long(limit, f"a text of {len(text)} characters, which is more tokens than that")
        tokenizer = self.tokenizer
        try:
            return await self.run(len(text) > _INLINE_CHARS, lambda: tokenizer.encode(text, add_special_tokens))
        except TokenizerError as error:
            raise invalid(str(error), param) from None

    async def run[T](self, is_long: bool, work: Callable[[], T]) -> T:
        """Returns the result of `work`, which is done in a thread if it would keep the event loop for long."""
        if not is_long:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._encoders, work)

    async def close(self) -> None:
        """Ends the template workers."""
        if self.templates is not None:
            await self.templates.close()
        self.readers.shutdown(wait=False, cancel_futures=True)
        self._encoders.shutdown(wait=False, cancel_futures=True)


async def make_service(
    config: ServerConfig, engine: EngineClient, numbers: SharedNumbers | None = None, created: int | None = None
) -> Service:
    """Returns the service of a model directory; `created` is the time of the instance's start, now if not given.

    Raises TokenizerError for a tokenizer, ValueError for a generation_config.json that cannot be used.
    """
    tokenizer = _tokenizer(config)
    templates = await _templates(config, tokenizer)
    parser = config.options.reasoning_parser
    if parser == "auto" and not (templates and tokenizer and writes_reasoning(tokenizer.chat_template)):
        parser = "none"
    settings = ServiceConfig(
        config.model_names,
        ParserOptions(reasoning=parser),
        sampling_defaults(config.model_dir),
        *([] if created is None else [created]),
    )
    return Service(settings, engine, tokenizer, templates, numbers)


def _tokenizer(config: ServerConfig) -> Tokenizer | None:
    try:
        return Tokenizer.from_directory(config.model_dir)
    except TokenizerNotFound:
        config.notify("no tokenizer.json in the model directory: only prompts of token ids are served")
        return None


async def _templates(config: ServerConfig, tokenizer: Tokenizer | None) -> TemplatePool | None:
    if tokenizer is None:
        return None
    if tokenizer.chat_template is None:
        config.notify("the tokenizer has no chat template: /v1/chat/completions is off")
        return None
    pool = TemplatePool(tokenizer.chat_template, tokenizer.special_tokens, config.template_deadline_s)
    try:
        await pool.check()
    except TemplateError as error:
        config.notify(f"{error}: /v1/chat/completions is off")
        await pool.close()
        return None
    return pool
