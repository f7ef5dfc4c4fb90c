"""The server that `serving` starts: a separate script, so that it imports nothing of the tests."""

import json
import sys
from pathlib import Path

import msgspec
import uvloop

from dsv3.config.options import ClusterOptions, EngineOptions
from dsv3.config.server_options import ServerOptions
from dsv3.processes.child import RestartPolicy
from dsv3.server.config import Deadlines, ServerConfig
from dsv3.server.http.api_server import bind, serve
from dsv3.server.tenants import load_tenants


def main() -> int:
    """Serves until a signal; prints the port, the server's lines, and at the end which heavy modules were imported."""
    settings = json.loads(sys.argv[1])
    kinds = {"options": ServerOptions, "engine": EngineOptions, "cluster": ClusterOptions, "deadlines": Deadlines}
    kinds["restarts"] = RestartPolicy
    for name, kind in kinds.items():
        if name in settings:
            settings[name] = msgspec.convert(settings[name], kind)
    settings["tenants"] = load_tenants(settings.get("options", ServerOptions()))
    settings["model_dir"] = Path(settings["model_dir"])
    settings["model_names"] = tuple(settings["model_names"])
    listener = bind("127.0.0.1", 0)
    print("port", listener.getsockname()[1], flush=True)
    config = ServerConfig(**settings, notify=lambda line: print(line, flush=True))
    status = uvloop.run(serve(config, listener, lambda _: print("ready", flush=True)))
    found = [name for name in ("jax", "opentelemetry") if name in sys.modules]
    print("imported", *(found or ["neither jax nor opentelemetry"]), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
