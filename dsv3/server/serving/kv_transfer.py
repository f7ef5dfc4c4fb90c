"""Disaggregated prefill: the request fields by which one instance computes a prompt and another one generates.

vLLM's `kv_transfer_params`: the first request has `do_remote_decode`; its response has the parameters for the second
request. SGLang's `bootstrap_host`, `bootstrap_port` and `bootstrap_room`: a router sends one body to both instances at
once. The prefill instance computes the prompt, samples one token, and keeps the pages under the number
`bootstrap_room`. The decode instance fetches them from host and port, which are those of the prefill instance's
`--transfer_address`. Batches have lists: a number for each prompt.
"""

import base64
import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from dsv3.config.options import split_address
from dsv3.scheduler.request import ExpertIds, PreparedRequest, RequestRules
from dsv3.server.engine.messages import EngineInfo
from dsv3.server.protocol.errors import invalid
from dsv3.server.protocol.openai import ChatRequest, SampledRequest, TransferParams

_ROOM, _HOST, _PORT = "bootstrap_room", "bootstrap_host", "bootstrap_port"


@dataclasses.dataclass(frozen=True)
class Bootstrap:
    """Bootstrap rooms of a request's prompts: one for all, or one each.

    `sources` are the addresses to fetch pages from; empty on the prefill instance.
    """

    bootstrap_rooms: tuple[int, ...]
    sources: tuple[str, ...] = ()

    def check(self, prompts: int, resumes: bool) -> None:
        """Raises ApiError where the numbers do not match the prompts, or the request also has `resume`.

        A chat with `n` above 1 may have `n` numbers for its one prompt; the first one counts.
        """
        if resumes:
            raise invalid(f"{_ROOM}: cannot be combined with resume; send kv_transfer_params with resume", _ROOM)
        if prompts > 1 and len(self.bootstrap_rooms) not in (1, prompts):
            raise invalid(
                f"{_ROOM}: {len(self.bootstrap_rooms)} numbers for {prompts} prompts; send one for each", _ROOM
            )

    def with_rooms(self, requests: Sequence[PreparedRequest]) -> list[PreparedRequest]:
        """Returns the engine's requests, one per prompt, with their bootstrap rooms."""
        return [self._with_room(request, i % len(self.bootstrap_rooms)) for i, request in enumerate(requests)]

    def _with_room(self, request: PreparedRequest, i: int) -> PreparedRequest:
        if not self.sources:
            return msgspec.structs.replace(request, bootstrap_room=self.bootstrap_rooms[i])
        return msgspec.structs.replace(request, pages_from=f"{self.sources[i]}#{self.bootstrap_rooms[i]}")


def parse_bootstrap(request: SampledRequest, info: EngineInfo) -> Bootstrap | None:
    """Returns the bootstrap rooms of a request; None without any.

    On a prefill instance, limits the request to its first token. Raises ApiError for missing or contradicting fields,
    and where this server does not transfer pages.
    """
    if request.bootstrap_room is None:
        return None
    if request.kv_transfer_params is not None:
        raise invalid(f"{_ROOM}: cannot be combined with kv_transfer_params; send one of them", _ROOM)
    bootstrap_rooms = tuple(_listed(request.bootstrap_room))
    if not bootstrap_rooms:
        raise invalid(f"{_ROOM}: the list is empty", _ROOM)
    if info.rules.prefills_only:
        _limit_to_prefill(request)
        return Bootstrap(bootstrap_rooms)
    if not info.fetches_pages:
        what = "this server does not transfer pages; start it with --role prefill or decode and --transfer_key_file"
        raise invalid(f"{_ROOM}: {what}", _ROOM)
    hosts, ports = (_as_many(bootstrap_rooms, getattr(request, name), name) for name in (_HOST, _PORT))
    return Bootstrap(bootstrap_rooms, tuple(_source(host, port) for host, port in zip(hosts, ports, strict=True)))


def _listed[T](value: T | list[T]) -> list[T]:
    return value if isinstance(value, list) else [value]


def _as_many[T](bootstrap_rooms: Sequence[int], value: T | list[T], name: str) -> list[T]:
    """Returns a value for each bootstrap room."""
    values = _listed(value)
    if len(values) not in (1, len(bootstrap_rooms)):
        raise invalid(f"{name}: {len(values)} values for {len(bootstrap_rooms)} of {_ROOM}", name)
    return values * (len(bootstrap_rooms) // len(values))


def _source(host: str | None, port: int | None) -> str:
    if host is None or port is None:
        what = "of the prefill server's --transfer_address; routers get the port as in --prefill URL PORT"
        name = _HOST if host is None else _PORT
        raise invalid(f"{name}: send {_HOST} and {_PORT} {what}", name)
    return address_of(host, port, _HOST)


def _limit_to_prefill(request: SampledRequest) -> None:
    """Limits a request to one token: the decode instance generates the rest."""
    request.n = request.best_of = request.min_tokens = None
    request.max_tokens = 1
    if isinstance(request, ChatRequest):
        request.max_completion_tokens = None


_NAME = "kv_transfer_params"
_HOST_NAME = re.compile(r"[0-9A-Za-z._:-]+")
_DECODED_CHARS = 2**18  # of base64 at a time, which takes 2 ms; a body of 32 MiB would hold the interpreter for 0.3 s


def pages_from(params: TransferParams | None, info: EngineInfo) -> str:
    """Returns the "host:port" of the instance that has computed a request's prompt; "" for none.

    An instance of several processes has several addresses, separated by commas. Raises ApiError where the address is
    missing, or this server fetches no pages.
    """
    if params is None or not params.do_remote_prefill:
        return ""
    if not info.fetches_pages:
        raise invalid("do_remote_prefill: this server fetches no pages; start it with --transfer_key_file", _NAME)
    if params.remote_addresses:
        return ",".join(map(_checked, params.remote_addresses))
    if params.remote_host is None or params.remote_port is None or not _is_host(params.remote_host):
        raise invalid("do_remote_prefill needs remote_host and remote_port, from the prefill server's answer", _NAME)
    return address_of(params.remote_host, params.remote_port, _NAME)


def address_of(host: str, port: int, param: str) -> str:
    """Returns "host:port", with brackets around an IPv6 address; raises ApiError for an invalid host name."""
    host = host.removeprefix("[").removesuffix("]")
    if not _is_host(host):
        raise invalid(f"{param}: {host!r} is not a host name", param)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_host(text: str) -> bool:
    """Returns whether a text may be a host name; a resolver would raise UnicodeError for "a..b"."""
    try:
        text.encode("idna")
    except UnicodeError:
        return False
    return _HOST_NAME.fullmatch(text) is not None


def prompt_experts(text: str, rules: RequestRules) -> ExpertIds | None:
    """Returns the experts that the instance of a request's pages has chosen for its prompt; None where none are used.

    Raises ApiError for a text that is not the base64 of whole tokens.
    """
    if rules.routed_experts is None:
        return None
    layers, top_k, dtype = rules.routed_experts
    parts = (text[start : start + _DECODED_CHARS] for start in range(0, len(text), _DECODED_CHARS))
    try:
        ids = b"".join(base64.b64decode(part, validate=True) for part in parts)
    except ValueError:
        raise invalid("remote_routed_experts: not base64", _NAME) from None
    if len(ids) % (layers * top_k * int(dtype[-1])):
        raise invalid("remote_routed_experts: not the experts of whole tokens of this model", _NAME)
    return ExpertIds(0, layers, top_k, dtype, ids)


def _checked(address: str) -> str:
    try:
        host, _ = split_address(address, "remote_addresses")
    except ValueError as error:
        raise invalid(str(error), _NAME) from None
    if not _is_host(host):
        raise invalid(f"remote_addresses: {address!r} has no valid host name", _NAME)
    return address


def transfer_params(
    params: TransferParams | None, info: EngineInfo, prompt_tokens: int, *, streams: bool
) -> dict[str, Any] | None:
    """Returns the response's `kv_transfer_params` for the decode instance; None where they are not requested.

    A prefill instance always returns them: some routers look for them without asking (smg 1.13). Raises ApiError where
    other instances cannot reach this one, and for a stream, which cannot carry them.
    """
    if (params is None or not params.do_remote_decode) and (streams or not info.rules.prefills_only):
        return None
    if streams:
        raise invalid("do_remote_decode: not available in a stream; send the request without stream", "stream")
    if not info.transfer_address:
        raise invalid("do_remote_decode: this server publishes no pages; start it with --transfer_address", _NAME)
    addresses = info.transfer_address.split(",")
    host, _, port = addresses[0].rpartition(":")
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": info.rules.fingerprint,
        "remote_host": host.strip("[]"),
        "remote_port": int(port),
        "remote_num_tokens": prompt_tokens,
        "tp_size": 1,
    } | ({"remote_addresses": addresses} if len(addresses) > 1 else {})
