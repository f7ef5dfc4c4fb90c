"""Builds the real engine inside of the engine process; jax is imported here and nowhere else in the server."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsv3.api.engine_process import EngineLike
from dsv3.api.frames import EngineInfo


def start_engine(
    model_dir: Path, options: dict[str, Any], progress: Callable[[str, int, int], None]
) -> tuple[EngineLike, EngineInfo]:
    """Loads and warms up; `options` are the fields of `EngineOptions`."""
    from dsv3.engine.build import EngineOptions, build_engine

    progress("loading the weights", 0, 0)
    engine = build_engine(model_dir, EngineOptions(**options), progress=os.isatty(sys.stderr.fileno()))
    engine.warm_up(lambda done, total, what: progress(f"compiling {what}", done, total))
    return engine, EngineInfo(
        vocab_size=engine.model_cfg.vocab_size,
        max_model_len=engine.cfg.max_model_len,
        max_num_seqs=engine.cfg.max_num_seqs * engine.cfg.num_ranks,
        num_pages=engine.cfg.num_pages * engine.cfg.num_ranks,
    )
