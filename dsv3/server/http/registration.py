"""Registers this instance with routers, renews the leases, and deregisters it when it drains."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from dsv3.files import read_api_key
from dsv3.http_client import Address, Client, RequestFailed
from dsv3.server.config import ServerConfig

ROUTE = "/instances"
_RETRY_S = 2.0  # after a failure
_TIMEOUT_S = 2.0
_RENEWALS_PER_LEASE = 3  # two may be lost
_MAX_RESPONSE_BYTES = 2**16
_log = logging.getLogger("dsv3.server")


class _Lease(msgspec.Struct):
    lease_s: float


class Registrar:
    """Keeps the instance at `url` registered with routers from `start` until `deregister`."""

    def __init__(self, routers: Sequence[str], url: str, role: str, key: str | None):
        self._clients = {router: Client(Address.parse(router), key) for router in routers}
        self._registration: dict[str, Any] = {"url": url, "role": role}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Starts a task per router that registers and renews."""
        self._tasks = [asyncio.create_task(self._keep_registered(router)) for router in self._clients]

    async def deregister(self) -> None:
        """Deregisters from all routers; for those that cannot be reached the lease expires."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._tasks:
            leaving = self._registration | {"leaves": True}
            await asyncio.gather(*(self._register(router, leaving) for router in self._clients), return_exceptions=True)
        self._tasks = []
        for client in self._clients.values():
            await client.close()

    async def _keep_registered(self, router: str) -> None:
        last_line = ""
        while True:
            level = logging.INFO
            try:
                lease = await self._register(router, self._registration)
                line, pause = f"registered for {lease:g} s", max(lease / _RENEWALS_PER_LEASE, _TIMEOUT_S / 10)
            except (RequestFailed, TimeoutError, msgspec.MsgspecError, UnicodeDecodeError) as error:
                line, pause = f"cannot register ({str(error) or f'no answer within {_TIMEOUT_S:g} s'})", _RETRY_S
                level = logging.WARNING
            if line != last_line:
                last_line = line
                _log.log(level, "%s: %s", router, line)
            await asyncio.sleep(pause)

    async def _register(self, router: str, registration: dict[str, Any]) -> float:
        """Sends a registration to a router; returns the lease in seconds."""
        body = msgspec.json.encode(registration)
        async with asyncio.timeout(_TIMEOUT_S), self._clients[router].request("POST", ROUTE, body) as response:
            return msgspec.json.decode(await response.read(_MAX_RESPONSE_BYTES), type=_Lease).lease_s


def make_registrar(config: ServerConfig, port: int) -> Registrar:
    """Returns the registrar of a server that listens on `port`; raises ValueError for an invalid URL or key file."""
    options = config.options
    scheme = "http" if options.ssl_certfile is None else "https"
    host = f"[{options.host}]" if ":" in options.host else options.host
    url = options.register_as or f"{scheme}://{host}:{port}"
    for name, each in (*(("register", router) for router in options.register), ("register_as", url)):
        try:
            Address.parse(each)
        except ValueError:
            raise ValueError(f"{name}: {each!r} is not http://HOST:PORT or https://HOST:PORT") from None
    path = options.register_key_file
    key = None if path is None else read_api_key(path, "register_key_file")
    return Registrar(options.register, url, config.engine.role, key)
