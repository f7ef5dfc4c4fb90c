"""Routes that pause generation, replace the weights and put the engine to sleep: SGLang's and vLLM's, for the operator.

They are off without `--enable_weight_updates`. A request ends once the engine has done what it asks for; a client that
disconnects before changes nothing about that.
"""

import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dsv3.engine.operations import (
    ContinueGeneration,
    OperatedState,
    Operation,
    OperationRefused,
    PauseGeneration,
    PauseMode,
    Sleep,
    UpdateWeights,
    Version,
    Wake,
)
from dsv3.server.engine.client import EngineUnavailable, OperationFailed
from dsv3.server.http.auth import require_operator
from dsv3.server.http.bodies import Handler, make_routes, read_json_body, unless_disconnected
from dsv3.server.http.exchange import json_response
from dsv3.server.protocol.errors import ApiError, invalid, unavailable
from dsv3.server.serving.request_parsing import invalid_field, read_fields
from dsv3.server.serving.service import Service

_MAX_PATH_CHARS = 4096
_SGLANG_MODES: dict[str, PauseMode] = {"abort": "abort", "retract": "retract", "in_place": "keep"}


class UpdateFromDisk(msgspec.Struct, frozen=True):
    """`POST /update_weights_from_disk`, as SGLang's; other values of the last four fields are refused."""

    model_path: Annotated[str, msgspec.Meta(min_length=1, max_length=_MAX_PATH_CHARS)]
    weight_version: Version | None = None
    abort_all_requests: bool = False
    load_format: Literal["auto", "safetensors"] | None = None
    flush_cache: bool = True
    is_async: bool = False
    keep_pause: bool = False


class PauseRequest(msgspec.Struct, frozen=True):
    """`POST /pause_generation`, as SGLang's."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class ContinueRequest(msgspec.Struct, frozen=True):
    """`POST /continue_generation`, as SGLang's: no field is used."""


def operation_routes(service: Service) -> list[Route]:
    """Returns the routes; without `--enable_weight_updates` they answer 404."""
    handlers: dict[tuple[str, str], Callable[[Service, Request], Awaitable[Response]]] = {
        ("POST", "/update_weights_from_disk"): _update,
        ("POST", "/pause_generation"): _pause_generation,
        ("POST", "/continue_generation"): _continue_generation,
        ("GET", "/get_weight_version"): _version,
        ("POST", "/pause"): _pause,
        ("POST", "/resume"): _resume,
        ("GET", "/is_paused"): _is_paused,
        ("POST", "/sleep"): _sleep,
        ("POST", "/wake_up"): _wake_up,
        ("GET", "/is_sleeping"): _is_sleeping,
    }

    def for_operators(handler: Callable[[Service, Request], Awaitable[Response]]) -> Handler:
        async def run(http: Request) -> Response:
            require_operator(service, http)
            if not service.config.options.enable_weight_updates:
                text = "weight updates are off; start the server with --enable_weight_updates"
                raise ApiError(404, text, code="weight_updates_off")
            return await handler(service, http)

        return run

    return make_routes({key: for_operators(handler) for key, handler in handlers.items()})


async def _update(service: Service, http: Request) -> Response:
    wanted = await _read(service, http, UpdateFromDisk)
    for name, only in (("flush_cache", True), ("is_async", False), ("keep_pause", False)):
        if getattr(wanted, name) is not only:
            raise invalid(f"{name}: only {str(only).lower()} is supported", name, "unsupported_parameter")
    mode: PauseMode = "abort" if wanted.abort_all_requests else "wait"
    paused, started = _state(service).is_paused, time.monotonic()
    try:
        await _operate(service, http, UpdateWeights(wanted.model_path, wanted.weight_version, mode))
    except ApiError as error:
        if error.status == 503:
            raise
        return json_response({"success": False, "message": error.body.message, "num_paused_requests": 0}, error.status)
    service.metrics.observe("update", time.monotonic() - started)
    message = f"Succeeded to update model weights: {_state(service).weight_version}."
    waiting = service.engine.num_in_flight if paused else 0
    return json_response({"success": True, "message": message, "num_paused_requests": waiting})


async def _pause_generation(service: Service, http: Request) -> Response:
    wanted = await _read(service, http, PauseRequest)
    await _operate(service, http, PauseGeneration(_SGLANG_MODES[wanted.mode]))
    return json_response({"message": "Generation paused successfully.", "status": "ok"})


async def _continue_generation(service: Service, http: Request) -> Response:
    await _read(service, http, ContinueRequest)
    await _operate(service, http, ContinueGeneration())
    return json_response({"message": "Generation continued successfully.", "status": "ok"})


async def _pause(service: Service, http: Request) -> Response:
    await _operate(service, http, _converted(PauseGeneration, {"mode": http.query_params.get("mode", "abort")}))
    return json_response({"status": "paused"})


async def _resume(service: Service, http: Request) -> Response:
    await _operate(service, http, ContinueGeneration())
    return json_response({"status": "resumed"})


async def _sleep(service: Service, http: Request) -> Response:
    given: dict[str, Any] = dict(http.query_params)
    wanted = {"level": int(given["level"]) if given.get("level", "") in ("1", "2") else given.get("level", 1)}
    await _operate(service, http, _converted(Sleep, wanted | {"mode": given.get("mode", "abort")}))
    return json_response({"status": "sleeping"})


async def _wake_up(service: Service, http: Request) -> Response:
    if (tags := set(http.query_params.getlist("tags"))) and tags != {"weights", "kv_cache"}:
        raise invalid("tags: weights and kv_cache wake together; leave tags out", "tags", "unsupported_parameter")
    await _operate(service, http, Wake())
    return json_response({"status": "awake"})


async def _version(service: Service, _: Request) -> Response:
    return json_response({"weight_version": _state(service).weight_version})


async def _is_paused(service: Service, _: Request) -> Response:
    return json_response({"is_paused": _state(service).is_paused})


async def _is_sleeping(service: Service, _: Request) -> Response:
    return json_response({"is_sleeping": _state(service).sleep_level > 0})


def _state(service: Service) -> OperatedState:
    return service.require_ready().state


async def _read[T: msgspec.Struct](service: Service, http: Request, kind: type[T]) -> T:
    """Returns the request in a body of JSON; one without a body has the defaults."""
    with service.reserve_memory() as grow:
        empty = http.headers.get("content-length", "0") == "0" and "transfer-encoding" not in http.headers
        body = bytearray(b"{}") if empty else await read_json_body(http, grow) or bytearray(b"{}")
        return await service.read_body(len(body), lambda: read_fields(kind, body))


def _converted[T](kind: type[T], fields: dict[str, Any]) -> T:
    try:
        return msgspec.convert(fields | {"type": kind.__name__}, kind)
    except msgspec.ValidationError as error:
        raise invalid_field(error, "", kind) from None


async def _operate(service: Service, http: Request, operation: Operation) -> None:
    """Waits until the engine has executed an operation; raises ApiError 400, 500 or 503 where it has not."""
    service.require_ready()
    try:
        await unless_disconnected(http.receive, service.engine.operate(operation))
    except OperationRefused as error:
        raise invalid(str(error), code="operation_refused") from None
    except OperationFailed as error:
        raise ApiError(500, str(error), kind="server_error", code="operation_failed") from None
    except EngineUnavailable as error:
        raise unavailable(str(error), "engine_unavailable", retry_after=5) from None
