"""Options of the router, declared like those of `dsv3.config.options`."""

import dataclasses
from typing import Any

from dsv3.config.declaration import check, option
from dsv3.config.server_options import ServerOptions, check_traces_endpoint
from dsv3.http_client import Address
from dsv3.server.http.auth import is_loopback
from router.canary import Canary


def _of_server(name: str) -> Any:
    """Declares an option as a server has it, in the one group of a router's help."""
    field = ServerOptions.__dataclass_fields__[name]
    terms = field.metadata["terms"]
    return option(field.default, terms.help, low=terms.low, high=terms.high)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterOptions:
    """Which instances there are, and how long and how often they are tried. Raises ValueError for what cannot be."""

    instances: tuple[str, ...] = option((), "Send requests to the instances at these URLs, separated by commas.")
    prefill: tuple[str, ...] = option((), "Have the instances at these URLs compute prompts; needs --decode.")
    decode: tuple[str, ...] = option((), "Have the instances at these URLs answer; needs --prefill.")
    canary: str | None = option(
        None,
        "Send a share of the conversations, as in v2=5%, to the instances that serve version v2 (--served_version of "
        "launch.serve), and the rest to the others; POST /canary changes the share.",
    )
    host: str = _of_server("host")
    port: int = _of_server("port")
    api_key_file: str | None = option(
        None,
        "Read the clients' API keys from this file, which no other user may open: one per line, each after its name if "
        "it has one.",
    )
    instance_api_key_file: str | None = option(
        None, "Read the key that the instances ask for from this file, which no other user may open."
    )
    instance_ca_file: str | None = option(
        None, "Trust instances at https:// whose certificates the authorities in this PEM file have signed."
    )
    otlp_traces_endpoint: str | None = _of_server("otlp_traces_endpoint")
    registration: bool = option(
        False,
        "Take instances that say themselves that they are there (--register of launch.serve). They must know the key "
        "in --instance_api_key_file, unless only this machine reaches --host.",
    )
    ssl_certfile: str | None = _of_server("ssl_certfile")
    ssl_keyfile: str | None = _of_server("ssl_keyfile")
    ssl_ca_certs: str | None = _of_server("ssl_ca_certs")
    max_resumes: int = option(3, "Let a request go on elsewhere at most so often.", low=0, high=100)
    concurrency: int | None = option(
        None,
        "Give each instance at most this many requests at a time; default: twice what it says it runs, or 64.",
        low=1,
    )
    max_num_queued_reqs: int = option(1024, "Keep at most this many requests waiting for an instance.", low=0)
    queue_timeout: float = option(30.0, "Refuse a request that has waited for an instance for this long.", above=0)
    health_interval: float = option(1.0, "Ask each instance for its health after this many seconds.", low=0.05)
    health_timeout: float = option(
        2.0,
        "Wait this long for an instance's health; three such waits in a row, and its requests go elsewhere.",
        above=0,
    )
    shutdown_timeout: float = option(30.0, "Give requests in flight this many seconds to finish after SIGTERM.", low=0)

    def __post_init__(self) -> None:
        check(self)
        check_traces_endpoint(self.otlp_traces_endpoint)
        is_named = bool(self.instances) or bool(self.decode)
        if bool(self.prefill) != bool(self.decode) or (self.instances and self.decode):
            raise ValueError("instances: give these, or else both prefill and decode")
        if not is_named and not self.registration:
            raise ValueError("instances: give these, or both prefill and decode, or --registration")
        if self.registration and self.instance_api_key_file is None and not is_loopback(self.host):
            raise ValueError(f"registration: with --host {self.host} it needs instance_api_key_file")
        for name in ("ssl_keyfile", "ssl_ca_certs"):
            if getattr(self, name) is not None and self.ssl_certfile is None:
                raise ValueError(f"{name}: {getattr(self, name)!r} needs ssl_certfile")
        if self.canary is not None:
            try:
                Canary.parse(self.canary)
            except ValueError as error:
                raise ValueError(f"canary: {error}") from None
        named: dict[Address, str] = {}
        for name in ("instances", "prefill", "decode"):
            for url in getattr(self, name):
                try:
                    address = Address.parse(url)
                except ValueError:
                    raise ValueError(f"{name}: {url!r} is not http://HOST:PORT or https://HOST:PORT") from None
                if address in named:
                    raise ValueError(f"{name}: {url!r} is in {named[address]} already; name each instance once")
                named[address] = name
