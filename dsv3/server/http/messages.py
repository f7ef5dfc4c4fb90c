"""Messages between the first front and the others, through their links; see `dsv3.processes.frames`."""

import msgspec

from dsv3.config.options import EngineOptions
from dsv3.config.server_options import ServerOptions
from dsv3.server.config import Deadlines
from dsv3.server.tenants import Tenant


class StartApiServer(msgspec.Struct, frozen=True, tag=True):
    """First message to a front: its number, and what `dsv3.server.config.ServerConfig` says of all fronts.

    To engines it is `sender`, which no other front has been.
    """

    api_server: int
    sender: int
    created: int
    model_dir: str
    model_names: tuple[str, ...]
    tenants: tuple[Tenant, ...]
    options: ServerOptions
    engine: EngineOptions
    watchdog_s: float
    template_deadline_s: float
    deadlines: Deadlines


class DrainApiServer(msgspec.Struct, frozen=True, tag=True):
    """Take no more requests, finish those in flight, and end."""


class AbortApiServer(msgspec.Struct, frozen=True, tag=True):
    """Abort the requests in flight, and end."""


class ReloadApiServer(msgspec.Struct, frozen=True, tag=True):
    """Read the certificate anew, and let these tenants in."""

    tenants: tuple[Tenant, ...]


class EngineFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot be used any more, and the instance is about to end."""

    reason: str


class EngineStarted(msgspec.Struct, frozen=True, tag=True):
    """The engine with that number runs: connect to the Unix socket at its address."""

    number: int
    address: str


class EngineLost(msgspec.Struct, frozen=True, tag=True):
    """The engine with that number has died; another one follows."""

    number: int
    reason: str


class ApiServerReady(msgspec.Struct, frozen=True, tag=True):
    """The front answers HTTP."""


class EngineSilent(msgspec.Struct, frozen=True, tag=True):
    """The engine with that number does not answer this front's requests."""

    number: int
    reason: str


ToApiServer = (
    StartApiServer | DrainApiServer | AbortApiServer | ReloadApiServer | EngineStarted | EngineLost | EngineFailed
)
FromApiServer = ApiServerReady | EngineSilent

to_api_server = msgspec.msgpack.Decoder(ToApiServer)
from_api_server = msgspec.msgpack.Decoder(FromApiServer)
