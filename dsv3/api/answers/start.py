"""Starts and ends the engine's process of a service."""

import logging

from dsv3.api.answers.service import Service
from dsv3.api.config import ServerConfig
from dsv3.api.engine.launcher import EngineProcess
from dsv3.api.engine.messages import Start

_END_S = 5.0
_log = logging.getLogger("dsv3.server")


async def start_engine(config: ServerConfig, service: Service) -> EngineProcess:
    """Starts the engine's process and connects the service to it; `service.engine.state` tells when it is ready.

    The process is killed when the engine fails.
    """
    process = EngineProcess()
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
