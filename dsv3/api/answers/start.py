"""Starts and ends the engine's process of a service."""

import logging
from collections.abc import Callable

from dsv3.api.answers.service import Service
from dsv3.api.config import ServerConfig
from dsv3.api.engine.launcher import EngineProcess
from dsv3.api.engine.messages import Start, StartProgress

_END_S = 5.0
_log = logging.getLogger("dsv3.server")


async def start_engine(config: ServerConfig, service: Service) -> EngineProcess:
    """Starts the engine's process and connects the service to it; `service.engine.state` tells when it is ready.

    `config.notify` gets lines about the start. The process is killed when the engine fails.
    """
    process = EngineProcess()
    service.engine.on_progress = _ProgressLines(config.notify)
    service.engine.on_failure = lambda _: process.kill()
    _, connection = process.connect()
    start = Start(config.engine_factory, str(config.model_dir), config.engine, config.cluster, config.factory_options)
    await service.engine.connect(connection, start)
    return process


async def end_engine(service: Service, process: EngineProcess) -> None:
    """Ends the process, by force if it does not end by itself; a failure is logged with its exit status."""
    service.engine.close()
    status = await process.wait(_END_S)
    if service.engine.state == "failed":
        _log.error("%s (engine process %d, exit status %d)", service.engine.reason, process.pid, status)


class _ProgressLines:
    """Tells what the engine does while it starts; a tenth of the lines where it counts."""

    def __init__(self, notify: Callable[[str], None]):
        self._notify = notify

    def __call__(self, progress: StartProgress) -> None:
        if not progress.total:
            self._notify(progress.text)
        elif progress.done == progress.total or progress.done % max(1, progress.total // 10) == 0:
            self._notify(f"[{progress.done}/{progress.total}] {progress.text}")
