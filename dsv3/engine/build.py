"""From a model directory to an engine: what the notebook face, the server and the batch tool share."""

import dataclasses
import logging
import os
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import dsv3
from dsv3.cache.layout import page_bytes, pages_for, pages_within
from dsv3.config import ModelConfig
from dsv3.engine.assemble.functions import expert_parallel_functions
from dsv3.engine.assemble.weights import Reading, load_replicated, load_spread
from dsv3.engine.balance import layer_bytes
from dsv3.engine.compilation import use_compilation_cache
from dsv3.engine.config import EngineConfig
from dsv3.engine.engine import Engine
from dsv3.engine.programs import Progress
from dsv3.engine.step_bodies import StepFunctions, model_functions
from dsv3.hf_config import load_config
from dsv3.model.tensor_parallel import check_shards
from sharding.experts.kind import Kind
from sharding.experts.rebalance import LAYERS_HELD
from sharding.mesh import rank_mesh

_log = logging.getLogger(__name__)
_CPU_CACHE_BYTES = 2**30
DType = Literal["auto", "float32", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """What a user may set; None means a default that suits the device.

    `dtype` "auto" is float32 on a CPU and bfloat16 elsewhere, for weights, activations and the latent cache.
    `max_model_len` None: what the model was made for, or less where the cache cannot hold it.
    `gpu_memory_utilization` is the share of a device's memory that weights, cache and activations may take
    together; on a CPU the cache takes at most 1 GiB instead. `data_parallel_size` ranks (None: 1, or as many as the
    devices of several processes allow) of `tensor_parallel_size` devices each serve requests; the devices of a rank
    split attention heads and MLP widths. `enable_expert_parallel` spreads the routed experts over all these devices, in
    `num_redundant_experts` more slots than there are experts, where each device otherwise holds all; a
    `tensor_parallel_size` above 1 implies it. `expert_transport` names how tokens reach them: auto lets a cost model
    choose among ring, all_to_all and hierarchical for each bucket; ragged is for GPUs. With `enable_eplb` experts are
    moved between devices while serving: at least `eplb_interval` steps apart, where the devices' mean load is less than
    `eplb_threshold` of the busiest's. `fp8` says whether FP8 weights stay FP8. `tokenizer_id` enters the prefix cache's
    keys. `compilation_cache_dir` None: `dsv3/xla` in the user's cache directory.
    """

    dtype: DType = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_queued_reqs: int = 1024
    gpu_memory_utilization: float = 0.9
    data_parallel_size: int | None = None
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False
    num_redundant_experts: int = 0
    expert_transport: str = "auto"
    enable_eplb: bool = False
    eplb_interval: int = 3000
    eplb_threshold: float = 0.9
    enable_prefix_caching: bool = True
    fp8: Literal["keep", "dequantize"] = "keep"
    tokenizer_id: str = ""
    seed: int = 0
    compilation_cache_dir: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization: {self.gpu_memory_utilization} is not above 0 and at most 1")
        for name in ("data_parallel_size", "tensor_parallel_size"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}: {value} is not at least 1")
        if self.num_redundant_experts < 0 or (self.num_redundant_experts and not self.spreads_experts):
            raise ValueError(
                f"num_redundant_experts: {self.num_redundant_experts} must be at least 0, and needs "
                "enable_expert_parallel"
            )
        if Kind.from_name(self.expert_transport) is not None and not self.spreads_experts:
            raise ValueError(f"expert_transport: {self.expert_transport!r} needs enable_expert_parallel")
        if self.enable_eplb and not self.spreads_experts:
            raise ValueError("enable_eplb: there is nothing to balance without enable_expert_parallel")
        if self.eplb_interval < 1:
            raise ValueError(f"eplb_interval: {self.eplb_interval} is not at least 1; leave enable_eplb off instead")
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ValueError(f"dtype: {self.dtype!r} is not one of auto, float32, bfloat16")

    @property
    def spreads_experts(self) -> bool:
        """Whether each device holds a share of the routed experts, not all."""
        return self.enable_expert_parallel or self.tensor_parallel_size > 1


def bundled_model() -> Path:
    """Directory of the small model that ships with the package."""
    return Path(dsv3.__file__).parent / "bundled"


def build_engine(
    model_dir: str | os.PathLike[str], options: EngineOptions | None = None, *, progress: bool = True
) -> Engine:
    """An engine with the weights of a Hugging Face model directory; call `warm_up` before the first request.

    `progress` shows a bar while weights load. Raises `ConfigError` or `CheckpointError` for a directory that cannot
    be served, ValueError where the limits do not fit the device.
    """
    parts = load_parts(model_dir, options or EngineOptions(), progress=progress)
    _log.info("cache: %d pages of 64 tokens, up to %d tokens a request", parts.cfg.num_pages, parts.cfg.max_model_len)
    return Engine(parts.functions, parts.params, parts.model_cfg, parts.cfg, parts.devices)


@dataclasses.dataclass(frozen=True)
class Parts:
    """What an engine is made of; `params` lie on the `devices`, which may belong to several processes."""

    functions: StepFunctions
    params: Any
    model_cfg: ModelConfig
    cfg: EngineConfig
    devices: list[jax.Device]


def load_parts(model_dir: str | os.PathLike[str], options: EngineOptions, *, progress: bool = True) -> Parts:
    """The parts of an engine, as `build_engine` puts them together; raises as it does.

    Called in each process of an instance, it reads what this one's devices hold. Limits suit this process's devices.
    """
    use_compilation_cache(options.compilation_cache_dir)
    # MTP modules are not served, so neither their weights nor their share of the cache is needed.
    model_cfg = dataclasses.replace(load_config(Path(model_dir)), num_nextn_predict_layers=0)
    shards = options.tensor_parallel_size
    check_shards(model_cfg, shards, fp8=model_cfg.fp8 is not None and options.fp8 == "keep")
    devices = _devices(options.data_parallel_size, shards)
    mine = next(device for device in devices if device.process_index == jax.process_index())
    dtype = _dtype(options.dtype, mine)
    mesh = rank_mesh(devices, jax.process_count(), shards)
    functions, served = _functions(model_dir, model_cfg, options, mesh, dtype, progress)
    moving = _move_bytes(functions, served) if options.enable_eplb else 0
    cfg = engine_config(model_cfg, options, mine, dtype, model_id=_model_id(Path(model_dir)), move_bytes=moving)
    cfg = dataclasses.replace(cfg, num_ranks=len(devices) // shards, num_nodes=jax.process_count())
    return Parts(functions, served, model_cfg, cfg, devices)


def _functions(
    model_dir: str | os.PathLike[str], cfg: ModelConfig, options: EngineOptions, mesh: Mesh, dtype: Any, progress: bool
) -> tuple[StepFunctions, Any]:
    """The step functions, and the parameters as they take them, each device's share read to it."""
    read = Reading(dtype, options.fp8, progress)
    if not options.spreads_experts:
        functions = model_functions()
        return functions, load_replicated(model_dir, cfg, functions.param_specs, mesh, read)
    redundant = options.num_redundant_experts
    fp8 = cfg.fp8 is not None and options.fp8 == "keep"
    functions = expert_parallel_functions(
        cfg, mesh, redundant, transport=options.expert_transport, dtype=dtype, fp8=fp8
    )
    return functions, load_spread(model_dir, cfg, functions.param_specs, mesh, redundant, read)


def engine_config(
    model_cfg: ModelConfig, options: EngineOptions, device: jax.Device, dtype: Any, model_id: str, move_bytes: int = 0
) -> EngineConfig:
    """Limits for `device`, on which the weights are already; moving experts takes `move_bytes` between steps."""
    is_cpu = device.platform == "cpu"
    max_num_seqs = options.max_num_seqs or (64 if is_cpu else 256)
    batched = options.max_num_batched_tokens or (1024 if is_cpu else 8192)
    wanted = options.max_model_len or model_cfg.max_position_embeddings
    working = max(_step_bytes(model_cfg, dtype, batched, max_num_seqs, options.tensor_parallel_size), move_bytes)
    budget = _cache_budget(options, device, working)
    num_pages = min(pages_within(model_cfg, dtype, budget), max_num_seqs * pages_for(wanted))
    if num_pages < 1:
        raise ValueError(
            f"{max(0, budget)} bytes are left for the cache, but one page takes {page_bytes(model_cfg, dtype)}; "
            "raise gpu_memory_utilization or use more devices"
        )
    max_model_len = wanted if options.max_model_len else min(wanted, num_pages * 64)
    return EngineConfig(
        max_model_len=max_model_len,
        num_pages=num_pages,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=batched,
        max_num_queued_reqs=options.max_num_queued_reqs,
        num_ranks=options.data_parallel_size or 1,
        tensor_parallel_size=options.tensor_parallel_size,
        enable_prefix_caching=options.enable_prefix_caching,
        model_id=model_id,
        cache_dtype=jnp.dtype(dtype).name,
        tokenizer_id=options.tokenizer_id,
        seed=options.seed,
        eplb_interval=options.eplb_interval if options.enable_eplb else 0,
        eplb_threshold=options.eplb_threshold,
    )


def rich_progress(description: str = "compiling") -> tuple[Any, Progress]:
    """A progress bar on the terminal (a context manager) and the callback that drives it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    # In a notebook rich would draw with ipywidgets, or not at all; a bar of one line works there as on a terminal.
    console = Console(force_jupyter=False, force_terminal=True) if Console().is_jupyter else Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Bar(*columns, console=console)
    task = bar.add_task(description, total=None)

    def update(done: int, total: int, what: str) -> None:
        bar.update(task, completed=done, total=total, description=f"{description}: {what}")

    return bar, update


def _devices(ranks: int | None, shards: int) -> list[jax.Device]:
    """The devices of `ranks` ranks of `shards` each, those of a process next to each other, equally many of each."""
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
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
    if ranks not in (None, len(devices) // shards):
        raise ValueError(
            f"data_parallel_size is {ranks}, but the processes have {len(devices)} devices together; with "
            f"tensor_parallel_size {shards} that makes {len(devices) // shards} ranks"
        )
    return devices


def _dtype(name: DType, device: jax.Device) -> Any:
    if name == "auto":
        return jnp.float32 if device.platform == "cpu" else jnp.bfloat16
    return jnp.dtype(name)


def _cache_budget(options: EngineOptions, device: jax.Device, working: int) -> int:
    """Bytes for one rank's pool: a share of the device's memory less what is taken and the `working` memory."""
    memory = device.memory_stats() if device.platform != "cpu" else None
    if not memory:
        return _CPU_CACHE_BYTES
    allowed = int(memory["bytes_limit"] * options.gpu_memory_utilization) - memory["bytes_in_use"]
    return allowed - working


def _move_bytes(functions: StepFunctions, params: Any) -> int:
    """Working memory of a program that moves a layer's experts."""
    return 0 if functions.experts is None else LAYERS_HELD * layer_bytes(functions.experts, params)


def _step_bytes(cfg: ModelConfig, dtype: Any, batched: int, max_num_seqs: int, shards: int) -> int:
    """An estimate of the largest step's working memory.

    A prompt token keeps about six hidden states, and, shared by the `shards` devices of a rank, its queries, keys and
    values of all heads and its routed copies; logits of a decode batch are float32, and the sampler needs about four
    arrays of their size.
    """
    heads = cfg.num_attention_heads * (2 * cfg.qk_head_dim + cfg.v_head_dim + cfg.kv_lora_rank)
    routed = cfg.num_experts_per_tok * (cfg.hidden_size + 3 * cfg.moe_intermediate_size)
    shared = -(-(heads + routed + 3 * cfg.intermediate_size) // shards)
    token = (6 * cfg.hidden_size + shared) * jnp.dtype(dtype).itemsize
    return batched * token + 4 * max_num_seqs * cfg.vocab_size * 4


def _model_id(directory: Path) -> str:
    """Names the weights in the prefix cache's keys: the directory and when its weights were last written."""
    newest = max((f.stat().st_mtime_ns for f in directory.glob("*.safetensors*")), default=0)
    return f"{directory.resolve()}@{newest}"
