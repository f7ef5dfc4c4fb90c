"""What leader and followers do alike on their way to an engine: jax over all processes, parts, limits."""

import ctypes
import dataclasses
import logging
import socket
import time
from pathlib import Path
from typing import Protocol

import jax

from dsv3.config.hugging_face import load_config
from dsv3.config.options import ClusterOptions, EngineOptions, split_address
from dsv3.engine.build import load_components
from dsv3.engine.cluster.link import FIRST, Incarnation
from dsv3.engine.components import EngineComponents
from dsv3.engine.device.driver import started_devices
from dsv3.engine.fingerprint import Fields, agreed, shaping
from dsv3.engine.stored import NothingKept, ProgramStore, device_fields, program_store
from dsv3.processes.certificates import IDENTITY, credentials_of
from dsv3.processes.key_file import read_key

_log = logging.getLogger("dsv3.cluster")
_CONNECT_S = 300


class LoadComponents(Protocol):
    """Makes the parts of an engine; called in every process, with jax started over all of them.

    The mesh has `num_nodes` nodes.
    """

    def __call__(self, model_dir: Path, options: EngineOptions, *, num_nodes: int) -> EngineComponents: ...


class Phases:
    """Names and seconds of what has been done since the start."""

    def __init__(self) -> None:
        self._started = self._last = time.monotonic()
        self._done: list[str] = []

    def end(self, name: str) -> None:
        """Notes that the phase `name` is over."""
        now = time.monotonic()
        self._done.append(f"{name} {now - self._last:.1f} s")
        self._last = now

    def __str__(self) -> str:
        return f"{self._last - self._started:.1f} s: {', '.join(self._done)}"


def load_model(model_dir: Path, options: EngineOptions, *, num_nodes: int) -> EngineComponents:
    """Loads the parts of a real engine."""
    return load_components(model_dir, options, num_nodes=num_nodes, progress=False)


def own_options(options: EngineOptions, cluster: ClusterOptions) -> EngineOptions:
    """Returns the options of this process, where `options` are those of its host.

    Further processes of a host let others fetch pages at the ports that follow the first one's. Raises ValueError where
    there are too few.
    """
    if options.transfer_address is None or cluster.local_id == 0:
        return options
    host, _, port = options.transfer_address.rpartition(":")
    return dataclasses.replace(options, transfer_address=f"{host}:{int(port) + cluster.local_id}")


def start_jax(cluster: ClusterOptions, generation: Incarnation = FIRST) -> None:
    """Joins this process's devices with those of the others of its generation, all of which are there already.

    Processes of one host take equal shares of its GPUs; raises ValueError where that is not possible. On a CPU each has
    devices of its own.

    The coordinator listens at the given address alone, not at all of the host's. It and its clients show each other
    certificates of the generation: without them one call of a stranger, or of a process that is late to leave an
    earlier generation, would end every process. Its own failure detection is far slower than ours, and its preemption
    service would take SIGTERM from us.
    """
    credentials = credentials_of(generation.secret(read_key(cluster.cluster_key_file)))
    jax.config.update("jax_enable_compilation_cache", False)  # see `dsv3.engine.stored`
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        cluster.coordinator,
        cluster.num_processes,
        cluster.process_id,
        own_gpus(cluster),
        cluster_detection_method="deactivate",
        initialization_timeout=_CONNECT_S,
        coordinator_bind_address=_bind_address(cluster.coordinator),
        mtls_cert_file=credentials.certificate,
        mtls_key_file=credentials.private_key,
        mtls_ca_file=credentials.authority,
        mtls_peer_uri_prefix=IDENTITY,
        verify_secure_credentials=True,
    )
    _log.info(
        "%d devices on %d nodes, %d of them here",
        *(len(started_devices()), cluster.num_nodes, jax.local_device_count()),
    )


def kept_programs(
    cluster: ClusterOptions, model_dir: Path, options: EngineOptions, parts: EngineComponents
) -> ProgramStore | NothingKept:
    """Returns where this process keeps its compiled programs; `parts.cfg` are the limits that all use."""
    key = read_key(cluster.cluster_key_file)
    return program_store(model_dir, options, parts, key, shaping(cluster), cluster.process_id)


def loaded_fields(parts: EngineComponents) -> Fields:
    """Returns what must be the same once the weights are loaded; the room for the cache may differ."""
    return device_fields(parts) | agreed(parts.cfg)


def own_gpus(cluster: ClusterOptions) -> list[int] | None:
    """Returns which of the GPUs that this process sees it takes; None for all."""
    processes = cluster.processes_per_node
    gpus = 0 if processes == 1 or jax.config.jax_platforms == "cpu" else _visible_gpus()
    if gpus % processes:
        raise ValueError(
            f"processes_per_node: {processes} does not divide the {gpus} GPUs that this process sees; it must see all "
            "of its host, to take its share of them (under Slurm ask for --gpus-per-node, not for --gpus-per-task, and "
            "bind none)"
        )
    each = gpus // processes
    return list(range(cluster.local_id * each, (cluster.local_id + 1) * each)) or None


def first_gpu(cluster: ClusterOptions) -> int | None:
    """Returns the first of `own_gpus`; None where all are its own."""
    own = own_gpus(cluster)
    return own[0] if own else None


def _visible_gpus() -> int:
    """Returns how many GPUs CUDA's driver shows this process, 0 without one; jax, once asked, would take them all."""
    count = ctypes.c_int(0)
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    return count.value if cuda.cuInit(0) == 0 == cuda.cuDeviceGetCount(ctypes.byref(count)) else 0


def _bind_address(coordinator: str) -> str:
    host, port = split_address(coordinator, "coordinator")
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return f"[{address[0]}]:{port}" if family == socket.AF_INET6 else f"{address[0]}:{port}"


def fitted(options: EngineOptions, model_dir: Path, given: ClusterOptions, cluster: ClusterOptions) -> EngineOptions:
    """Returns the options for the processes of `cluster`, of those that were `given`; with jax started over them.

    Each device that is left is a rank, or part of one, as before. It stores as many replicas of experts as before
    where all experts fit so, else as few more as they need. Every process finds the same.
    """
    if cluster.num_processes == given.num_processes:
        return options
    devices, redundant = jax.device_count(), options.num_redundant_experts
    if options.spreads_experts:
        experts = load_config(model_dir).n_routed_experts
        before = devices * given.num_processes // cluster.num_processes
        redundant = redundant_experts(experts, experts + redundant, before, devices)
        _log.warning("%d devices are left of %d, with %d redundant experts", devices, before, redundant)
    ranks = devices // options.tensor_parallel_size
    return dataclasses.replace(options, data_parallel_size=ranks, num_redundant_experts=redundant)


def redundant_experts(experts: int, replicas: int, before: int, devices: int) -> int:
    """Returns how many more replicas than experts to store on `devices` that are fewer than `before`."""
    per_device = max(replicas // before, -(-experts // devices))
    return per_device * devices - experts
