"""Routes requests to several instances; if an instance dies, another one continues its responses.

  python -m launch.router --instances http://127.0.0.1:8001,http://127.0.0.1:8002
  python -m launch.router --prefill http://a:8000,http://b:8000 --decode http://c:8000,http://d:8000
  python -m launch.router --registration                    instances come and go: launch.serve --register URL

It imports no jax and is stateless, so several may run side by side; docs/failures.md describes what clients see when
one dies. GET /health answers 503 until an instance is ready. The first SIGTERM (or ^C) refuses new requests and waits
for those in flight; the second ends them.
"""

import functools
import logging
import sys

import uvloop

from dsv3.config.server_options import ServerOptions
from dsv3.files import read_api_key
from dsv3.server.tenants import load_tenants
from launch import cli, flags
from router.app import serve
from router.options import RouterOptions

cli.define(RouterOptions)
_print = functools.partial(print, flush=True)


def main() -> int:
    """Serves until a signal."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    options = cli.read(RouterOptions)
    host = f"[{options.host}]" if ":" in options.host else options.host
    scheme, path = "http" if options.ssl_certfile is None else "https", options.instance_api_key_file
    try:
        tenants = load_tenants(ServerOptions(api_key_file=options.api_key_file))
        api_key = None if path is None else read_api_key(path, "instance_api_key_file")
        listener = cli.listen(options.host, options.port)
        _print(f"routing at {scheme}://{host}:{listener.getsockname()[1]}")
        return uvloop.run(serve(options, tenants, api_key, listener, _print))
    except ValueError as error:
        raise flags.UsageError(f"--{error}") from None


if __name__ == "__main__":
    flags.run(main)
