"""The description of the API that `GET /openapi.json` gives, made of the types that requests are read as."""

import functools
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from dsv3.sampling_params import MAX_REPETITION_PENALTY, MIN_REPETITION_PENALTY
from dsv3.server.batches.store import Batch, FileObject
from dsv3.server.http.auth import OPEN_PATHS
from dsv3.server.http.batches import MAX_LISTED, CreateBatch
from dsv3.server.protocol.anthropic import (
    MESSAGES,
    InputMessage,
    Message,
    MessagesError,
    MessagesRequest,
    TokenCount,
)
from dsv3.server.protocol.errors import ErrorEnvelope
from dsv3.server.protocol.openai import (
    MAX_PROMPTS,
    ChatRequest,
    ChatResponse,
    CompletionRequest,
    CompletionResponse,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
    Tool,
)
from dsv3.server.protocol.responses import Response, ResponsesRequest, TextOptions
from dsv3.server.serving.anthropic import REFUSED as REFUSED_MESSAGES
from dsv3.server.serving.generate import GenerateResponse
from dsv3.server.serving.responses import INCLUDED
from dsv3.server.serving.responses import REFUSED as REFUSED_RESPONSES
from dsv3.text.chat_template import ALLOWED_KWARGS

_REF = "#/components/schemas/{name}"
_JSON, _EVENTS, _FORM = "application/json", "text/event-stream", "multipart/form-data"
_STATUSES = {
    "400": "the request has to change; `param` or the message names the field",
    "401": "the API key is missing or wrong",
    "403": "the route is the operator's; or a web page of another origin asks a server without a key",
    "405": "this route has other methods; `Allow` names them",
    "408": "the body took too long",
    "409": "the state does not allow this; the message says why",
    "413": "the body is too large",
    "415": "the content type is not the one that this route takes",
    "421": "a server without a key was called by a name that is not local",
    "429": "there are too many of them; delete some, or wait",
    "500": "a failure of the server",
    "503": "too much waits, or the server starts or ends; `Retry-After` says when to come again",
}
_ALWAYS = ("400", "405", "421", "500", "503")
_OF_BODIES = ("408", "413", "415")
_NO_MODEL = "the model does not exist; `GET /v1/models` lists it"
_NO_FILE = "there is no file of that id, or the server keeps none (`--batch_dir`)"
_NO_BATCH = "there is no batch of that id, or the server keeps none (`--batch_dir`)"
_NO_PROFILES = "profiles are off (`--profile_dir`)"


class Served(msgspec.Struct):
    """An object whose fields the docs tell."""


class State(msgspec.Struct):
    """Whether requests are served, and why not."""

    status: str
    reason: str | msgspec.UnsetType = msgspec.UNSET


class ApiOperation(NamedTuple):
    """A method of a route: what it reads, what it gives and as what, and which statuses it has beside those of all.

    `no_such` says what status 404 means, "" where there is none. `query` are schemas of parameters by name.
    """

    summary: str
    tag: str
    response: Any = Served
    request: Any = None
    media: tuple[str, ...] = (_JSON,)
    no_such: str = ""
    statuses: tuple[str, ...] = ()
    query: Mapping[str, dict[str, Any]] = MappingProxyType({})


class Upload(msgspec.Struct):
    """The form of `POST /v1/files`."""


class CountTokensRequest(msgspec.Struct):
    """`POST /v1/messages/count_tokens`: what of a `MessagesRequest` makes the prompt."""


_STREAMED = (_JSON, _EVENTS)
_AFTER: dict[str, Any] = {"type": "string", "description": "list what comes behind this id"}
_FILES: dict[str, dict[str, Any]] = {
    "after": _AFTER,
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LISTED["files"]},
    "order": {"enum": ["asc", "desc"]},
    "purpose": {"type": "string"},
}
_BATCHES: dict[str, dict[str, Any]] = {
    "after": _AFTER,
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LISTED["batches"]},
}
_SEEN = {"since": {"type": "number"}, "experts": {"type": "number"}}
_STORED = ("409", "429")

OPERATIONS: dict[tuple[str, str], ApiOperation] = {
    ("POST", "/v1/chat/completions"): ApiOperation(
        "Answers a conversation", "answers", ChatResponse, ChatRequest, _STREAMED, _NO_MODEL
    ),
    ("POST", "/v1/completions"): ApiOperation(
        "Continues texts or token ids", "answers", CompletionResponse, CompletionRequest, _STREAMED, _NO_MODEL
    ),
    ("POST", "/v1/responses"): ApiOperation(
        "Answers a conversation in items", "answers", Response, ResponsesRequest, _STREAMED, _NO_MODEL
    ),
    ("POST", MESSAGES): ApiOperation(
        "Answers a conversation in blocks", "answers", Message, MessagesRequest, _STREAMED, _NO_MODEL
    ),
    ("POST", f"{MESSAGES}/count_tokens"): ApiOperation(
        "Counts a prompt's tokens", "tokens", TokenCount, CountTokensRequest, no_such=_NO_MODEL
    ),
    ("POST", "/inference/v1/generate"): ApiOperation(
        "Continues token ids with token ids", "answers", GenerateResponse, GenerateRequest, _STREAMED, _NO_MODEL
    ),
    ("POST", "/tokenize"): ApiOperation("Returns token ids", "tokens", Served, TokenizeRequest, no_such=_NO_MODEL),
    ("POST", "/detokenize"): ApiOperation(
        "Returns the text of token ids", "tokens", Served, DetokenizeRequest, no_such=_NO_MODEL
    ),
    ("GET", "/v1/models"): ApiOperation("Lists the models", "models"),
    ("GET", "/v1/models/{model}"): ApiOperation("Returns a model", "models", no_such=_NO_MODEL),
    ("GET", "/v1/files"): ApiOperation("Lists files", "files", no_such=_NO_FILE, query=_FILES),
    ("POST", "/v1/files"): ApiOperation(
        "Takes a file", "files", FileObject, Upload, no_such=_NO_FILE, statuses=_STORED
    ),
    ("GET", "/v1/files/{id}"): ApiOperation("Returns what is known of a file", "files", FileObject, no_such=_NO_FILE),
    ("DELETE", "/v1/files/{id}"): ApiOperation("Deletes a file", "files", no_such=_NO_FILE, statuses=_STORED),
    ("GET", "/v1/files/{id}/content"): ApiOperation(
        "Returns a file's bytes", "files", None, media=("application/octet-stream",), no_such=_NO_FILE
    ),
    ("GET", "/v1/batches"): ApiOperation("Lists batches", "batches", no_such=_NO_BATCH, query=_BATCHES),
    ("POST", "/v1/batches"): ApiOperation(
        "Begins a batch", "batches", Batch, CreateBatch, no_such=_NO_FILE, statuses=_STORED
    ),
    ("GET", "/v1/batches/{id}"): ApiOperation("Returns a batch", "batches", Batch, no_such=_NO_BATCH),
    ("POST", "/v1/batches/{id}/cancel"): ApiOperation(
        "Ends a batch early", "batches", Batch, no_such=_NO_BATCH, statuses=_STORED
    ),
    ("GET", "/health"): ApiOperation("Says whether requests are served", "server", State),
    ("GET", "/ready"): ApiOperation("Says whether a request would be taken now", "server", State),
    ("GET", "/version"): ApiOperation("Returns the version", "server"),
    ("GET", "/openapi.json"): ApiOperation("Returns this description", "server"),
    ("GET", "/metrics"): ApiOperation("Returns Prometheus metrics", "operator", None, media=("text/plain",)),
    ("POST", "/flush_cache"): ApiOperation("Empties the prefix cache", "operator"),
    ("GET", "/dashboard"): ApiOperation("Returns the page that shows the server", "server", None, media=("text/html",)),
    ("GET", "/dashboard/data"): ApiOperation("Returns what that page shows", "operator", query=_SEEN),
    ("POST", "/start_profile"): ApiOperation("Begins a trace of steps", "operator", no_such=_NO_PROFILES),
    ("POST", "/stop_profile"): ApiOperation(
        "Ends a trace of steps", "operator", no_such=_NO_PROFILES, statuses=("409",)
    ),
}
_TAGS = {
    "answers": "What the model writes",
    "tokens": "Texts and token ids",
    "models": "What is served",
    "files": "Input and output of batches, with `--batch_dir`",
    "batches": "Many requests in one file, with `--batch_dir`",
    "server": "How the server is",
    "operator": "Where there are several API keys, for the operator's alone",
}

REQUIRED: dict[type, tuple[str, ...]] = {
    ChatRequest: ("messages",),
    CompletionRequest: ("prompt",),
    ResponsesRequest: ("input",),
    MessagesRequest: ("messages", "max_tokens"),
    InputMessage: ("content",),
    GenerateRequest: ("token_ids",),
    DetokenizeRequest: ("tokens",),
}
"""Fields that a request is refused without. The types have defaults for them: large bodies are read in pieces."""

# What is asked of fields beyond their types, by the field's name: most of it by `SamplingParams`.
_BOUNDS: dict[str, dict[str, Any]] = {
    "temperature": {"minimum": 0, "maximum": 100},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": 2**31 - 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "repetition_penalty": {"minimum": MIN_REPETITION_PENALTY, "maximum": MAX_REPETITION_PENALTY},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "max_tokens": {"minimum": 1, "maximum": 2**31 - 1},
    "max_completion_tokens": {"minimum": 1, "maximum": 2**31 - 1},
    "max_output_tokens": {"minimum": 1, "maximum": 2**31 - 1},
    "min_tokens": {"minimum": 0, "maximum": 2**31 - 1},
    "logit_bias": {
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
    "chat_template_kwargs": {"propertyNames": {"enum": sorted(ALLOWED_KWARGS)}},
    "truncation": {"enum": ["disabled"]},
    "include": {"items": {"enum": [INCLUDED]}},
    "verbosity": {"enum": ["medium"]},
    "token_ids": {"minItems": 1},
}
_COUNTED = ("model", "messages", "system", "tools", "tool_choice", "thinking", "chat_template_kwargs")
# Fields that are there to be refused by name: they are not described.
_REFUSED: dict[type, Iterable[str]] = {
    MessagesRequest: REFUSED_MESSAGES,
    ResponsesRequest: REFUSED_RESPONSES,
    CreateBatch: ("output_expires_after",),
}


_NULL = {"type": "null"}
_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}}
_PROMPT = {
    "anyOf": [
        _TEXT,
        _IDS,
        *({"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": each} for each in (_TEXT, _IDS)),
    ]
}


@functools.cache
def openapi(routes: tuple[tuple[str, str], ...]) -> bytes:
    """Returns the description of `routes`, (method, path) each, as JSON: OpenAPI 3.1."""
    types = {each for post in OPERATIONS.values() for each in (post.request, post.response) if each is not None}
    ordered = sorted({*types, Tool, ErrorEnvelope, MessagesError}, key=lambda each: each.__name__)
    schemas, components = msgspec.json.schema_components(ordered, ref_template=_REF)
    by_type = dict(zip(ordered, schemas, strict=True))
    _complete(components, by_type)
    paths: dict[str, dict[str, Any]] = {}
    for method, path in routes:
        methods = [each for each, other in routes if other == path]
        described = _described(method, path, methods, by_type)
        paths.setdefault(path, {})[method.lower()] = described
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "dsv3", "version": "1", "description": "OpenAI's, Anthropic's and vLLM's HTTP APIs."},
            "tags": [{"name": name, "description": text} for name, text in _TAGS.items()],
            "paths": paths,
            "components": {"schemas": components, "securitySchemes": _KEYS},
            "security": [{}, *({name: []} for name in _KEYS)],
        }
    )


def described_path(path: str) -> str:
    """Returns a route's path as OpenAPI writes it: without the kinds of its parameters."""
    return re.sub(r"\{(\w+):\w+\}", r"{\1}", path)


_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def _complete(components: dict[str, Any], by_type: dict[Any, Any]) -> None:
    """Adds what requests are asked for beyond their types, as far as a schema can say it."""
    for kind, names in REQUIRED.items():
        _require(components[kind.__name__], names)
    for kind in (*REQUIRED, TextOptions):
        for name, schema in components[kind.__name__]["properties"].items():
            for each in schema.get("anyOf", [schema]):
                if each != _NULL:
                    each |= _BOUNDS.get(name, {})
    for kind, refused in _REFUSED.items():
        for name in refused:
            del components[kind.__name__]["properties"][name]
    tokenize = components[TokenizeRequest.__name__]
    tokenize["oneOf"] = [{"required": ["prompt"]}, {"required": ["messages"]}]
    for name in ("prompt", "messages"):
        tokenize["properties"][name] = _not_null(tokenize["properties"][name])
    components[ChatRequest.__name__]["properties"]["tools"]["anyOf"][0]["items"] = by_type[Tool]
    completion = components[CompletionRequest.__name__]["properties"]
    completion["prompt"] = _PROMPT
    completion["max_tokens"]["anyOf"][0] |= {"minimum": 0, "description": "0 with `echo` alone"}
    messages = components[MessagesRequest.__name__]["properties"]
    components[CountTokensRequest.__name__] |= {
        "required": ["messages"],
        "properties": {name: messages[name] for name in _COUNTED},
    }
    components[Upload.__name__] |= {
        "required": ["purpose", "file"],
        "properties": {"purpose": {"enum": ["batch"]}, "file": {"type": "string", "format": "binary"}},
    }


def _require(schema: dict[str, Any], names: Iterable[str]) -> None:
    schema["required"] = sorted({*schema.get("required", ()), *names})
    for name in names:
        schema["properties"][name] = _not_null(schema["properties"][name])


def _not_null(schema: dict[str, Any]) -> dict[str, Any]:
    kinds = [each for each in schema["anyOf"] if each != _NULL]
    return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}


def _described(method: str, path: str, methods: list[str], by_type: dict[Any, Any]) -> dict[str, Any]:
    """Returns the description of an operation."""
    operation = OPERATIONS[method, path]
    schema = {} if operation.response is None else {"schema": by_type[operation.response]}
    content = {kind: schema if kind == _JSON else {} for kind in operation.media}
    described: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_"),
        "summary": operation.summary,
        "tags": [operation.tag],
        "responses": {
            "200": {"description": "the answer", "content": content},
            **_refusals(method, path, methods, by_type),
        },
    }
    parameters = [_parameter(name, "path", {"type": "string"}) for name in re.findall(r"\{(\w+)", path)]
    parameters += [_parameter(name, "query", schema) for name, schema in operation.query.items()]
    if parameters:
        described["parameters"] = parameters
    if operation.request is not None:
        kind = _FORM if operation.request is Upload else _JSON
        described["requestBody"] = {"required": True, "content": {kind: {"schema": by_type[operation.request]}}}
    return described


def _parameter(name: str, place: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": schema}


def _refusals(method: str, path: str, methods: list[str], by_type: dict[Any, Any]) -> dict[str, Any]:
    """Returns the descriptions of all statuses but 200, by status."""
    operation = OPERATIONS[method, path]
    statuses = {*_ALWAYS, *operation.statuses}
    if path not in OPEN_PATHS:
        statuses.add("401")
    if method != "GET" or operation.tag == "operator":
        statuses.add("403")
    if operation.request is not None:
        statuses.update(_OF_BODIES)
    texts = {status: _STATUSES[status] for status in statuses}
    if operation.no_such:
        texts["404"] = operation.no_such
    error = by_type[MessagesError if path.startswith(MESSAGES) else ErrorEnvelope]
    refusals = {status: _refusal(texts[status], error) for status in sorted(texts)}
    if operation.response is State:
        refusals["503"] = _refusal("no requests are served, or taken now; `reason` says why", by_type[State])
    refusals["405"]["headers"] = {
        "Allow": {"required": True, "schema": {"type": "string"}, "example": ", ".join(sorted(methods))}
    }
    return refusals


def _refusal(text: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": text, "content": {_JSON: {"schema": schema}}}
