"""What a server is told when it starts."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from dsv3.api.engine.client import WATCHDOG_S
from dsv3.api.templates.pool import DEADLINE_S

# Time for load balancers to read the reason from /health before the process ends with status 1.
FAILURE_LINGER_S = 5.0


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """Everything a server needs. `engine_options` go to `engine_factory` ("module:function") in the engine's process.

    `reasoning_parser` "auto" splits reasoning off if the chat template knows the markers. `api_server_count` processes
    answer HTTP. `notify` gets lines for the person who started the server.
    """

    model_dir: Path
    model_names: tuple[str, ...]
    engine_options: dict[str, object] = dataclasses.field(default_factory=dict)
    max_num_queued_reqs: int = 1024
    api_server_count: int = 1
    api_key: str | None = None
    reasoning_parser: str = "auto"
    shutdown_timeout_s: float = 30.0
    failure_linger_s: float = FAILURE_LINGER_S
    watchdog_s: float = WATCHDOG_S
    template_deadline_s: float = DEADLINE_S
    engine_factory: str = "dsv3.api.engine.factory:start_engine"
    notify: Callable[[str], None] = print
