"""The server of `benchmarks.bodies`: the real one, over the tests' engine, and a task that looks around.

The task notes the most processor time that has passed between two of its turns, in any thread: a piece of work that
kept the event loop from everything else. It stands in a shared file, where whoever reads it may set it back to 0.
"""

import asyncio
import json
import mmap
import struct
import sys
import time
from pathlib import Path

import uvloop

from dsv3.config.options import EngineOptions
from dsv3.server.config import ServerConfig
from dsv3.server.http.api_server import bind, serve

_TURN_S = 0.0005


def main(settings: dict) -> int:
    """Serves until SIGTERM; prints the port, and "ready"."""
    if settings["http"] != "own":
        from benchmarks.http_servers import install  # this tree's, where another tree's server is measured

        install(settings["http"])
    listener = bind("127.0.0.1", 0)
    print("port", listener.getsockname()[1], flush=True)
    config = ServerConfig(
        model_dir=Path(settings["model_dir"]),
        model_names=("tiny",),
        engine=EngineOptions(max_model_len=settings["max_model_len"], max_num_seqs=256),
        engine_factory="tests.dsv3.server.fake_engine:make",
        factory_options={"step_s": settings["step_s"]},
        notify=lambda line: None,
    )
    return uvloop.run(_serve(config, listener, Path(settings["longest"])))


async def _serve(config: ServerConfig, listener, path: Path) -> int:
    watching = asyncio.create_task(_watch(path))
    try:
        return await serve(config, listener, lambda _: print("ready", flush=True))
    finally:
        watching.cancel()


async def _watch(path: Path) -> None:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 8) as longest:
        before = time.process_time()
        while True:
            await asyncio.sleep(_TURN_S)
            now = time.process_time()
            if now - before > struct.unpack("d", longest)[0]:
                longest[:] = struct.pack("d", now - before)
            before = now


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
