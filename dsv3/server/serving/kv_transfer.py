"""How a router has one instance compute a prompt and another one answer it, in vLLM's way and in SGLang's.

vLLM's is `kv_transfer_params`: the first request says `do_remote_decode`; its answer has the parameters that the second
one carries. SGLang's is `bootstrap_host`, `bootstrap_port` and `bootstrap_room`: a router hands one body to both
instances at once. The prefill instance computes the prompt, gives one token, and lets the other ask for the number
`bootstrap_room`. The decode instance asks at the host and port, which are those of the prefill instance's
`--transfer_address`, and fetches the pages from there. Batches have lists: a number for each prompt.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from dsv3.config.options import split_address
from dsv3.scheduler.request import PreparedRequest
from dsv3.server.engine.messages import EngineInfo
from dsv3.server.protocol.errors import invalid
from dsv3.server.protocol.openai import ChatRequest, SampledRequest, TransferParams

_ROOM, _HOST, _PORT = "bootstrap_room", "bootstrap_host", "bootstrap_port"


@dataclasses.dataclass(frozen=True)
class Bootstrap:
    """Bootstrap rooms of a request's prompts: one for all, or one for each.

    `sources` are the instances to ask for pages; none: others ask this one.
    """

    bootstrap_rooms: tuple[int, ...]
    sources: tuple[str, ...] = ()

    def check(self, prompts: int, resumes: bool) -> None:
        """Raises ApiError where several prompts have not a number each or one for all, or an answer is resumed.

        A chat with `n` above 1 has `n` numbers for its one prompt; the first one counts.
        """
        if resumes:
            raise invalid(f"{_ROOM}: resume does not go with it; give kv_transfer_params with resume", _ROOM)
        if prompts > 1 and len(self.bootstrap_rooms) not in (1, prompts):
            raise invalid(
                f"{_ROOM}: {len(self.bootstrap_rooms)} numbers for {prompts} prompts; give one for each", _ROOM
            )

    def joined(self, requests: Sequence[PreparedRequest]) -> list[PreparedRequest]:
        """Returns the engine's requests, one per prompt, with their meetings."""
        return [self._joined(request, i % len(self.bootstrap_rooms)) for i, request in enumerate(requests)]

    def _joined(self, request: PreparedRequest, i: int) -> PreparedRequest:
        if not self.sources:
            return msgspec.structs.replace(request, bootstrap_room=self.bootstrap_rooms[i])
        return msgspec.structs.replace(request, pages_from=f"{self.sources[i]}#{self.bootstrap_rooms[i]}")


def bootstrap_of(request: SampledRequest, info: EngineInfo) -> Bootstrap | None:
    """Returns what a request says of its other half; None where it says nothing.

    Cuts a request down to its first token where this is the prefill instance. Raises ApiError for one that does not say
    enough, or asks for what this server does not do.
    """
    if request.bootstrap_room is None:
        return None
    if request.kv_transfer_params is not None:
        raise invalid(f"{_ROOM}: kv_transfer_params say the same in another way; give one of them", _ROOM)
    bootstrap_rooms = tuple(_listed(request.bootstrap_room))
    if not bootstrap_rooms:
        raise invalid(f"{_ROOM}: the list is empty", _ROOM)
    if info.rules.prefills_only:
        _cut(request)
        return Bootstrap(bootstrap_rooms)
    if not info.fetches_pages:
        what = "this server has no other half; start it with --role prefill or decode and --transfer_key_file"
        raise invalid(f"{_ROOM}: {what}", _ROOM)
    hosts, ports = (_as_many(bootstrap_rooms, getattr(request, name), name) for name in (_HOST, _PORT))
    return Bootstrap(bootstrap_rooms, tuple(_source(host, port) for host, port in zip(hosts, ports, strict=True)))


def _listed[T](value: T | list[T]) -> list[T]:
    return value if isinstance(value, list) else [value]


def _as_many[T](bootstrap_rooms: Sequence[int], value: T | list[T], name: str) -> list[T]:
    """Returns a value for each meeting."""
    values = _listed(value)
    if len(values) not in (1, len(bootstrap_rooms)):
        raise invalid(f"{name}: {len(values)} values for {len(bootstrap_rooms)} of {_ROOM}", name)
    return values * (len(bootstrap_rooms) // len(values))


def _source(host: str | None, port: int | None) -> str:
    if host is None or port is None:
        what = "of the prefill server's --transfer_address; routers take them with its URL: --prefill URL PORT"
        name = _HOST if host is None else _PORT
        raise invalid(f"{name}: give {_HOST} and {_PORT} {what}", name)
    return address_of(host, port, _HOST)


def _cut(request: SampledRequest) -> None:
    """Leaves of a request what is needed to compute its prompt: the other instance answers."""
    request.n = request.best_of = request.min_tokens = None
    request.max_tokens = 1
    if isinstance(request, ChatRequest):
        request.max_completion_tokens = None


_NAME = "kv_transfer_params"
_HOST_NAME = re.compile(r"[0-9A-Za-z._:-]+")


def pages_from(params: TransferParams | None, info: EngineInfo) -> str:
    """Returns the "host:port" of the instance that has computed a request's prompt; "" for none.

    Those of several processes have commas between. Raises ApiError where the request asks for what this server does
    not do.
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
    """Returns "host:port", with brackets around an IPv6 address; ApiError for a host that can be none."""
    host = host.removeprefix("[").removesuffix("]")
    if not _is_host(host):
        raise invalid(f"{param}: {host!r} is no host's name", param)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_host(text: str) -> bool:
    """Returns whether a resolver takes a name; it would raise UnicodeError for "a..b"."""
    try:
        text.encode("idna")
    except UnicodeError:
        return False
    return _HOST_NAME.fullmatch(text) is not None


def _checked(address: str) -> str:
    try:
        host, _ = split_address(address, "remote_addresses")
    except ValueError as error:
        raise invalid(str(error), _NAME) from None
    if not _is_host(host):
        raise invalid(f"remote_addresses: {address!r} has no host's name", _NAME)
    return address


def told(
    params: TransferParams | None, info: EngineInfo, prompt_tokens: int, *, streams: bool
) -> dict[str, Any] | None:
    """Returns what an answer tells the instance that goes on with it; None where nobody asked.

    A prefill instance tells it unasked, too: there are routers that look for it and do not ask (smg 1.13). Raises
    ApiError where other instances cannot reach this one, and for a stream, which has no place for it.
    """
    if (params is None or not params.do_remote_decode) and (streams or not info.rules.prefills_only):
        return None
    if streams:
        raise invalid("do_remote_decode: ask for it without stream", "stream")
    if not info.transfer_address:
        raise invalid("do_remote_decode: nobody can fetch pages here; start it with --transfer_address", _NAME)
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
