"""All options of a server and of batch inference besides those of the engine (`options.py`), each declared once."""

import dataclasses
import re
from typing import Literal

from dsv3.config.declaration import check, option

ReasoningParser = Literal["auto", "deepseek_r1", "deepseek_v3", "kimi_k2", "glm45", "none"]
ToolCallParser = Literal[
    "auto", "deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "kimi_k2", "glm45", "glm47", "none"
]
Isolation = Literal["tenant", "salt", "none"]
DataParallelBackend = Literal["program", "mp"]

_MAX_API_SERVERS = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """Options common to a server and batch inference, besides the engine's. Raises ValueError for invalid values."""

    model: str | None = option(None, "Load this Hugging Face model directory; default: the bundled model.")
    served_model_name: tuple[str, ...] = option(
        (), "Answer to these names, separated by commas; default: the directory's name."
    )
    reasoning_parser: ReasoningParser = option(
        "auto",
        "Split <think> ... </think> off into reasoning_content. auto does so if the chat template knows the markers, "
        "the other names always; deepseek_r1 takes everything before </think> for reasoning, even without <think>.",
        group="text",
    )
    tool_call_parser: ToolCallParser = option(
        "auto",
        "Read tool calls in this format (docs/tools.md). auto detects it by vocabulary and chat template; with none, "
        "and where auto finds no format, requests with tools are rejected.",
        group="text",
    )

    escape_special_tokens: bool = option(
        False,
        "Read <｜User｜>, <think> and other markers in the messages and tools of a conversation as plain text; only "
        "the chat template's own are special tokens then. Prompts of /v1/completions keep theirs.",
        group="text",
    )

    def __post_init__(self) -> None:
        check(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions(ServiceOptions):
    """Options of a server."""

    host: str = option("127.0.0.1", "Listen on this address; 0.0.0.0 is all interfaces.")
    port: int = option(8000, "Listen on this port; 0 selects a free one.", low=0, high=65535)
    api_key: str | None = option(
        None,
        "Require this key on every route but /health and the page of /dashboard. Process listings show it: see "
        "--api_key_file.",
        group="http",
    )
    api_key_file: str | None = option(
        None,
        "Read API keys from this file, accessible to no other user: one per line, each after its name if it has one. "
        "SIGHUP rereads it.",
    )
    prefix_cache_isolation: Isolation = option(
        "tenant",
        "Share cached prefixes among the requests of one API key (tenant), of one key and cache_salt, which each "
        "request must then have (salt), or among all with the same cache_salt or none (none).",
        group="cache",
    )
    api_server_count: int = option(
        1,
        "Answer HTTP with this many processes, which share the port and the engine.",
        low=1,
        high=_MAX_API_SERVERS,
        group="http",
    )
    data_parallel_backend: DataParallelBackend = option(
        "program",
        "Run the ranks of --data_parallel_size in one program (program), or as independent engines with a process and "
        "devices each (mp): while one restarts, the others answer and continue its requests. mp excludes "
        "--enable_expert_parallel, which spans ranks.",
    )
    max_request_restarts: int = option(
        3,
        "Restart an engine that has died, and continue a request in at most this many engines after its first; 0: "
        "the server ends with its engine. With several processes all restart together.",
        low=0,
        group="http",
    )
    max_connections: int | None = option(
        None,
        "Serve at most this many connections per HTTP process; default: what the limit on open files allows, at most "
        "65536.",
        low=1,
        group="http",
    )
    ssl_certfile: str | None = option(
        None,
        "Use TLS with the certificate chain in this PEM file; SIGHUP rereads it and the next two.",
        group="http",
    )
    ssl_keyfile: str | None = option(
        None, "Read the certificate's key from this PEM file; default: --ssl_certfile.", group="http"
    )
    ssl_ca_certs: str | None = option(
        None, "Accept only clients with a certificate signed by these authorities.", group="http"
    )
    served_version: str | None = option(
        None,
        "Name this version of model or software in /v1/models, for routers that split conversations between two "
        "(--canary of launch.router).",
        group="fleet",
    )
    register: tuple[str, ...] = option(
        (),
        "Register with the routers at these URLs, separated by commas, until this instance drains.",
        group="fleet",
    )
    register_as: str | None = option(
        None, "Register this URL of the instance; default: scheme, --host and --port.", group="fleet"
    )
    register_key_file: str | None = option(
        None,
        "Read the key that these routers require of instances from this file, accessible to no other user.",
        group="fleet",
    )
    batch_dir: str | None = option(
        None,
        "Keep files and batches of /v1/files and /v1/batches in this directory; without it they answer 404.",
        group="http",
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "Allow pages of these origins, separated by commas, to use the API; * is all. Default: none.",
        group="http",
    )
    access_log: bool = option(False, "Write a line of JSON per request to standard error.", group="monitoring")
    otlp_traces_endpoint: str | None = option(
        None,
        "Send a trace per request to this OpenTelemetry collector, http://HOST:4318 or https://HOST/PATH (OTLP over "
        "HTTP); needs the extra otel (docs/tracing.md).",
        group="monitoring",
    )
    trace_url: str | None = option(
        None,
        "Link the slow requests of /dashboard to this page of a trace viewer, in which {trace_id} is replaced, such as "
        "http://HOST:16686/trace/{trace_id} for Jaeger; needs --otlp_traces_endpoint.",
        group="monitoring",
    )
    profile_dir: str | None = option(
        None,
        "Enable POST /start_profile and /stop_profile, which write traces of steps to this directory, for "
        "ui.perfetto.dev; default: disabled.",
        group="monitoring",
    )
    enable_weight_updates: bool = option(
        False,
        "Enable the routes that pause generation, replace the weights, and put the engine to sleep, for the operator "
        "(docs/rl.md); answers then have weight_version.",
        group="http",
    )
    shutdown_grace: float = option(
        0.0,
        "Accept requests for this many more seconds after SIGTERM, while /health and /ready return 503, so that "
        "routers notice first.",
        low=0,
        group="http",
    )
    shutdown_timeout: float = option(
        30.0,
        "Allow requests in flight this many seconds to finish after SIGTERM and --shutdown_grace.",
        low=0,
        group="http",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.api_key is not None and self.api_key_file is not None:
            raise ValueError("api_key_file: give one of api_key and api_key_file")
        for origin in self.allowed_origins:
            if not re.fullmatch(r"\*|https?://[^/\s]+", origin):
                raise ValueError(f"allowed_origins: {origin!r} is not * or like https://example.org")
        for name in ("ssl_keyfile", "ssl_ca_certs"):
            if getattr(self, name) is not None and self.ssl_certfile is None:
                raise ValueError(f"{name}: {getattr(self, name)!r} needs ssl_certfile")
        check_traces_endpoint(self.otlp_traces_endpoint)
        if (url := self.trace_url) is not None:
            if self.otlp_traces_endpoint is None:
                raise ValueError(f"trace_url: {url!r} needs otlp_traces_endpoint")
            if not re.fullmatch(r"https?://[^/?#\s]+[/?#][!-~]+", url) or "{trace_id}" not in url:
                raise ValueError(f"trace_url: {url!r} is not a URL with {{trace_id}}, http://HOST/trace/{{trace_id}}")
        if self.served_version is not None:
            check_version("served_version", self.served_version)
        self._check_register()

    def _check_register(self) -> None:
        for name in ("register_as", "register_key_file"):
            if getattr(self, name) is not None and not self.register:
                raise ValueError(f"{name}: {getattr(self, name)!r} needs register")
        if self.register and self.register_as is None and self.host in ("", "0.0.0.0", "::"):
            raise ValueError(f"register_as: with --host {self.host} routers need a URL that names this host")
        for url in (*self.register, *([self.register_as] if self.register_as else [])):
            if not re.fullmatch(r"https?://[^/\s]+/?", url):
                name = "register_as" if url == self.register_as else "register"
                raise ValueError(f"{name}: {url!r} is not http://HOST:PORT or https://HOST:PORT")


def check_version(name: str, version: str) -> None:
    """Raises ValueError, which begins with `name`, for a version that no server can have."""
    if not re.fullmatch(r"[A-Za-z0-9_.+-]{1,64}", version):
        raise ValueError(f"{name}: {version!r} is not 1 to 64 letters, digits or any of ._+-")


def check_traces_endpoint(url: str | None) -> None:
    """Raises ValueError unless `url` is None or one that traces can be sent to."""
    if url is not None and not re.fullmatch(r"https?://[^/\s?#@]+(/[!-~]*)?", url):
        raise ValueError(f"otlp_traces_endpoint: {url!r} is not http://HOST:PORT or https://HOST:PORT, or with a path")
