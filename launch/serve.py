"""Serves a DeepSeek-V3-family model over OpenAI's HTTP API.

  python -m launch.serve                                  the bundled model on http://127.0.0.1:8000
  python -m launch.serve --model /models/DeepSeek-V3      a Hugging Face model directory

Over several hosts the same command runs once on each (docs/multi_host.md); process 0 serves HTTP, the others follow it:

  python -m launch.serve --coordinator HOST0:8476 --num_processes 2 --process_id 0 --cluster_key_file FILE
  python -m launch.serve --coordinator HOST0:8476 --num_processes 2 --process_id 1 --cluster_key_file FILE

GET /health answers 503 until the model is loaded and compiled. The first SIGTERM (or ^C) stops taking requests and
lets those in flight finish; the second aborts them.
"""

import dataclasses
import os
from pathlib import Path

import uvloop
from absl import flags as absl_flags

from dsv3.api.answers.service import Service
from dsv3.api.config import ServerConfig
from dsv3.api.engine.factory import CLUSTER
from dsv3.api.engine.process import configure_logging
from dsv3.api.http.server import bind, serve
from dsv3.engine.cluster.options import ClusterOptions
from dsv3.text.reasoning import PARSERS
from launch import cluster_flags, engine_flags, flags

absl_flags.adopt_module_key_flags(engine_flags)
absl_flags.adopt_module_key_flags(cluster_flags)
_HOST = absl_flags.DEFINE_string("host", "127.0.0.1", "Address to listen on; 0.0.0.0 is all interfaces.")
_PORT = absl_flags.DEFINE_integer("port", 8000, "Port to listen on; 0 takes a free one.", 0, 65535)
_API_KEY = absl_flags.DEFINE_string(
    "api_key", None, "Key that every route but /health asks for. Process listings show it: see --api_key_file."
)
_API_KEY_FILE = absl_flags.DEFINE_string("api_key_file", None, "File that holds the API key on its first line.")
_MAX_QUEUED = absl_flags.DEFINE_integer("max_num_queued_reqs", 1024, "Sequences that may wait; beyond: 503 at once.", 0)
_REASONING = absl_flags.DEFINE_enum(
    "reasoning_parser",
    "auto",
    list(PARSERS),
    "Splits <think> ... </think> into reasoning_content. auto: if the chat template knows the markers; deepseek_r1: "
    "everything before </think> is reasoning, even without <think>.",
)
_SHUTDOWN_TIMEOUT = absl_flags.DEFINE_float(
    "shutdown_timeout", 30.0, "Seconds that requests in flight have to finish after SIGTERM.", 0.0
)


def main() -> int:
    configure_logging()
    cluster = cluster_flags.cluster_options(os.environ)
    config = _config(engine_flags.model_dir(), cluster)
    if cluster is not None and not cluster.is_leader:
        return _follow(cluster, config)
    try:
        listener = bind(_HOST.value, _PORT.value)
    except OSError as error:
        raise flags.UsageError(
            f"cannot listen on {_HOST.value} port {_PORT.value}: {error.strerror or error}; choose another --port"
        ) from None
    address = _address(_HOST.value, listener.getsockname()[1])
    _say(f"serving {config.model_names[0]} from {config.model_dir}; {address}/health tells when it is ready")
    try:
        return uvloop.run(serve(config, listener, lambda service: _say(_greeting(service, address, config))))
    except ValueError as error:
        _say(f"error: {error}")
        return 1


def _follow(cluster: ClusterOptions, config: ServerConfig) -> int:
    """Executes what process 0 sends, without HTTP."""
    from dsv3.engine.cluster.follower import run

    _say(f"process {cluster.process_id} of {cluster.num_processes}, following {cluster.coordinator}")
    options = dict(config.engine_options)
    del options[CLUSTER]
    run(cluster, config.model_dir, options)


def _config(model_dir: Path, cluster: ClusterOptions | None) -> ServerConfig:
    options = engine_flags.engine_options() | {"max_num_queued_reqs": _MAX_QUEUED.value}
    if cluster is not None:
        options[CLUSTER] = dataclasses.asdict(cluster)
    return ServerConfig(
        model_dir=model_dir,
        model_names=engine_flags.model_names(),
        engine_options=options,
        max_num_queued_reqs=_MAX_QUEUED.value,
        api_key=_api_key(),
        reasoning_parser=_REASONING.value,
        shutdown_timeout_s=_SHUTDOWN_TIMEOUT.value,
        notify=_say,
    )


def _api_key() -> str | None:
    if _API_KEY.value is not None and _API_KEY_FILE.value is not None:
        raise flags.UsageError("give one of --api_key and --api_key_file")
    key = _API_KEY.value
    if _API_KEY_FILE.value is not None:
        try:
            key = Path(_API_KEY_FILE.value).read_text("utf-8").partition("\n")[0].strip()
        except (OSError, UnicodeDecodeError) as error:
            raise flags.UsageError(f"--api_key_file: {error}") from None
    if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
        raise flags.UsageError("the API key must be printable ASCII without blanks, and not empty")
    return key


def _address(host: str, port: int) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"


def _greeting(service: Service, address: str, config: ServerConfig) -> str:
    """The address, and a line to paste into a terminal."""
    info = service.engine.info
    assert info is not None
    name = config.model_names[0]
    if service.templates is not None:
        path, body = "chat/completions", f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    elif service.tokenizer is not None:
        path, body = "completions", f'{{"model": "{name}", "prompt": "import ", "max_tokens": 32}}'
    else:
        path, body = "completions", f'{{"model": "{name}", "prompt": [1, 2, 3], "return_token_ids": true}}'
    auth = ' -H "Authorization: Bearer $API_KEY"' if config.api_key else ""
    return (
        f"ready at {address} ({info.rules.max_model_len} tokens a request, {info.max_num_seqs} requests at once, "
        f"{info.num_pages} cache pages)\n"
        f"curl {address}/v1/{path}{auth} -H 'Content-Type: application/json' -d '{body}'"
    )


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    flags.run(main)
