"""Sizes the page pool of an engine from shapes and compiled programs, before a weight is read."""

import logging
from pathlib import Path

from dsv3.config.options import EngineOptions
from dsv3.engine.components import EngineComponents
from dsv3.engine.device.layout import Layout
from dsv3.engine.device.programs import ReadPrograms, measure
from dsv3.engine.executor import lay_out
from dsv3.engine.jobs.registry import JOB_KINDS
from dsv3.engine.jobs.sample import adjust_shapes
from dsv3.engine.limits import staging_bytes
from dsv3.engine.memory import Accounted, DeviceMemory, KeptWorking, MemoryAccount, account, check_fits, local_bytes
from dsv3.engine.stored import machine_fields, program_fields
from dsv3.kv_cache.layout import page_bytes

_log = logging.getLogger(__name__)


def account_of(layout: Layout, memory: DeviceMemory, utilization: float, working: int) -> MemoryAccount:
    """Returns the account of a device on which everything of `layout` lies, beside `working` memory."""
    return account(
        memory,
        utilization,
        weights=local_bytes(layout.params),
        state=local_bytes((layout.state, adjust_shapes(layout))),
        working=working,
        page=page_bytes(layout.model_cfg, layout.cfg.cache_dtype),
        page_size=layout.cfg.page_size,
    )


def size_pool(
    parts: EngineComponents, memory: DeviceMemory, model_dir: Path, options: EngineOptions, cache: Path
) -> Accounted:
    """Returns the account of an engine with the options, whose `parts` have shapes for weights and the smallest pool.

    The largest programs are compiled to be read, unless what they take is in `cache` from an earlier start. Raises
    ValueError where not a page fits, before anything is compiled if the weights alone are too much.
    """
    layout, programs = lay_out(parts, JOB_KINDS)
    utilization, staging = options.gpu_memory_utilization, staging_bytes(options)
    devices, spreads = layout.cfg.num_devices, bool(parts.model_cfg.num_moe_layers)
    least = account_of(layout, memory, utilization, staging)
    check_fits(least, options, devices=devices, spreads=spreads)
    moves = {"moves experts": str(options.enable_eplb)}
    kept = KeptWorking(cache, machine_fields() | program_fields(model_dir, options, parts) | moves)
    working = kept.read()
    if working is None:
        _log.info("compiling the largest programs, to see what memory they take")
        programs.store = ReadPrograms()
        working = measure(layout.cfg, programs)
        kept.keep(working)
    found = account_of(layout, memory, utilization, staging + working)
    check_fits(found, options, devices=devices, spreads=spreads)
    return Accounted(found, staging, kept)
