"""What the routes share: the engine, the tokenizer, the chat template, the metrics, and whether we still serve."""

import asyncio
import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from dsv3.api.engine_client import EngineClient
from dsv3.api.errors import ApiError, invalid, unavailable
from dsv3.api.frames import EngineInfo
from dsv3.api.metrics import Metrics
from dsv3.api.template_pool import TemplatePool
from dsv3.text.tokenizer import Tokenizer, TokenizerError

# Shorter texts are encoded on the event loop: the hand-over to a thread would cost more.
_INLINE_CHARS = 1024


@dataclasses.dataclass(frozen=True)
class ServiceConfig:
    """Settings of the HTTP side. `model_names`: the first is the one answers carry. `reasoning_parser` is a
    `dsv3.text.reasoning.Parser`. `sampling_defaults` hold where a request is silent."""

    model_names: tuple[str, ...]
    reasoning_parser: str = "none"
    sampling_defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))


class Service:
    """One model being served."""

    def __init__(
        self, config: ServiceConfig, engine: EngineClient, tokenizer: Tokenizer | None, templates: TemplatePool | None
    ):
        self.config = config
        self.engine = engine
        self.tokenizer = tokenizer
        self.templates = templates
        self.metrics = Metrics(config.model_names[0])
        self.draining = False
        self.idle = asyncio.Event()
        self.idle.set()
        self.active = 0
        self._encoders = ThreadPoolExecutor(2, "encode")  # two huge prompts at most compete with the engine for cores

    @property
    def status(self) -> Literal["ok", "starting", "draining", "failed"]:
        if self.draining:
            return "draining"
        return {"ready": "ok", "starting": "starting"}.get(self.engine.state, "failed")  # type: ignore[return-value]

    @property
    def reason(self) -> str:
        return "the server is shutting down" if self.draining else self.engine.reason

    def require_ready(self) -> EngineInfo:
        """What is known of the engine; ApiError 503 when requests are not taken."""
        if self.status != "ok" or self.engine.info is None:
            self.metrics.rejected(self.status)
            raise unavailable(self.reason, self.status, retry_after=5)
        return self.engine.info

    def require_model(self, name: str | None) -> str:
        """The name to answer with; ApiError 404 for a model that is not served."""
        if name is None:
            return self.config.model_names[0]
        if name not in self.config.model_names:
            raise ApiError(
                404, "the model does not exist; GET /v1/models lists it", param="model", code="model_not_found"
            )
        return name

    def enter(self) -> None:
        """A request begins; draining waits until all have left."""
        self.active += 1
        self.idle.clear()

    def leave(self) -> None:
        self.active -= 1
        if not self.active:
            self.idle.set()

    async def encode(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        """Token ids of a text, without blocking the event loop; ApiError 400 if it cannot fit the context."""
        if self.tokenizer is None:
            raise invalid("this model has no tokenizer: send the prompt as token ids", param, "no_tokenizer")
        limit = self.require_ready().rules.max_model_len
        if len(text) > limit * self.tokenizer.max_token_chars:
            raise too_long(limit, f"a text of {len(text)} characters, which is more tokens than that")
        try:
            if len(text) <= _INLINE_CHARS:
                return self.tokenizer.encode(text, add_special_tokens)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._encoders, self.tokenizer.encode, text, add_special_tokens)
        except TokenizerError as error:
            raise invalid(str(error), param) from None

    async def close(self) -> None:
        """Ends the engine and the template workers."""
        await self.engine.close()
        if self.templates is not None:
            await self.templates.close()
        self._encoders.shutdown(wait=False, cancel_futures=True)


def too_long(limit: int, requested: str) -> ApiError:
    """400 in the words OpenAI's users search for."""
    text = f"This model's maximum context length is {limit} tokens. However, you requested {requested}."
    return invalid(text, code="context_length_exceeded")
