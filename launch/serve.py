"""Serves a DeepSeek-V3-family model over OpenAI's and Anthropic's HTTP APIs.

  python -m launch.serve                                    the bundled model on http://127.0.0.1:8000
  python -m launch.serve --model /models/DeepSeek-V2-Lite   a Hugging Face model directory, on one device

Without options one device holds all weights. DeepSeek-V3 has 671 GB of them and needs several GPUs, such as 8 H200:

  python -m launch.serve --model /models/DeepSeek-V3 --data_parallel_size 8 --enable_expert_parallel \
    --max_num_seqs 48 --max_num_batched_tokens 4096

Over several hosts the same command runs once on each, or once per GPU with --processes_per_node (docs/multi_host.md);
process 0 is the leader and serves HTTP, the others are its followers. On one host --expert_transport nccl_ep, which
needs a process per GPU, starts them itself:

  python -m launch.serve --coordinator HOST0:8476 --num_processes 2 --process_id 0 --cluster_key_file FILE
  python -m launch.serve --coordinator HOST0:8476 --num_processes 2 --process_id 1 --cluster_key_file FILE

GET /health returns 503 until the model is loaded and compiled. The first SIGTERM (or ^C) drains: no new requests, and
those in flight finish; the second aborts them.
"""

import dataclasses
import functools
import os
import sys
import tempfile
from pathlib import Path

import uvloop

from dsv3.config.options import ClusterOptions, EngineOptions
from dsv3.config.server_options import ServerOptions
from dsv3.engine.cluster.link import FollowOrder
from dsv3.engine.cluster.supervisor import Supervisor
from dsv3.logs import configure_logging
from dsv3.server.config import ServerConfig
from dsv3.server.http.api_server import serve
from dsv3.server.serving.service import Service
from dsv3.server.tenants import load_tenants
from launch import cli, flags, node
from launch.catalog import model_dir, model_names
from launch.cluster import cluster_options, one_host_flags, processes_needed

for _options in (ServerOptions, EngineOptions, ClusterOptions):
    cli.define(_options)
_say = functools.partial(print, flush=True)


def main() -> int:
    configure_logging()
    config = _config()
    if (count := processes_needed(config.engine, config.cluster)) > 1:
        with tempfile.TemporaryDirectory(prefix="dsv3-") as directory:
            own = one_host_flags(count, Path(directory))
            return node.serve(node.places([*sys.argv[1:], *own], 1, 0, count))
    if config.cluster is not None and not config.cluster.is_leader:
        return _follow(config.cluster, config)
    listener = cli.listen(config.options.host, config.options.port)
    address = _address(config.options, listener.getsockname()[1])
    _say(f"serving {config.model_names[0]} from {config.model_dir}; {address}/health returns 200 when it is ready")
    try:
        return uvloop.run(serve(config, listener, lambda service: _say(_greeting(service, address, config))))
    except ValueError as error:
        _say(f"error: {error}")
        return 1


def _follow(cluster: ClusterOptions, config: ServerConfig) -> int:
    """Runs a follower, in a process that is restarted when it dies."""
    _say(f"process {cluster.process_id} of {cluster.num_processes}, follower of {cluster.coordinator}")
    order = FollowOrder(cluster, str(config.model_dir), config.engine)
    return Supervisor(order, config.restarts if config.options.max_request_restarts else None).run()


def _config() -> ServerConfig:
    options, engine = cli.read(ServerOptions), cli.read(EngineOptions)
    cluster = cluster_options(os.environ)
    try:
        return ServerConfig(
            model_dir=model_dir(options),
            model_names=model_names(options),
            options=dataclasses.replace(options, api_key=None),
            tenants=load_tenants(options),
            engine=engine,
            cluster=cluster,
            notify=_say,
        )
    except ValueError as error:
        raise flags.UsageError(f"--{error}") from None


def _address(options: ServerOptions, port: int) -> str:
    host, scheme = options.host, "http" if options.ssl_certfile is None else "https"
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{scheme}://{shown}:{port}"


def _greeting(service: Service, address: str, config: ServerConfig) -> str:
    """Returns the model, the address, the capacity, and a request to try."""
    info = service.engine.info
    assert info is not None
    name = config.model_names[0]
    if service.templates is not None:
        path, body = "chat/completions", f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    elif service.tokenizer is not None:
        path, body = "completions", f'{{"model": "{name}", "prompt": "import ", "max_tokens": 32}}'
    else:
        path, body = "completions", f'{{"model": "{name}", "prompt": [1, 2, 3], "return_token_ids": true}}'
    auth = ' -H "Authorization: Bearer $API_KEY"' if config.tenants else ""
    return (
        f"{name}: {info.model}\n"
        f"ready at {address} ({info.rules.max_model_len} tokens per request, {info.max_num_seqs} requests at once, "
        f"KV cache of {info.num_pages * info.rules.page_size} tokens in {info.num_pages} pages)\n"
        f"curl {address}/v1/{path}{auth} -H 'Content-Type: application/json' -d '{body}'"
    )


if __name__ == "__main__":
    flags.run(main)
