"""A client's request, and what an instance is sent for it: at first, behind a failure, and for the prompt alone."""

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dsv3.api.answers.errors import invalid
from dsv3.fleet.router.prompt import Prompt, prompt_of

RESUMABLE = frozenset({"/v1/completions", "/v1/chat/completions"})
"""Routes whose requests take `resume`."""

_OTHER_HALF = ("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room")
"""Fields that say whom an instance connects to: the router's to say."""
_MAX_CHOICES = 4096
_MAX_SEED = 2**31
# What a prefill instance has no use for: it computes the prompt, and all else is said to the decode instance.
_ANSWER_FIELDS = frozenset(
    {"stream", "stream_options", "n", "best_of", "echo", "logprobs", "top_logprobs", "prompt_logprobs", "min_tokens"}
    | {"max_completion_tokens", "return_token_ids", "resume", "stop", "stop_token_ids"}
    | {"response_format", "structured_outputs"}
)


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request: its path, its fields with a seed, and what of the answer its client wants.

    `given` has the tokens of each choice that the client itself resumes from.
    """

    path: str
    body: Mapping[str, Any]
    streams: bool
    wants_ids: bool
    given: tuple[tuple[int, ...], ...]
    prompt: Prompt

    @property
    def is_resumable(self) -> bool:
        """Whether a stream of it can go on elsewhere."""
        return self.path in RESUMABLE and bool(self.given)

    @property
    def is_urgent(self) -> bool:
        """Whether it asks to be served before others."""
        sampling = self.body.get("sampling_params")
        asked = self.body.get("priority"), sampling.get("priority") if isinstance(sampling, dict) else None
        return any(isinstance(each, int | float) and each < 0 for each in asked)

    def first(self, transfer: Mapping[str, Any] | None) -> bytes:
        """Returns what the first instance is sent; `transfer` says where the prompt's pages are."""
        return self._encoded({}, transfer)

    def again(self, tokens: Sequence[Sequence[int]], transfer: Mapping[str, Any] | None) -> bytes:
        """Returns what another one is sent, which goes on behind the tokens that each choice has had."""
        if not any(tokens):
            return self._encoded({}, transfer)
        return self._encoded({"resume": {"output_token_ids": [list(each) for each in tokens]}}, transfer)

    def prefill(self) -> bytes:
        """Returns what a prefill instance is sent."""
        kept = {name: value for name, value in self.body.items() if name not in _ANSWER_FIELDS}
        return msgspec.json.encode(kept | {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}})

    def _encoded(self, more: Mapping[str, Any], transfer: Mapping[str, Any] | None) -> bytes:
        body = {**self.body, **more}
        if self.streams and self.is_resumable:
            body["return_token_ids"] = True
        if transfer is not None:
            body["kv_transfer_params"] = transfer
        return msgspec.json.encode(body)


def read_asked(path: str, data: bytes | bytearray, salt: str = "") -> Asked:
    """Returns the request in a body; raises ApiError for what is no JSON object.

    `salt` keeps what a tenant has cached from others, whose requests come with the same key.
    """
    try:
        body = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise invalid("the body is not JSON") from None
    if not isinstance(body, dict):
        raise invalid("the body is not a JSON object")
    for name in _OTHER_HALF:
        body.pop(name, None)
    if salt:
        body["cache_salt"] = salted(salt, body.get("cache_salt"))
    if path in RESUMABLE and body.get("seed") is None:
        body["seed"] = secrets.randbelow(_MAX_SEED)
    given = _given(body) if path in RESUMABLE else ()
    wants_ids = body.get("return_token_ids") is True
    return Asked(path, body, body.get("stream") is True, wants_ids, given, prompt_of(body))


def salted(salt: str, given: Any) -> Any:
    """Returns a tenant's `cache_salt`; what is no text is left for the instance to refuse."""
    if given is not None and not isinstance(given, str):
        return given
    return f"{salt}-{given or ''}"


def _given(body: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    """Returns the tokens of each choice so far; empty where the request is not one that can be understood here."""
    count = _num_choices(body)
    found = (body.get("resume") or {}) if isinstance(body.get("resume") or {}, dict) else None
    if count is None or found is None:
        return ()
    if not found:
        return ((),) * count
    ids = found.get("output_token_ids")
    if isinstance(ids, list) and count == 1 and not any(isinstance(each, list) for each in ids):
        ids = [ids]
    if not isinstance(ids, list) or len(ids) != count or not all(isinstance(each, list) for each in ids):
        return ()
    if not all(type(token) is int for each in ids for token in each):
        return ()
    return tuple(tuple(each) for each in ids)


def _num_choices(body: Mapping[str, Any]) -> int | None:
    n, prompt = body.get("n"), body.get("prompt")
    n = 1 if n is None else n
    prompts = len(prompt) if isinstance(prompt, list) and any(isinstance(each, str | list) for each in prompt) else 1
    if type(n) is not int or not 1 <= n * prompts <= _MAX_CHOICES:
        return None
    return n * prompts
