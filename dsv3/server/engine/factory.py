"""Builds the engine inside the engine process; the only module of the server that imports jax."""

import os
import sys
from pathlib import Path
from typing import Any

from dsv3.processes.child import import_uncollected
from dsv3.server.engine.messages import EngineInfo, Start
from dsv3.server.engine.process import EngineHost, EngineLike


def start_engine(start: Start, host: EngineHost) -> tuple[EngineLike, EngineInfo]:
    """Loads the weights and compiles all programs, together with the followers of an instance of several processes."""
    import_uncollected("dsv3.engine.build", "dsv3.engine.cluster.leader_engine")
    from dsv3.engine.build import build_engine
    from dsv3.engine.cluster.leader_engine import start_leader

    model_dir = Path(start.model_dir)
    if start.cluster is not None:
        return describe(start_leader(start.cluster, model_dir, start.engine, host, generation=start.generation))
    host.progress(f"{'checking the kernels, then ' if start.engine.check_kernels else ''}loading the weights")
    engine = build_engine(model_dir, start.engine, progress=os.isatty(sys.stderr.fileno()))
    engine.warm_up(lambda done, total, what: host.progress(f"compiling {what}", done, total))
    return describe(engine)


def describe(engine: Any) -> tuple[EngineLike, EngineInfo]:
    """Returns a warm engine and the message that announces it to API servers."""
    return engine, EngineInfo(
        rules=engine.rules,
        max_num_seqs=engine.cfg.max_num_seqs * engine.cfg.num_ranks,
        num_pages=engine.cfg.num_pages * engine.cfg.num_ranks,
        transfer_address=",".join(engine.cfg.transfer_addresses) or engine.cfg.transfer_address or "",
        fetches_pages=engine.cfg.transfer_key_file is not None,
        model=engine.description,
        num_ranks=engine.cfg.num_ranks,
        kernel_fallbacks=engine.kernel_fallbacks,
        kv_events=None if engine.events is None else engine.cfg.kv_events.address(engine.cfg.num_ranks),
    )
