"""The start of an engine over several processes, the same for leader and followers: jax, components, limits."""

import dataclasses
import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path

import jax

from dsv3.config.hugging_face import load_config
from dsv3.config.options import ClusterOptions, EngineOptions, split_address
from dsv3.engine.cluster.link import FIRST, Incarnation
from dsv3.engine.components import EngineComponents
from dsv3.engine.device.driver import started_devices
from dsv3.engine.fingerprint import Fields, matching_options, program_options
from dsv3.engine.stored import NoProgramStore, ProgramStore, device_fields, program_store
from dsv3.files import read_key
from dsv3.processes.certificates import IDENTITY, credentials_of
from dsv3.processes.gpus import visible_gpus

_log = logging.getLogger("dsv3.cluster")
_CONNECT_S = 300


LoadComponents = Callable[..., EngineComponents]
"""Loads the components of an engine, called as `dsv3.engine.build.load_components` in every process."""


class Phases:
    """Names and seconds of the phases of a start."""

    def __init__(self) -> None:
        self._started = self._last = time.monotonic()
        self._done: list[str] = []

    def end(self, name: str) -> None:
        """Records the end of the phase `name`."""
        now = time.monotonic()
        self._done.append(f"{name} {now - self._last:.1f} s")
        self._last = now

    def __str__(self) -> str:
        return f"{self._last - self._started:.1f} s: {', '.join(self._done)}"


def process_options(options: EngineOptions, cluster: ClusterOptions) -> EngineOptions:
    """Returns the options of this process, where `options` are those of its host.

    Further processes of a host serve pages to other instances at the ports behind the first one's. Raises ValueError
    where there are too few.
    """
    if options.transfer_address is None or cluster.local_id == 0:
        return options
    host, _, port = options.transfer_address.rpartition(":")
    return dataclasses.replace(options, transfer_address=f"{host}:{int(port) + cluster.local_id}")


def start_jax(cluster: ClusterOptions, generation: Incarnation = FIRST) -> None:
    """Joins this process's devices with those of the other processes of its generation, which have all connected.

    Processes of one host take equal shares of its GPUs; raises ValueError where that is impossible. On a CPU each has
    devices of its own.

    The coordinator listens at the given address alone, not at all of the host's. It and its clients authenticate each
    other with certificates of the generation: without them one unauthenticated call, or a process that is late to leave
    an earlier generation, would end every process. Its own failure detection is far slower than ours, and its
    preemption service would take SIGTERM from us.
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
        "%d devices on %d nodes, %d of them in this process",
        *(len(started_devices()), cluster.num_nodes, jax.local_device_count()),
    )


def open_program_store(
    cluster: ClusterOptions, model_dir: Path, options: EngineOptions, components: EngineComponents
) -> ProgramStore | NoProgramStore:
    """Returns this process's program store; `components.cfg` are the limits that all processes use."""
    key = read_key(cluster.cluster_key_file)
    return program_store(model_dir, options, components, key, program_options(cluster), cluster.process_id)


def loaded_fields(components: EngineComponents) -> Fields:
    """Returns what must be equal once the weights are loaded; the size of the cache may differ."""
    return device_fields(components) | matching_options(components.cfg)


def own_gpus(cluster: ClusterOptions) -> list[int] | None:
    """Returns the indices of the visible GPUs that this process uses; None: all."""
    processes = cluster.processes_per_node
    gpus = 0 if processes == 1 or jax.config.jax_platforms == "cpu" else visible_gpus()
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


def _bind_address(coordinator: str) -> str:
    host, port = split_address(coordinator, "coordinator")
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return f"[{address[0]}]:{port}" if family == socket.AF_INET6 else f"{address[0]}:{port}"


def adapt_to_devices(
    options: EngineOptions, model_dir: Path, given: ClusterOptions, cluster: ClusterOptions
) -> EngineOptions:
    """Returns the options for the processes of `cluster`, `given` those of the whole instance; jax must have started.

    Each remaining device is a rank, or part of one, as before. It stores as many expert replicas as before where all
    experts fit so, else as few more as they need. Every process computes the same.
    """
    if cluster.num_processes == given.num_processes:
        return options
    devices, redundant = jax.device_count(), options.num_redundant_experts
    if options.spreads_experts:
        experts = load_config(model_dir).n_routed_experts
        before = devices * given.num_processes // cluster.num_processes
        redundant = redundant_experts(experts, experts + redundant, before, devices)
        _log.warning("degraded: %d of %d devices, with %d redundant experts", devices, before, redundant)
    ranks = devices // options.tensor_parallel_size
    return dataclasses.replace(options, data_parallel_size=ranks, num_redundant_experts=redundant)


def redundant_experts(experts: int, replicas: int, before: int, devices: int) -> int:
    """Returns the number of redundant expert replicas for `devices`, after devices were lost: `before` is their number
    at the first start."""
    per_device = max(replicas // before, -(-experts // devices))
    return per_device * devices - experts
