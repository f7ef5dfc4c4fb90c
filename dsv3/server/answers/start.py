"""Starts the engine of a service, and says what its front tells of it."""

from collections.abc import Callable

from dsv3.server.answers.service import Service
from dsv3.server.config import ServerConfig
from dsv3.server.engine.client import EngineClient
from dsv3.server.engine.keeper import EngineKeeper
from dsv3.server.engine.messages import Start, StartProgress


def make_client(config: ServerConfig) -> EngineClient:
    """Returns the first front's client, not connected yet."""
    return EngineClient(
        max_num_queued_reqs=config.engine.max_num_queued_reqs,
        watchdog_s=config.watchdog_s,
        pulse_watchdog_s=config.pulse_watchdog_s,
        max_restarts=config.max_restarts,
    )


async def start_engine(config: ServerConfig, service: Service) -> EngineKeeper:
    """Starts the engine and connects the service to it; `service.engine.state` tells when it is ready.

    `config.notify` gets lines about the start. The process is killed when the engine fails.
    """
    engine = service.engine
    start = Start(config.engine_factory, str(config.model_dir), config.engine, config.cluster, config.factory_options)
    keeper = EngineKeeper(engine, start, config.restarts if config.max_restarts else None)
    keeper.on_loss = lambda *_: service.metrics.add("engine_restarts", 1)
    engine.on_progress = _ProgressLines(config.notify)
    engine.on_failure = lambda _: keeper.kill()
    await keeper.connect()
    return keeper


class _ProgressLines:
    """Tells what the engine does while it starts; a tenth of the lines where it counts."""

    def __init__(self, notify: Callable[[str], None]):
        self._notify = notify

    def __call__(self, progress: StartProgress) -> None:
        if not progress.total:
            self._notify(progress.text)
        elif progress.done == progress.total or progress.done % max(1, progress.total // 10) == 0:
            self._notify(f"[{progress.done}/{progress.total}] {progress.text}")
