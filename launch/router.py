"""Routes requests to several instances; an answer whose instance dies goes on at another one.

  python -m launch.router --instances http://127.0.0.1:8001,http://127.0.0.1:8002
  python -m launch.router --prefill http://a:8000,http://b:8000 --decode http://c:8000,http://d:8000
  python -m launch.router --registration                    instances come and go: launch.serve --register URL

It imports no jax and keeps nothing: a second one may run beside it. docs/failures.md says what clients see when one
dies. GET /health answers 503 until an instance is ready. The first SIGTERM (or ^C) stops taking requests and lets those
in flight finish; the second ends them.
"""

import logging
import sys

import uvloop

from dsv3.config.server_options import ServerOptions
from dsv3.server.http.api_server import bind
from dsv3.server.tenants import Tenant, tenants_of
from launch import cli, flags
from router.app import instance_key, serve
from router.options import RouterOptions

cli.define(RouterOptions)


def main() -> int:
    """Serves until a signal."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    options = cli.read(RouterOptions)
    tenants, api_key = _keys(options)
    try:
        listener = bind(options.host, options.port)
    except OSError as error:
        where = f"{options.host} port {options.port}"
        raise flags.UsageError(f"cannot listen on {where}: {error.strerror or error}; choose another --port") from None
    host = f"[{options.host}]" if ":" in options.host else options.host
    scheme = "http" if options.ssl_certfile is None else "https"
    _say(f"routing at {scheme}://{host}:{listener.getsockname()[1]}")
    try:
        return uvloop.run(serve(options, tenants, api_key, listener, _say))
    except ValueError as error:
        raise flags.UsageError(f"--{error}") from None


def _keys(options: RouterOptions) -> tuple[tuple[Tenant, ...], str | None]:
    try:
        return tenants_of(ServerOptions(api_key_file=options.api_key_file)), instance_key(options)
    except ValueError as error:
        raise flags.UsageError(f"--{error}") from None


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    flags.run(main)
