"""What leader and followers do alike on their way to an engine: jax over all processes, parts, limits."""

import hashlib
import logging
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import jax

from dsv3.engine.build import EngineOptions, load_parts
from dsv3.engine.cluster.compiled import ProgramStore
from dsv3.engine.cluster.fingerprint import Fields
from dsv3.engine.cluster.options import ClusterOptions, read_key, split_address
from dsv3.engine.config import EngineConfig
from dsv3.engine.parts import Parts

Load = Callable[[Path, Mapping[str, object]], Parts]
"""Makes the parts of an engine; called in every process, with jax started over all of them."""

_log = logging.getLogger("dsv3.cluster")
_CONNECT_S = 300


class Phases:
    """Names and seconds of what has been done since the start."""

    def __init__(self) -> None:
        self._started = self._last = time.monotonic()
        self._done: list[str] = []

    def end(self, name: str) -> None:
        """The phase `name` is over."""
        now = time.monotonic()
        self._done.append(f"{name} {now - self._last:.1f} s")
        self._last = now

    def __str__(self) -> str:
        return f"{self._last - self._started:.1f} s: {', '.join(self._done)}"


def load_model(model_dir: Path, options: Mapping[str, object]) -> Parts:
    """The parts of a real engine."""
    return load_parts(model_dir, EngineOptions(**options), progress=False)  # type: ignore[arg-type]


def start_jax(cluster: ClusterOptions) -> None:
    """Joins this process's devices with those of the others, all of which are there already.

    The coordinator listens at the given address alone, not at all of the host's. Its own failure detection is far
    slower than ours, and its preemption service would take SIGTERM from us.
    """
    jax.config.update("jax_enable_compilation_cache", False)  # see `compiled`
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        cluster.coordinator,
        cluster.num_processes,
        cluster.process_id,
        cluster_detection_method="deactivate",
        initialization_timeout=_CONNECT_S,
        coordinator_bind_address=_bind_address(cluster.coordinator),
    )
    _log.info("%d devices, %d of them here", len(jax.devices()), jax.local_device_count())


def program_store(
    cluster: ClusterOptions, options: Mapping[str, object], fields: Fields, config: EngineConfig, parts: Parts
) -> ProgramStore:
    """Where this process keeps its compiled programs; `fields` are those before and after loading."""
    key = read_key(cluster.key_file)
    return ProgramStore(
        options.get("compilation_cache_dir"), key, fields, config, cluster.process_id, list(parts.mesh.devices.flat)
    )


def loaded_fields(parts: Parts) -> Fields:
    """What must be the same once the weights are loaded; the room for the cache may differ."""
    local = {"num_pages", "max_model_len", "model_id", "tokenizer_id", "max_num_queued_reqs"}
    limits = {k: repr(getattr(parts.cfg, k)) for k in parts.cfg.__dataclass_fields__ if k not in local}
    leaves = jax.tree_util.tree_leaves_with_path(parts.params)
    shapes = "\n".join(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}" for path, leaf in leaves)
    return {
        "platform": jax.local_devices()[0].client.platform_version,
        "devices": f"{jax.local_device_count()} x {jax.local_devices()[0].device_kind}",
        "parameters": hashlib.sha256(shapes.encode()).hexdigest()[:16],
        **limits,
    }


def _bind_address(coordinator: str) -> str:
    host, port = split_address(coordinator)
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return f"[{address[0]}]:{port}" if family == socket.AF_INET6 else f"{address[0]}:{port}"
