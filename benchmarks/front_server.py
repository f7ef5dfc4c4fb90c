"""The server of `benchmarks.front`: the real one, over `benchmarks.front_engine`."""

import json
import sys
from pathlib import Path

import uvloop

from benchmarks.http_servers import install
from dsv3.config.options import EngineOptions
from dsv3.config.server_options import ServerOptions
from dsv3.server.config import ServerConfig
from dsv3.server.http.api_server import bind, serve


def main(settings: dict) -> int:
    """Serves until SIGTERM; prints the port, and "ready"."""
    install(settings["http"])
    listener = bind("127.0.0.1", 0)
    print("port", listener.getsockname()[1], flush=True)
    config = ServerConfig(
        model_dir=Path(settings["model_dir"]),
        model_names=("empty",),
        options=ServerOptions(api_server_count=settings["fronts"]),
        engine=EngineOptions(max_num_queued_reqs=settings["streams"]),
        engine_factory="benchmarks.front_engine:make",
        factory_options={"rate": settings["rate"], "max_num_seqs": settings["streams"]},
        notify=lambda line: None,
    )
    return uvloop.run(serve(config, listener, lambda _: print("ready", flush=True)))


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
