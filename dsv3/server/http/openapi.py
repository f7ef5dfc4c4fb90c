"""The OpenAPI description for `GET /openapi.json`, generated from the request and response types."""

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
from dsv3.server.http.operations import ContinueRequest, PauseRequest, UpdateFromDisk
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
    "400": "the request is invalid; `param` or the message names the field",
    "401": "the API key is missing or wrong",
    "403": "the route needs the operator's key; or the request is from a web page of another origin, without keys",
    "405": "this route does not support the method; `Allow` names the supported ones",
    "408": "the body did not arrive in time",
    "409": "the state does not allow this; the message names the reason",
    "413": "the body is too large",
    "415": "this route does not support the content type",
    "421": "the Host header of a request without keys is not a local name",
    "429": "the limit of stored objects is reached; delete some, or wait",
    "500": "an error in the server",
    "503": "the queue is full, or the server is starting or stopping; retry after `Retry-After` seconds",
}
_ALWAYS = ("400", "405", "421", "500", "503")
_OF_BODIES = ("408", "413", "415")
_NO_MODEL = "the model does not exist; `GET /v1/models` lists it"
_NO_FILE = "the file does not exist, or the server stores none (`--batch_dir`)"
_NO_BATCH = "the batch does not exist, or the server stores none (`--batch_dir`)"
_NO_PROFILES = "profiles are off (`--profile_dir`)"


class State(msgspec.Struct):
    """Whether requests are served, and the reason if not."""

    status: str
    reason: str | msgspec.UnsetType = msgspec.UNSET


class ApiOperation(NamedTuple):
    """A method of a route: request and response, media types, and statuses besides those of all routes.

    Request and response are types, or names in `_WRITTEN`. `no_such` describes status 404, "" if the route has none.
    `query` has the schemas of query parameters by name.
    """

    summary: str
    tag: str
    response: type | str | None = "Served"
    request: type | str | None = None
    media: tuple[str, ...] = (_JSON,)
    no_such: str = ""
    statuses: tuple[str, ...] = ()
    query: Mapping[str, dict[str, Any]] = MappingProxyType({})


_STREAMED = (_JSON, _EVENTS)
_AFTER: dict[str, Any] = {"type": "string", "description": "list the items after this id"}
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
        "Counts a prompt's tokens", "tokens", TokenCount, "CountTokensRequest", no_such=_NO_MODEL
    ),
    ("POST", "/inference/v1/generate"): ApiOperation(
        "Continues token ids with token ids", "answers", GenerateResponse, GenerateRequest, _STREAMED, _NO_MODEL
    ),
    ("POST", "/tokenize"): ApiOperation("Returns token ids", "tokens", "Served", TokenizeRequest, no_such=_NO_MODEL),
    ("POST", "/detokenize"): ApiOperation(
        "Returns the text of token ids", "tokens", "Served", DetokenizeRequest, no_such=_NO_MODEL
    ),
    ("GET", "/v1/models"): ApiOperation("Lists the models", "models"),
    ("GET", "/v1/models/{model}"): ApiOperation("Returns a model", "models", no_such=_NO_MODEL),
    ("GET", "/v1/files"): ApiOperation("Lists files", "files", no_such=_NO_FILE, query=_FILES),
    ("POST", "/v1/files"): ApiOperation(
        "Uploads a file", "files", FileObject, "Upload", no_such=_NO_FILE, statuses=_STORED
    ),
    ("GET", "/v1/files/{id}"): ApiOperation("Describes a file", "files", FileObject, no_such=_NO_FILE),
    ("DELETE", "/v1/files/{id}"): ApiOperation("Deletes a file", "files", no_such=_NO_FILE, statuses=_STORED),
    ("GET", "/v1/files/{id}/content"): ApiOperation(
        "Returns a file's bytes", "files", None, media=("application/octet-stream",), no_such=_NO_FILE
    ),
    ("GET", "/v1/batches"): ApiOperation("Lists batches", "batches", no_such=_NO_BATCH, query=_BATCHES),
    ("POST", "/v1/batches"): ApiOperation(
        "Creates a batch", "batches", Batch, CreateBatch, no_such=_NO_FILE, statuses=_STORED
    ),
    ("GET", "/v1/batches/{id}"): ApiOperation("Returns a batch", "batches", Batch, no_such=_NO_BATCH),
    ("POST", "/v1/batches/{id}/cancel"): ApiOperation(
        "Cancels a batch", "batches", Batch, no_such=_NO_BATCH, statuses=_STORED
    ),
    ("GET", "/health"): ApiOperation("Returns whether requests are served", "server", State),
    ("GET", "/ready"): ApiOperation("Returns whether a request would be accepted now", "server", State),
    ("GET", "/version"): ApiOperation("Returns the version", "server"),
    ("GET", "/openapi.json"): ApiOperation("Returns this description", "server"),
    ("GET", "/metrics"): ApiOperation("Returns Prometheus metrics", "operator", None, media=("text/plain",)),
    ("POST", "/flush_cache"): ApiOperation("Resets the prefix cache", "operator"),
    ("GET", "/dashboard"): ApiOperation("Returns the dashboard's page", "server", None, media=("text/html",)),
    ("GET", "/dashboard/data"): ApiOperation("Returns the dashboard's data", "operator", query=_SEEN),
    ("GET", "/debug/requests"): ApiOperation("Lists what runs and waits in the engine", "operator"),
    ("POST", "/start_profile"): ApiOperation("Starts a profile of steps", "operator", no_such=_NO_PROFILES),
    ("POST", "/stop_profile"): ApiOperation(
        "Stops the profile and writes it to a file", "operator", no_such=_NO_PROFILES, statuses=("409",)
    ),
}
_UPDATES_OFF = "weight updates are off (`--enable_weight_updates`)"
_MODE = {"enum": ["abort", "wait", "keep", "retract"]}
OPERATIONS |= {
    ("POST", "/update_weights_from_disk"): ApiOperation(
        "Serves the weights of a directory", "operator", request=UpdateFromDisk, no_such=_UPDATES_OFF
    ),
    ("POST", "/pause_generation"): ApiOperation(
        "Pauses generation (SGLang)", "operator", request=PauseRequest, no_such=_UPDATES_OFF
    ),
    ("POST", "/continue_generation"): ApiOperation(
        "Continues generation (SGLang)", "operator", request=ContinueRequest, no_such=_UPDATES_OFF
    ),
    ("GET", "/get_weight_version"): ApiOperation("Names the weights", "operator", no_such=_UPDATES_OFF),
    ("POST", "/pause"): ApiOperation("Pauses generation", "operator", no_such=_UPDATES_OFF, query={"mode": _MODE}),
    ("POST", "/resume"): ApiOperation("Continues generation", "operator", no_such=_UPDATES_OFF),
    ("GET", "/is_paused"): ApiOperation("Returns whether generation is paused", "operator", no_such=_UPDATES_OFF),
    ("POST", "/sleep"): ApiOperation(
        "Frees the devices' memory",
        "operator",
        no_such=_UPDATES_OFF,
        query={"level": {"enum": [1, 2]}, "mode": {"enum": ["abort", "wait", "retract"]}},
    ),
    ("POST", "/wake_up"): ApiOperation("Takes the devices' memory again", "operator", no_such=_UPDATES_OFF),
    ("GET", "/is_sleeping"): ApiOperation("Returns whether the engine sleeps", "operator", no_such=_UPDATES_OFF),
}
_TAGS = {
    "answers": "Generation",
    "tokens": "Texts and token ids",
    "models": "Served models",
    "files": "Input and output of batches, with `--batch_dir`",
    "batches": "Many requests in one file, with `--batch_dir`",
    "server": "State of the server",
    "operator": "Needs the operator's key if there are several API keys",
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
"""Required fields. The types have defaults for them, because large bodies are parsed field by field."""

# Constraints beyond the fields' types, by field name; `SamplingParams` checks most of them.
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
# Fields that exist only to be rejected with a clear message; they are not described.
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


# Schemas of objects without a type.
_WRITTEN: dict[str, dict[str, Any]] = {
    "Served": {
        "title": "Served",
        "description": "An object whose fields docs/api.md describes.",
        "type": "object",
        "properties": {},
        "required": [],
    },
    "CountTokensRequest": {
        "title": "CountTokensRequest",
        "description": "`POST /v1/messages/count_tokens`: the fields of a `MessagesRequest` that determine the prompt.",
        "type": "object",
        "required": ["messages"],
    },
    "Upload": {
        "title": "Upload",
        "description": "The form of `POST /v1/files`.",
        "type": "object",
        "required": ["purpose", "file"],
        "properties": {"purpose": {"enum": ["batch"]}, "file": {"type": "string", "format": "binary"}},
    },
}


@functools.cache
def openapi(routes: tuple[tuple[str, str], ...]) -> bytes:
    """Returns the OpenAPI 3.1 description, as JSON, of `routes`, each a (method, path)."""
    named = {each for post in OPERATIONS.values() for each in (post.request, post.response)}
    types = {each for each in named if isinstance(each, type)} | {Tool, ErrorEnvelope, MessagesError}
    _, components = msgspec.json.schema_components(types, ref_template=_REF)
    components |= {name: dict(schema) for name, schema in _WRITTEN.items()}
    _add_constraints(components)
    paths: dict[str, dict[str, Any]] = {}
    for method, path in routes:
        methods = [each for each, other in routes if other == path]
        paths.setdefault(path, {})[method.lower()] = _describe(method, path, methods)
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


def openapi_path(path: str) -> str:
    """Returns a route's path in OpenAPI's form: without the types of its parameters."""
    return re.sub(r"\{(\w+):\w+\}", r"{\1}", path)


_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def _reference(kind: type | str) -> dict[str, str]:
    return {"$ref": _REF.format(name=kind if isinstance(kind, str) else kind.__name__)}


def _add_constraints(components: dict[str, Any]) -> None:
    """Adds the constraints of requests that their types do not express."""
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
    components[ChatRequest.__name__]["properties"]["tools"]["anyOf"][0]["items"] = _reference(Tool)
    completion = components[CompletionRequest.__name__]["properties"]
    completion["prompt"] = _PROMPT
    completion["max_tokens"]["anyOf"][0] |= {"minimum": 0, "description": "0 with `echo` alone"}
    messages = components[MessagesRequest.__name__]["properties"]
    components["CountTokensRequest"]["properties"] = {name: messages[name] for name in _COUNTED}


def _require(schema: dict[str, Any], names: Iterable[str]) -> None:
    schema["required"] = sorted({*schema.get("required", ()), *names})
    for name in names:
        schema["properties"][name] = _not_null(schema["properties"][name])


def _not_null(schema: dict[str, Any]) -> dict[str, Any]:
    kinds = [each for each in schema["anyOf"] if each != _NULL]
    return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}


def _describe(method: str, path: str, methods: list[str]) -> dict[str, Any]:
    operation = OPERATIONS[method, path]
    schema = {} if operation.response is None else {"schema": _reference(operation.response)}
    content = {kind: schema if kind == _JSON else {} for kind in operation.media}
    described: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_"),
        "summary": operation.summary,
        "tags": [operation.tag],
        "responses": {
            "200": {"description": "success", "content": content},
            **_error_responses(method, path, methods),
        },
    }
    parameters = [_parameter(name, "path", {"type": "string"}) for name in re.findall(r"\{(\w+)", path)]
    parameters += [_parameter(name, "query", schema) for name, schema in operation.query.items()]
    if parameters:
        described["parameters"] = parameters
    if operation.request is not None:
        kind = _FORM if operation.request == "Upload" else _JSON
        described["requestBody"] = {"required": True, "content": {kind: {"schema": _reference(operation.request)}}}
    return described


def _parameter(name: str, where: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": where, "required": where == "path", "schema": schema}


def _error_responses(method: str, path: str, methods: list[str]) -> dict[str, Any]:
    """Returns the descriptions of all error statuses, by status."""
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
    error = _reference(MessagesError if path.startswith(MESSAGES) else ErrorEnvelope)
    responses = {status: _error_response(texts[status], error) for status in sorted(texts)}
    if operation.response is State:
        responses["503"] = _error_response(
            "requests are not served or not accepted now; see `reason`", _reference(State)
        )
    responses["405"]["headers"] = {
        "Allow": {"required": True, "schema": {"type": "string"}, "example": ", ".join(sorted(methods))}
    }
    return responses


def _error_response(text: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": text, "content": {_JSON: {"schema": schema}}}
