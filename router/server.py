"""A router from its first look at the instances to its exit status."""

import asyncio
import contextlib
import signal
import socket
import ssl
from collections.abc import Callable, Iterable

from dsv3.config.server_options import ServerOptions
from dsv3.files import read_secret
from dsv3.server.config import Deadlines
from dsv3.server.http.listening import ConnectionLimit, HttpServer, certificate_of, max_admitted
from dsv3.server.http.serving import wait_for_any
from dsv3.server.tenants import Tenant, Tenants
from router.app import Site, make_app
from router.instance import Instance
from router.members import Members
from router.numbers import Numbers
from router.options import RouterOptions
from router.pool import Pool
from router.relay import Fleet

Make = Callable[[str], Instance]

_FINISH_S = 0.05
_TLS = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")


def instance_key(options: RouterOptions) -> str | None:
    """Returns the key that the instances ask for; raises ValueError, which says no part of it."""
    if options.instance_api_key_file is None:
        return None
    try:
        key = read_secret(options.instance_api_key_file).decode("ascii").strip()
    except (OSError, ValueError) as error:
        raise ValueError(f"instance_api_key_file: {error}") from None
    if not key or not key.isprintable() or " " in key:
        raise ValueError("instance_api_key_file: expected one key, of printable ASCII without blanks")
    return key


def maker(options: RouterOptions, api_key: str | None) -> Make:
    """Returns what makes an instance of a URL, of which nothing is known yet; raises ValueError for a bad CA file."""
    tls = None
    if options.instance_ca_file is not None:
        try:
            tls = ssl.create_default_context(cafile=options.instance_ca_file)
        except OSError as error:
            raise ValueError(f"instance_ca_file: {options.instance_ca_file} cannot be used ({error})") from None
    return lambda url: Instance(url, api_key, options.concurrency, options.health_timeout, tls)


def fleet_of(options: RouterOptions, make: Make) -> Fleet:
    """Returns the instances that the options name."""

    def pool(urls: Iterable[str], decodes: bool) -> Pool:
        found = [make(url) for url in urls]
        return Pool(found, decodes=decodes, max_queued=options.max_num_queued_reqs, queue_s=options.queue_timeout)

    answering = pool(options.instances or options.decode, True)
    is_split = bool(options.prefill) or options.registration
    prefilling = pool(options.prefill, False) if is_split else None
    pools = (answering,) if prefilling is None else (answering, prefilling)
    return Fleet(answering, prefilling, Numbers(pools), options)


def members_of(fleet: Fleet, make: Make, api_key: str | None, notify: Callable[[str], None]) -> Members:
    """Returns who watches the instances, and takes those that register."""
    pools = {"both": fleet.answering, "decode": fleet.answering}
    if fleet.prefilling is not None:
        pools["prefill"] = fleet.prefilling
    return Members(pools, make, fleet.options.health_interval, notify, api_key, fleet.numbers.forget)


async def serve(
    options: RouterOptions,
    tenants: tuple[Tenant, ...],
    api_key: str | None,
    listener: socket.socket,
    notify: Callable[[str], None],
) -> int:
    """Serves until a signal; returns 0.

    The first SIGTERM or SIGINT refuses new requests and lets those in flight finish; the second ends them. SIGHUP has
    the certificate read anew. Raises ValueError for files that cannot be used.
    """
    first, second = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, lambda: (second if first.is_set() else first).set())
    make = maker(options, api_key)
    fleet = fleet_of(options, make)
    members = members_of(fleet, make, api_key, notify)
    site = Site(fleet, Tenants(tenants), members if options.registration else None)
    limit = ConnectionLimit(max_admitted(None, 1))
    certificate = certificate_of(ServerOptions(**{name: getattr(options, name) for name in _TLS}))
    server = HttpServer(make_app(site, options.host), listener, limit, Deadlines(), certificate)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, server.reload)
    async with _watching(fleet, members):
        server.start()
        await first.wait()
        site.is_draining = True
        await _drained(site, second, options.shutdown_timeout)
        await server.close()
        await site.close()
    return 0


async def _drained(site: Site, second: asyncio.Event, seconds: float) -> None:
    deadline = asyncio.get_running_loop().time() + seconds
    while site.active and asyncio.get_running_loop().time() < deadline and not second.is_set():
        await wait_for_any(second, timeout_s=_FINISH_S)


@contextlib.asynccontextmanager
async def _watching(fleet: Fleet, members: Members):
    pools = [pool for pool in (fleet.answering, fleet.prefilling) if pool is not None]
    tasks = [asyncio.create_task(pool.keep_looking()) for pool in pools]
    members.start()
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await members.close()
