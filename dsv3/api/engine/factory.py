"""Builds the real engine inside of the engine process; jax is imported here and nowhere else in the server."""

import os
import sys
from pathlib import Path
from typing import Any

from dsv3.api.engine.messages import EngineInfo
from dsv3.api.engine.process import EngineLike, Host
from dsv3.engine.cluster.options import ClusterOptions

CLUSTER = "cluster"
"""The option that makes this process the leader of several: the fields of `ClusterOptions`."""


def start_engine(model_dir: Path, options: dict[str, Any], host: Host) -> tuple[EngineLike, EngineInfo]:
    """Loads and warms up; `options` are the fields of `EngineOptions`, and `CLUSTER`."""
    from dsv3.engine.build import EngineOptions, build_engine
    from dsv3.engine.cluster.lead import start_leader

    options = dict(options)
    if cluster := options.pop(CLUSTER, None):
        return describe(start_leader(ClusterOptions(**cluster), model_dir, options, host))
    host.progress("loading the weights")
    engine = build_engine(model_dir, EngineOptions(**options), progress=os.isatty(sys.stderr.fileno()))
    engine.warm_up(lambda done, total, what: host.progress(f"compiling {what}", done, total))
    return describe(engine)


def describe(engine: Any) -> tuple[EngineLike, EngineInfo]:
    """A warm engine, and what the HTTP process needs to know about it."""
    return engine, EngineInfo(
        rules=engine.rules,
        max_num_seqs=engine.cfg.max_num_seqs * engine.cfg.num_ranks,
        num_pages=engine.cfg.num_pages * engine.cfg.num_ranks,
    )
