"""Tells routers that this instance is there, again and again, and says goodbye when it drains."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from dsv3.files import read_secret
from dsv3.http_client import Address, Client, RequestFailed
from dsv3.server.config import ServerConfig

ROUTE = "/instances"
_AGAIN_S = 2.0  # after a router has not answered
_ANSWER_S = 2.0
_BEATS = 3  # per lease: two may be lost
_MOST_BYTES = 2**16
_log = logging.getLogger("dsv3.server")


class _Lease(msgspec.Struct):
    lease_s: float


class Registrar:
    """Registers an instance, which answers at `url`, with routers: from `start` until `leave`."""

    def __init__(self, routers: Sequence[str], url: str, role: str, key: str | None):
        self._clients = {router: Client(Address.parse(router), key) for router in routers}
        self._about: dict[str, Any] = {"url": url, "role": role}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begins to register."""
        self._tasks = [asyncio.create_task(self._stay(router)) for router in self._clients]

    async def leave(self) -> None:
        """Tells the routers that this instance takes no more requests; those that do not answer will see it leave."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._tasks:
            about = self._about | {"leaves": True}
            await asyncio.gather(*(self._say(router, about) for router in self._clients), return_exceptions=True)
        self._tasks = []
        for client in self._clients.values():
            await client.close()

    async def _stay(self, router: str) -> None:
        told = ""
        while True:
            level = logging.INFO
            try:
                lease = await self._say(router, self._about)
                said, pause = f"registered for {lease:g} s", max(lease / _BEATS, _ANSWER_S / 10)
            except (RequestFailed, TimeoutError, msgspec.MsgspecError, UnicodeDecodeError) as error:
                said, pause = f"cannot register ({str(error) or 'no answer'})", _AGAIN_S
                level = logging.WARNING
            if said != told:
                told = said
                _log.log(level, "%s: %s", router, said)
            await asyncio.sleep(pause)

    async def _say(self, router: str, about: dict[str, Any]) -> float:
        """Tells a router; returns for how many seconds it believes that."""
        body = msgspec.json.encode(about)
        async with asyncio.timeout(_ANSWER_S), self._clients[router].request("POST", ROUTE, body) as response:
            return msgspec.json.decode(await response.read(_MOST_BYTES), type=_Lease).lease_s


def registrar_of(config: ServerConfig, port: int) -> Registrar:
    """Returns what registers a server that listens on `port`; raises ValueError for a URL or key file that is wrong."""
    options = config.options
    scheme = "http" if options.ssl_certfile is None else "https"
    host = f"[{options.host}]" if ":" in options.host else options.host
    url = options.register_as or f"{scheme}://{host}:{port}"
    for name, each in (*(("register", router) for router in options.register), ("register_as", url)):
        try:
            Address.parse(each)
        except ValueError:
            raise ValueError(f"{name}: {each!r} is not http://HOST:PORT or https://HOST:PORT") from None
    return Registrar(options.register, url, config.engine.role, _key(options.register_key_file))


def _key(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        key = read_secret(path).decode("ascii").strip()
    except (OSError, ValueError) as error:
        raise ValueError(f"register_key_file: {error}") from None
    if not key or not key.isprintable() or " " in key:
        raise ValueError("register_key_file: expected one key, of printable ASCII without blanks")
    return key
