"""Messages between API server 0 and the other API servers, sent by `dsv3.processes.frames`."""

import msgspec

from dsv3.config.options import ClusterOptions, EngineOptions
from dsv3.config.server_options import ServerOptions
from dsv3.server.config import Deadlines
from dsv3.server.engine.messages import EngineFailure
from dsv3.server.tenants import Tenant


class StartApiServer(msgspec.Struct, frozen=True, tag=True):
    """First message to an API server: its number, and the fields of `dsv3.server.config.ServerConfig` that it needs.

    Engines identify it by `sender`, which no other process has had.
    """

    api_server: int
    sender: int
    created: int
    model_dir: str
    model_names: tuple[str, ...]
    tenants: tuple[Tenant, ...]
    options: ServerOptions
    engine: EngineOptions
    cluster: ClusterOptions | None
    watchdog_s: float
    template_deadline_s: float
    deadlines: Deadlines


class DrainApiServer(msgspec.Struct, frozen=True, tag=True):
    """Accept no more requests, and exit when those in flight have ended; with `aborts` abort them now."""

    aborts: bool = False


class ReloadApiServer(msgspec.Struct, frozen=True, tag=True):
    """Reload the certificate, and accept the keys of these tenants."""

    tenants: tuple[Tenant, ...]


class EngineStarted(msgspec.Struct, frozen=True, tag=True):
    """The engine `number` runs; connect to its Unix socket at `address`.

    `index` tells independent engines apart, and `number` each one's processes, also in the next message.
    """

    index: int
    number: int
    address: str


class EngineLost(msgspec.Struct, frozen=True, tag=True):
    """The engine `number` has died and is being restarted; from an API server: the engine sends it no frames."""

    index: int
    number: int
    reason: str


class ApiServerStarted(msgspec.Struct, frozen=True, tag=True):
    """The API server has read its files, and waits for the engine."""


class ApiServerReady(msgspec.Struct, frozen=True, tag=True):
    """The API server has an engine and accepts HTTP requests."""


ToApiServer = StartApiServer | DrainApiServer | ReloadApiServer | EngineStarted | EngineLost | EngineFailure
"""After an `EngineFailure` the engine is not restarted: the instance is about to exit."""
FromApiServer = ApiServerStarted | ApiServerReady | EngineLost

to_api_server = msgspec.msgpack.Decoder(ToApiServer)
from_api_server = msgspec.msgpack.Decoder(FromApiServer)
