"""Building the leader's engine together with the followers, phase by phase."""

import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from dsv3.cache.page import PAGE_SIZE
from dsv3.engine.cluster.fingerprint import fields_of
from dsv3.engine.cluster.leader import Leader
from dsv3.engine.cluster.options import ClusterOptions
from dsv3.engine.cluster.start import Load, Phases, load_model, loaded_fields, program_store, start_jax
from dsv3.engine.config import EngineConfig
from dsv3.engine.engine import Engine

_SWITCH_INTERVAL_S = 0.0005  # commands shall leave while the engine's thread launches the same step


class Host(Protocol):
    """The process around the engine; `dsv3.api.engine.process.Host` is one."""

    def progress(self, text: str, done: int = 0, total: int = 0) -> None: ...
    def drain(self, reason: str) -> None: ...
    def fail(self, reason: str) -> None: ...
    def at_end(self, callback: Callable[[str | None], None]) -> None: ...


def start_leader(
    cluster: ClusterOptions,
    model_dir: Path,
    options: Mapping[str, object],
    host: Host,
    load: Load = load_model,
) -> Engine:
    """An engine over the devices of all processes, warm; every follower is ready when it returns.

    Raises ClusterError when processes are missing, differ or fail.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    phases = Phases()
    fields = fields_of(model_dir, options, cluster.num_processes)
    leader = Leader(cluster, fields, host.fail, host.drain)
    host.at_end(leader.end)
    host.progress(f"waiting for {cluster.num_processes - 1} other processes")
    leader.gather()
    phases.end("all have come")
    start_jax(cluster)
    phases.end("jax")
    host.progress("loading the weights")
    parts = load(model_dir, options)
    num_pages = leader.loaded(loaded := loaded_fields(parts))
    phases.end("weights")
    cfg = _with_pages(parts.cfg, num_pages, may_shorten=options.get("max_model_len") is None)
    leader.build(cfg)
    engine = Engine(parts.functions, parts.params, parts.model_cfg, cfg, parts.devices, leader)
    store = program_store(cluster, options, fields | loaded, cfg, parts)
    engine.warm_up(lambda done, total, what: host.progress(f"compiling {what}", done, total), store)
    leader.ready()
    phases.end("compiling")
    host.progress(f"{cluster.num_processes} processes are ready after {phases}; {store}")
    return engine


def _with_pages(cfg: EngineConfig, num_pages: int, *, may_shorten: bool) -> EngineConfig:
    """The leader's limits with no more cache pages than the process with the least room has."""
    num_pages = min(cfg.num_pages, num_pages)
    longest = min(cfg.max_model_len, num_pages * PAGE_SIZE) if may_shorten else cfg.max_model_len
    return dataclasses.replace(cfg, num_pages=num_pages, max_model_len=longest)
