"""What a server is told when it starts."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from dsv3.config.options import ClusterOptions, EngineOptions
from dsv3.config.server_options import ServerOptions
from dsv3.processes.child import RestartPolicy
from dsv3.server.engine.client import HEARTBEAT_WATCHDOG_S, WATCHDOG_S
from dsv3.server.templates import DEADLINE_S
from dsv3.server.tenants import Tenant

# Time for load balancers to read the reason from /health before the process ends with status 1.
FAILURE_LINGER_S = 5.0
_LEAST_SILENCE_S = 3.0  # a sign of life comes once per second


@dataclasses.dataclass(frozen=True)
class Deadlines:
    """How long a front waits for a client, in seconds."""

    head_s: float = 10.0  # for the head of a request, also the first one
    keep_alive_s: float = 60.0  # for the next request to begin
    write_s: float = 120.0  # for a client that reads nothing of what is written to it
    linger_s: float = 2.0  # for a client that still writes what nobody reads any more


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """Everything a server needs.

    `tenants` are let in, with the keys that `options` name; without them everybody is. `engine_factory`
    ("module:function") is called in the engine's process with `messages.Start`, which carries `engine`, `cluster` and
    `factory_options`; the latter are for factories that need more than the real one. `notify` gets lines for the person
    who started the server. Raises ValueError where the options ask for keys and there are no tenants.
    """

    model_dir: Path
    model_names: tuple[str, ...]
    options: ServerOptions = dataclasses.field(default_factory=ServerOptions)
    tenants: tuple[Tenant, ...] = ()
    engine: EngineOptions = dataclasses.field(default_factory=EngineOptions)
    cluster: ClusterOptions | None = None
    failure_linger_s: float = FAILURE_LINGER_S
    watchdog_s: float = WATCHDOG_S
    restarts: RestartPolicy = dataclasses.field(default_factory=RestartPolicy)
    template_deadline_s: float = DEADLINE_S
    deadlines: Deadlines = dataclasses.field(default_factory=Deadlines)
    engine_factory: str = "dsv3.server.engine.factory:start_engine"
    factory_options: dict[str, object] = dataclasses.field(default_factory=dict)
    notify: Callable[[str], None] = print

    @property
    def max_restarts(self) -> int:
        """How many engines a request is given after its first; 0: the first death is the last."""
        return self.options.max_request_restarts

    @property
    def heartbeat_watchdog_s(self) -> float:
        """Seconds without a sign of life after which the engine's process is taken for stopped."""
        return (
            HEARTBEAT_WATCHDOG_S
            if self.cluster is None
            else max(_LEAST_SILENCE_S, self.cluster.cluster_silence_timeout)
        )

    def __post_init__(self) -> None:
        if not self.tenants and (self.options.api_key is not None or self.options.api_key_file is not None):
            raise ValueError("tenants: none, but the options ask for keys")
