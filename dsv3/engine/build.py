"""Builds an engine from a model directory, for `LLM`, the server and the batch tool."""

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
from rich.filesize import decimal

from dsv3.checkpoint.identity import known_identity
from dsv3.config.hugging_face import load_config, stored_dtype
from dsv3.config.identity import CacheIdentity, model_identity
from dsv3.config.model import Fp8Config, ModelConfig
from dsv3.config.options import EngineOptions
from dsv3.engine.components import EngineComponents, Reading
from dsv3.engine.description import describe
from dsv3.engine.device.driver import started_devices
from dsv3.engine.device.layout import Layout
from dsv3.engine.device.pool import device_memory, set_memory_fraction
from dsv3.engine.device.programs import ReadPrograms, measure
from dsv3.engine.dtypes import EngineDtypes, fp8_experts, packed_mode, resolve_dtypes
from dsv3.engine.engine import Engine
from dsv3.engine.executor import lay_out
from dsv3.engine.expert_parallel import expert_parallel_functions, load_replicated, load_spread
from dsv3.engine.functions import StepFunctions, batch_invariant, in_full_precision, model_functions
from dsv3.engine.jobs import JOB_KINDS
from dsv3.engine.jobs.sample import adjust_shapes
from dsv3.engine.kernel_checks import apply_fallbacks, check_kernels
from dsv3.engine.limits import Hardware, engine_config, pages_of_one, staging_bytes
from dsv3.engine.memory import (
    DeviceMemory,
    MemoryAccount,
    PoolSizing,
    WorkingMemoryFile,
    account,
    check_beside,
    check_fits,
    local_bytes,
)
from dsv3.engine.stored import local_program_store, machine_fields, program_fields, use_compilation_cache
from dsv3.engine.tuning import apply_tuning
from dsv3.kv_cache.layout import page_cost, slots_bytes
from dsv3.model.tensor_parallel import check_shards
from pallas_kernels.backend import fallbacks, prepare, resolve_backend
from sharding.experts.transport_kind import TransportKind
from sharding.mesh import rank_mesh
from sharding.nccl_ep import library as nccl_ep

_log = logging.getLogger(__name__)


def bundled_model() -> Path:
    """Returns the directory of the small model that ships with the package."""
    return Path(__file__).parents[1] / "bundled"


def build_engine(
    model_dir: str | os.PathLike[str], options: EngineOptions | None = None, *, progress: bool = True
) -> Engine:
    """Builds an engine with the weights of a Hugging Face model directory; call `warm_up` before the first request.

    `progress` shows a bar while weights load. Raises `ConfigError` or `CheckpointError` for a directory that cannot be
    served, ValueError where the limits do not fit the device, `KernelCheckError` where kernels cannot be checked.
    """
    options = options or EngineOptions()
    if options.check_kernels:
        _model(Path(model_dir), options)  # raises for a model that cannot be served, before checks that take minutes
        apply_fallbacks(check_kernels())
        if options.batch_invariant and fallbacks():
            raise ValueError(
                f"batch_invariant: {', '.join(fallbacks())} failed checks of kernels, and what replaces them depends "
                "on the batch; serve without batch_invariant"
            )
    components = load_components(model_dir, options, progress=progress)
    log_components(components)
    return Engine(components, store=local_program_store(Path(model_dir), options, components))


def log_components(components: EngineComponents) -> None:
    """Logs what an engine serves, and within which limits: a line each for model, weights, cache and scheduling."""
    cfg, nbytes = components.cfg, Counter[str]()
    for leaf in jax.tree.leaves(components.params):
        nbytes[jnp.dtype(leaf.dtype).name] += leaf.size * leaf.dtype.itemsize
    weights = ", ".join(f"{name} {decimal(size)}" for name, size in nbytes.most_common())
    tokens = cfg.num_pages * cfg.page_size * cfg.num_ranks
    windows = f" and {cfg.num_window_pages} window pages" if cfg.has_window else ""
    for line in (
        f"model: {components.description}",
        f"dtypes: weights {weights}; activations {jnp.dtype(components.functions.dtype).name}",
        f"KV cache: {cfg.cache_dtype}, {cfg.num_pages} pages of {cfg.page_size} tokens per rank{windows}, {tokens:,} "
        f"tokens in all (data_parallel_size {cfg.num_ranks}, tensor_parallel_size {cfg.tensor_parallel_size}); maximum "
        f"concurrency for requests of {cfg.max_model_len:,} tokens: {tokens / cfg.max_model_len:.2f}x",
        f"scheduling: at most {cfg.max_num_seqs} requests and {cfg.max_num_batched_tokens} prompt tokens per step and "
        f"rank, {cfg.tokens_per_row} tokens per row; decode batch sizes {list(cfg.decode_buckets)}, prefill batch "
        f"sizes {list(cfg.prefill_buckets)}",
    ):
        _log.info("%s", line)


def load_components(
    model_dir: str | os.PathLike[str],
    options: EngineOptions,
    *,
    num_nodes: int = 1,
    progress: bool = False,
    shapes: bool = False,
) -> EngineComponents:
    """Loads the components of an engine; raises as `build_engine` does.

    Each process of an instance calls it, and reads what its own devices hold; limits suit its own devices. The
    processes run on `num_nodes` hosts, equally many on each and in order: these are the nodes of the mesh. The memory
    account is made from shapes, before a weight is read. With `shapes` no weight is read: shapes stand in for them.
    """
    cache = use_compilation_cache(options.compilation_cache_dir)
    set_memory_fraction(options.gpu_memory_utilization)
    options = apply_tuning(options, Path(model_dir))
    model_cfg, shards = _model(Path(model_dir), options), options.tensor_parallel_size
    devices = _devices(options.data_parallel_size, shards)
    mine = next(device for device in devices if device.process_index == jax.process_index())
    # This builds what a CPU lacks, and names its kernels to XLA before a stored program calls them.
    backend = resolve_backend(mine)
    prepare(backend)
    dtypes = resolve_dtypes(model_cfg, options, mine, stored_dtype(Path(model_dir)))
    mesh = rank_mesh(devices, num_nodes, shards, options.decode_context_parallel_size)
    hardware = Hardware(len(devices) // shards, num_nodes, mine.platform == "cpu", jax.process_count())
    tokenizer = Path(model_dir) / "tokenizer.json"

    def components(shapes: bool, progress: bool, pages: int | None) -> EngineComponents:
        read = Reading(dtypes.compute, options.fp8, progress, options.int4, options.fp4, shapes, options.load_threads)
        functions, served = _functions(model_dir, model_cfg, options, mesh, read)
        functions = batch_invariant(functions) if options.batch_invariant else functions
        return EngineComponents(
            functions,
            served,
            model_cfg,
            engine_config(model_cfg, options, hardware, dtypes, pages=pages, identity=identity),
            mesh,
            tokenizer=tokenizer if tokenizer.is_file() else None,
            description=describe(model_cfg, dtypes, backend, packed_mode(model_cfg, options)),
            reading=read,
        )

    identity = _cache_identity(Path(model_dir), model_cfg, options, dtypes).text
    memory = device_memory(mine)
    if memory is None:
        return components(shapes, progress, None)
    smallest = components(True, False, pages_of_one(model_cfg, options)).shapes
    found = size_pool(smallest, memory, Path(model_dir), options, cache)
    _log.info("memory of a device: %s", found.account)
    return dataclasses.replace(components(shapes, progress, found.account.pages), memory=found)


def _model(model_dir: Path, options: EngineOptions) -> ModelConfig:
    """Returns the configuration of the served model. Raises ValueError for options that it does not support."""
    cfg = served(load_config(model_dir), options)
    check_shards(cfg, options.tensor_parallel_size, fp8=cfg.fp8 is not None and options.fp8 != "dequantize")
    pages_of_one(cfg, options)
    return cfg


def served(model_cfg: ModelConfig, options: EngineOptions) -> ModelConfig:
    """Returns the model with the layers and products that serving uses.

    It has its first MTP module, or its stages of DSpark, where these propose drafts, else none: weights that nothing
    uses are neither loaded nor get a share of the cache. It has FP8 products where the options quantize. Raises
    ValueError for drafts by layers that the model lacks, for more drafts than a block has, and for experts to return
    where there are none.
    """
    method = None if options.speculative is None else options.speculative.method
    wanted, dspark = method == "mtp", model_cfg.dspark if method == "dspark" else None
    if method == "dspark":
        _check_block(model_cfg, options)
    if wanted and not model_cfg.num_nextn_predict_layers:
        raise ValueError(
            "speculative_config: method 'mtp' needs a model with a multi-token prediction module, and this one has "
            f"none; {_methods_of(model_cfg)}"
        )
    if options.enable_return_routed_experts and not model_cfg.num_moe_layers:
        raise ValueError("enable_return_routed_experts: this model has no routed experts; omit the option")
    fp8 = model_cfg.fp8 or (Fp8Config() if options.fp8 == "quantize" else None)
    divided = options.decode_context_parallel_size
    return dataclasses.replace(
        model_cfg, num_nextn_predict_layers=int(wanted), dspark=dspark, fp8=fp8, context_shards=divided
    )


def _check_block(model_cfg: ModelConfig, options: EngineOptions) -> None:
    if model_cfg.dspark is None:
        raise ValueError(
            "speculative_config: method 'dspark' needs a checkpoint with DSpark's stages, and this one has none; "
            f"{_methods_of(model_cfg)}"
        )
    block = model_cfg.dspark.block_size
    if options.speculative is not None and options.speculative.most_drafts > block:
        raise ValueError(
            f"speculative_config: num_speculative_tokens {options.speculative.most_drafts} is more than the "
            f"{block} tokens of the model's blocks; lower it"
        )


def _methods_of(model_cfg: ModelConfig) -> str:
    """Returns what to do about a method of drafts that the model does not have."""
    own = {"mtp": model_cfg.num_nextn_predict_layers > 0, "dspark": model_cfg.dspark is not None, "ngram": True}
    return f"choose {' or '.join(repr(name) for name, has in own.items() if has)}, or omit speculative_config"


def _functions(
    model_dir: str | os.PathLike[str], cfg: ModelConfig, options: EngineOptions, mesh: Mesh, read: Reading
) -> tuple[StepFunctions, Any]:
    """Returns the step functions, and the parameters as they take them, each device's share read to it."""
    if not options.spreads_experts:
        modules, blocks = bool(cfg.num_nextn_predict_layers), cfg.dspark is not None
        functions = in_full_precision(model_functions(dtype=read.dtype, drafts=modules, blocks=blocks))
        return functions, load_replicated(model_dir, cfg, functions.param_specs, mesh, read)
    redundant = options.num_redundant_experts
    how: dict[str, Any] = {"transport": options.expert_transport, "combine": options.expert_combine}
    how |= {"dtype": read.dtype, "fp8": fp8_experts(cfg, options)}
    functions = in_full_precision(
        expert_parallel_functions(cfg, mesh, redundant, **how, overlaps=options.expert_overlap)
    )
    if options.expert_transport == TransportKind.NCCL_EP.value:
        nccl_ep.prepare(mesh)
    return functions, load_spread(model_dir, cfg, functions.param_specs, mesh, redundant, read)


def _devices(ranks: int | None, shards: int) -> list[jax.Device]:
    """Returns the devices of `ranks` ranks of `shards` each; those of a process are adjacent, equally many of each.

    Raises ValueError for too few or unequal devices.
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
    """Returns what the pages of this engine depend on besides tokens.

    Latents of engines that round the experts' sums differ from those of engines that do not, as do those of engines
    that fix the order of all sums.
    """
    compute = jnp.dtype(dtypes.compute).name + (", int8 sums" if options.expert_combine == "int8" else "")
    compute += ", batch-invariant" if options.batch_invariant else ""
    return CacheIdentity(
        weights=known_identity(directory),
        tokenizer=_tokenizer_identity(directory),
        model=model_identity(dataclasses.replace(model_cfg, context_shards=1)),  # which `page_size` says
        cache_dtype=dtypes.cache,
        compute_dtype=compute,
        fp8=options.fp8,
        int4=options.int4,
        fp4=options.fp4,
        page_size=model_cfg.page_size,
    )


def _tokenizer_identity(directory: Path) -> str:
    names = ("tokenizer.json", "tokenizer_config.json", "tiktoken.model", "tekken.json")
    files = [directory / name for name in names] + sorted(directory.glob("tokenization_*.py"))
    digest = hashlib.sha256()
    for content in (file.read_bytes() for file in files if file.is_file()):
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()


def account_for(layout: Layout, memory: DeviceMemory, utilization: float, working: int) -> MemoryAccount:
    """Returns the account of a device that holds everything of `layout`, and `working` memory."""
    return account(
        memory,
        utilization,
        weights=local_bytes(layout.params),
        state=local_bytes((layout.state, adjust_shapes(layout)))
        + slots_bytes(layout.model_cfg, layout.cfg.cache_dtype, layout.cfg.max_num_seqs),
        working=working,
        page=page_cost(layout.model_cfg, layout.cfg.cache_dtype),
        page_size=layout.cfg.page_size,
    )


def size_pool(
    components: EngineComponents, memory: DeviceMemory, model_dir: Path, options: EngineOptions, cache: Path
) -> PoolSizing:
    """Returns the account of an engine whose `components` have shapes for weights and the smallest pool.

    The largest programs are compiled for their memory analysis, unless an earlier start left the figure in `cache`.
    Raises ValueError where not one page fits, before anything is compiled if the weights alone are too large.
    """
    layout, programs = lay_out(components, JOB_KINDS)
    utilization, staging = options.gpu_memory_utilization, staging_bytes(options)
    if (library_bytes := components.functions.library_bytes) is not None:
        check_beside(memory, library_bytes(layout.cfg.forward_programs), utilization)
    devices, spreads = layout.cfg.num_devices, bool(components.model_cfg.num_moe_layers)
    least = account_for(layout, memory, utilization, staging)
    check_fits(least, options, devices=devices, spreads=spreads)
    moves = {"moves experts": str(options.enable_eplb)}
    kept = WorkingMemoryFile(cache, machine_fields() | program_fields(model_dir, options, components) | moves)
    working = kept.read()
    if working is None:
        _log.info("compiling the largest programs to measure their working memory")
        programs.store = ReadPrograms()
        working = measure(layout.cfg, programs)
        kept.write(working)
    found = account_for(layout, memory, utilization, staging + working)
    check_fits(found, options, devices=devices, spreads=spreads)
    return PoolSizing(found, staging, kept)
