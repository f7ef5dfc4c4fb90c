"""Configuration of a server: the options and everything else that a start needs."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from dsv3.config.options import ClusterOptions, EngineOptions
from dsv3.config.server_options import ServerOptions
from dsv3.processes.child import RestartPolicy
from dsv3.server.engine.client import HEARTBEAT_WATCHDOG_S, WATCHDOG_S
from dsv3.server.templates import DEADLINE_S
from dsv3.server.tenants import Tenant

# Time for load balancers to read the reason from /health before the process exits with status 1.
FAILURE_LINGER_S = 5.0
_MIN_SILENCE_S = 3.0  # heartbeats come once per second


@dataclasses.dataclass(frozen=True)
class Deadlines:
    """How long an API server waits for a client, in seconds."""

    head_s: float = 10.0  # for the complete head of a request
    keep_alive_s: float = 60.0  # for the start of the next request
    write_s: float = 120.0  # for the client to read, while the write buffer is full
    linger_s: float = 2.0  # for the client to close, after a response without reading the whole request


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """Configuration of a server.

    Requests need a key of one of `tenants`; without tenants they need none. `engine_factory` ("module:function") is
    called in the engine process with `messages.Start`, which has `engine`, `cluster` and `factory_options`, the latter
    for factories of tests. `notify` prints lines for the user. Raises ValueError if the options name keys but `tenants`
    is empty, and for options that independent engines do not have.
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
    def heartbeat_watchdog_s(self) -> float:
        """Seconds without a frame after which the engine process counts as stopped."""
        if self.cluster is None:
            return HEARTBEAT_WATCHDOG_S
        return max(_MIN_SILENCE_S, self.cluster.cluster_silence_timeout)

    @property
    def num_engines(self) -> int:
        """How many engine processes the server starts."""
        return self.engine.data_parallel_size or 1 if self.options.data_parallel_backend == "mp" else 1

    @property
    def engine_options(self) -> EngineOptions:
        """The options of each engine."""
        if self.options.data_parallel_backend == "program":
            return self.engine
        return dataclasses.replace(self.engine, data_parallel_size=1)

    def __post_init__(self) -> None:
        if self.options.data_parallel_backend == "mp":
            _check_independent(self)
        if not self.tenants and (self.options.api_key is not None or self.options.api_key_file is not None):
            raise ValueError("tenants: empty although the options name API keys; pass load_tenants(options)")


def _check_independent(config: ServerConfig) -> None:
    """Raises ValueError for what engines with a rank each cannot have: what spans ranks, or belongs to one engine."""
    engine, name = config.engine, "data_parallel_backend"
    if (engine.data_parallel_size or 1) < 2:
        raise ValueError(f"{name}: mp needs --data_parallel_size of 2 or more")
    excluded = {
        "enable_expert_parallel": (engine.enable_expert_parallel, "its experts span the ranks"),
        "coordinator": (config.cluster is not None, "an instance of several processes is one engine"),
        "enable_weight_updates": (config.options.enable_weight_updates, "a restarted engine would lack the update"),
        "transfer_address": (engine.transfer_address is not None, "each engine would listen there"),
        "kv_events_config": (engine.kv_events_config is not None, "each engine would publish there"),
        "step_metrics_config": (engine.step_metrics_config is not None, "each engine would publish there"),
    }
    for option, (is_given, reason) in excluded.items():
        if is_given:
            raise ValueError(f"{name}: mp excludes --{option}: {reason}")
