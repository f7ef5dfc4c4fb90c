"""`kv_transfer_params`: how a router has one instance compute a prompt and another one answer it, as with vLLM.

The first request says `do_remote_decode`; its answer has the parameters that the second one carries.
"""

import re
from typing import Any

from dsv3.config.options import split_address
from dsv3.server.answers.errors import invalid
from dsv3.server.answers.schema import TransferParams
from dsv3.server.engine.messages import EngineInfo

_NAME = "kv_transfer_params"
_HOST = re.compile(r"[0-9A-Za-z._:-]+")


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
    return _HOST.fullmatch(text) is not None


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
