"""Builds an engine from a model directory, for the notebook face, the server and the batch tool alike."""

import dataclasses
import hashlib
import logging
import os
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dsv3.checkpoint.identity import known_identity
from dsv3.config.hugging_face import load_config, stored_dtype
from dsv3.config.identity import CacheIdentity, model_identity
from dsv3.config.model import Fp8Config, ModelConfig
from dsv3.config.options import EngineOptions
from dsv3.engine.assemble.functions import expert_parallel_functions
from dsv3.engine.assemble.weights import Reading, load_replicated, load_spread
from dsv3.engine.components import EngineComponents
from dsv3.engine.description import describe
from dsv3.engine.device.driver import started_devices
from dsv3.engine.device.pool import device_memory, set_pool_share
from dsv3.engine.dtypes import EngineDtypes, resolve_dtypes
from dsv3.engine.engine import Engine
from dsv3.engine.functions import StepFunctions, in_full_precision, model_functions
from dsv3.engine.kernel_checks import check_kernels, fall_back
from dsv3.engine.limits import Hardware, engine_config, pages_of_one
from dsv3.engine.sizing import size_pool
from dsv3.engine.stored import own_store, use_compilation_cache
from dsv3.model.tensor_parallel import check_shards
from pallas_kernels.backend import prepare, resolve_backend
from sharding.mesh import rank_mesh

_log = logging.getLogger(__name__)


def bundled_model() -> Path:
    """Returns the directory of the small model that ships with the package."""
    return Path(__file__).parents[1] / "bundled"


def build_engine(
    model_dir: str | os.PathLike[str], options: EngineOptions | None = None, *, progress: bool = True
) -> Engine:
    """Builds an engine with the weights of a Hugging Face model directory; call `warm_up` before the first request.

    `progress` shows a bar while weights load. Raises `ConfigError` or `CheckpointError` for a directory that cannot
    be served, ValueError where the limits do not fit the device, `KernelCheckError` where kernels cannot be checked.
    """
    options = options or EngineOptions()
    if options.check_kernels:
        _model(Path(model_dir), options)  # refuses what cannot be served before the checks take their time
        fall_back(check_kernels())
    parts = load_components(model_dir, options, progress=progress)
    _log.info("model: %s", parts.description)
    _log.info("cache: %d pages of 64 tokens, up to %d tokens per request", parts.cfg.num_pages, parts.cfg.max_model_len)
    return Engine(parts, store=own_store(Path(model_dir), options, parts))


def load_components(
    model_dir: str | os.PathLike[str],
    options: EngineOptions,
    *,
    num_nodes: int = 1,
    progress: bool = True,
    shapes: bool = False,
) -> EngineComponents:
    """Loads the parts of an engine, as `build_engine` puts them together; raises as it does.

    Called in each process of an instance, it reads what this one's devices hold. Limits suit this process's devices.
    The processes lie on `num_nodes` hosts, equally many on each and in order: these are the nodes of the mesh. Whether
    all fits is said from shapes, before a weight is read. With `shapes` none is read: its shape stands in its place.
    """
    cache = use_compilation_cache(options.compilation_cache_dir)
    set_pool_share(options.gpu_memory_utilization)
    model_cfg, shards = _model(Path(model_dir), options), options.tensor_parallel_size
    devices = _devices(options.data_parallel_size, shards)
    mine = next(device for device in devices if device.process_index == jax.process_index())
    # This builds what a CPU lacks, and names its kernels to XLA before a stored program calls them.
    backend = resolve_backend(mine)
    prepare(backend)
    dtypes = resolve_dtypes(model_cfg, options, mine, stored_dtype(Path(model_dir)))
    mesh = rank_mesh(devices, num_nodes, shards)
    hardware = Hardware(len(devices) // shards, num_nodes, mine.platform == "cpu", jax.process_count())
    tokenizer = Path(model_dir) / "tokenizer.json"

    def parts(shapes: bool, progress: bool, pages: int | None) -> EngineComponents:
        read = Reading(dtypes.compute, options.fp8, progress, options.int4, shapes)
        functions, served = _functions(model_dir, model_cfg, options, mesh, read)
        return EngineComponents(
            functions,
            served,
            model_cfg,
            engine_config(model_cfg, options, hardware, dtypes, pages=pages, identity=identity),
            mesh,
            tokenizer=tokenizer if tokenizer.is_file() else None,
            description=describe(model_cfg, dtypes, backend, options.int4),
        )

    identity = _cache_identity(Path(model_dir), model_cfg, options, dtypes).text
    memory = device_memory(mine)
    if memory is None:
        return parts(shapes, progress, None)
    smallest = parts(True, False, pages_of_one(model_cfg, options)).shapes
    found = size_pool(smallest, memory, Path(model_dir), options, cache)
    _log.info("memory of a device: %s", found.account)
    return dataclasses.replace(parts(shapes, progress, found.account.pages), memory=found)


def _model(model_dir: Path, options: EngineOptions) -> ModelConfig:
    """Returns the model as it is served. Raises ValueError for options that it was not made for."""
    cfg = _served(load_config(model_dir), options)
    check_shards(cfg, options.tensor_parallel_size, fp8=cfg.fp8 is not None and options.fp8 != "dequantize")
    pages_of_one(cfg, options)
    return cfg


def _served(model_cfg: ModelConfig, options: EngineOptions) -> ModelConfig:
    """Returns the model as it is served: with its first MTP module where that proposes drafts, else with none.

    It has FP8 products where options make them. Weights that nothing uses are not loaded, and get no share of the
    cache. Raises ValueError for a model without.
    """
    wanted = options.speculative is not None and options.speculative.method == "mtp"
    if wanted and not model_cfg.num_nextn_predict_layers:
        raise ValueError(
            "speculative_config: method 'mtp' needs a model with a multi-token prediction module, and this one has "
            "none; choose 'ngram' or leave speculative_config away"
        )
    fp8 = model_cfg.fp8 or (Fp8Config() if options.fp8 == "quantize" else None)
    return dataclasses.replace(model_cfg, num_nextn_predict_layers=int(wanted), fp8=fp8)


def _functions(
    model_dir: str | os.PathLike[str], cfg: ModelConfig, options: EngineOptions, mesh: Mesh, read: Reading
) -> tuple[StepFunctions, Any]:
    """Returns the step functions, and the parameters as they take them, each device's share read to it."""
    if not options.spreads_experts:
        functions = in_full_precision(model_functions(dtype=read.dtype, drafts=bool(cfg.num_nextn_predict_layers)))
        return functions, load_replicated(model_dir, cfg, functions.param_specs, mesh, read)
    redundant = options.num_redundant_experts
    fp8 = options.int4 == "fp8" if cfg.int4_experts else cfg.fp8 is not None and options.fp8 != "dequantize"
    how = {"transport": options.expert_transport, "combine": options.expert_combine, "dtype": read.dtype, "fp8": fp8}
    functions = in_full_precision(
        expert_parallel_functions(cfg, mesh, redundant, **how, overlaps=options.expert_overlap)
    )
    return functions, load_spread(model_dir, cfg, functions.param_specs, mesh, redundant, read)


def _devices(ranks: int | None, shards: int) -> list[jax.Device]:
    """Returns devices of `ranks` ranks of `shards` each, those of a process side by side, equally many of each.

    Raises ValueError where there are too few or the wrong ones.
    """
    devices = sorted(started_devices(), key=lambda device: (device.process_index, device.id))
    if jax.process_count() == 1:
        needed = (ranks or 1) * shards
        if len(devices) < needed:
            raise ValueError(
                f"data_parallel_size {ranks or 1} times tensor_parallel_size {shards} is {needed} devices, but jax "
                f"sees {len(devices)}; lower one of them"
            )
        return devices[:needed]
    counts = Counter(device.process_index for device in devices)
    if len(set(counts.values())) > 1:
        raise ValueError(f"processes must have equally many devices, but they have {dict(counts)}")
    if counts[0] % shards:
        raise ValueError(
            f"tensor_parallel_size {shards} does not divide the {counts[0]} devices of a process: a rank's devices "
            "must be in one process; lower it, or start fewer processes per host, with more devices each"
        )
    if ranks not in (None, len(devices) // shards):
        raise ValueError(
            f"data_parallel_size is {ranks}, but the processes have {len(devices)} devices together; with "
            f"tensor_parallel_size {shards} that makes {len(devices) // shards} ranks"
        )
    return devices


def _cache_identity(
    directory: Path, model_cfg: ModelConfig, options: EngineOptions, dtypes: EngineDtypes
) -> CacheIdentity:
    """Returns what the pages of this engine depend on beside tokens.

    Latents of engines that round experts' sums differ from those of engines that do not.
    """
    compute = jnp.dtype(dtypes.compute).name + (", int8 sums" if options.expert_combine == "int8" else "")
    return CacheIdentity(
        weights=known_identity(directory),
        tokenizer=_tokenizer_identity(directory),
        model=model_identity(model_cfg),
        cache_dtype=dtypes.cache,
        compute_dtype=compute,
        fp8=options.fp8,
        int4=options.int4,
        page_size=model_cfg.page_size,
    )


def _tokenizer_identity(directory: Path) -> str:
    """Returns a digest of the tokenizer's files."""
    names = ("tokenizer.json", "tokenizer_config.json", "tiktoken.model", "tekken.json")
    files = [directory / name for name in names] + sorted(directory.glob("tokenization_*.py"))
    digest = hashlib.sha256()
    for content in (file.read_bytes() for file in files if file.is_file()):
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()
