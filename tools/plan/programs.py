"""Compiles the engine's own programs for the GPUs of a deployment, without GPUs and with shapes for parameters.

Step bodies, transports, overlap and buffers are those of `dsv3.engine`.
"""

import dataclasses
import functools
import time
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsv3.checkpoint import quantize
from dsv3.checkpoint.layout import scale_shape
from dsv3.config.engine import EngineConfig, pages_for, tokens_ahead
from dsv3.config.model import ModelConfig
from dsv3.config.options import EngineOptions
from dsv3.engine.build import served
from dsv3.engine.components import EngineComponents
from dsv3.engine.device import form_selection
from dsv3.engine.device.layout import Layout, Reserve, reserve
from dsv3.engine.device.pool import SLACK
from dsv3.engine.device.programs import Key, Programs, ReadPrograms
from dsv3.engine.executor import lay_out as lay_out_engine
from dsv3.engine.expert_parallel import SpreadParams, expert_parallel_functions, first_expert_map
from dsv3.engine.functions import StepFunctions, model_functions
from dsv3.engine.jobs import JOB_KINDS
from dsv3.engine.jobs.draft_module import chain_key
from dsv3.engine.limits import longest_context
from dsv3.kv_cache.layout import window_pages, window_size
from dsv3.model.batch import AttentionForm
from dsv3.model.params import Fp4Weight, Fp8Weight, Params, ParamSpec, declare
from dsv3.model.tensor_parallel import arrange
from pallas_kernels import aot
from pallas_kernels.backend import Backend
from pallas_kernels.float8 import BLOCK
from pallas_kernels.fp4 import VALUES_PER_WORD
from sharding.collectives import limits_of
from sharding.experts.placement import Placement
from sharding.mesh import rank_mesh
from tools.plan import nccl_ep
from tools.plan.deployment import Deployment, DeploymentError, Phase

_PREFILL_REQUESTS = 64  # that a prefill instance runs at once
Part = Literal["model", "module", "chain", "block"]
"""What a program of a step runs: the model, its MTP module, the module again for a further draft, or DSpark's stages on
a block per request."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A program that runs `times` times per step: `tokens` of one rank, `width` of each request.

    Prefill materializes keys and values of up to `kv_capacity` cached tokens.
    """

    part: Part
    key: Key
    tokens: int
    width: int = 1
    times: int = 1
    kv_capacity: int = 0


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """One compiled program: bytes per device from XLA's buffer assignment, and the text of the scheduled program.

    `arguments` are weights, pages and state; `results` excludes donated arguments; `temporaries` live inside the
    program. `limits` are the compiler's most collectives in flight, and NCCL's channels of each communicator
    (`sharding.collectives.limits_of`).
    """

    phase: Phase
    run: Run
    compile_seconds: float
    arguments: int
    results: int
    temporaries: int
    limits: tuple[int, int]
    text: str


@dataclasses.dataclass(frozen=True)
class PlannedModel:
    """A model sharded over the devices of a deployment; `params` are shapes with shardings."""

    model: ModelConfig
    deployment: Deployment
    engine: EngineConfig
    mesh: Mesh
    functions: StepFunctions
    params: Any

    @property
    def reserve(self) -> Reserve:
        """Multiprocessors that the programs leave to transfers."""
        return reserve(self.engine, self.functions.overlaps, self.deployment.device.multiprocessors)

    @property
    def layout(self) -> Layout:
        """Shapes of all arrays on the devices."""
        return self._engine_layout[0]

    @property
    def programs(self) -> Programs:
        """The engine's table of programs, which compiles each on its first use."""
        return self._engine_layout[1]

    @functools.cached_property
    def _engine_layout(self) -> tuple[Layout, Programs]:
        parts = EngineComponents(self.functions, self.params, self.model, self.engine, self.mesh)
        layout, programs = lay_out_engine(parts, JOB_KINDS)
        programs.store = ReadPrograms()
        return layout, programs


def lay_out(model: ModelConfig, deployment: Deployment) -> PlannedModel:
    """Returns shapes and shardings of all arrays, with a page pool that just fits the requests of `deployment`.

    Includes the first MTP module, or DSpark's stages, if these make drafts, as serving does. Raises DeploymentError if
    the model has none, or does not divide over the devices, `AotUnavailableError` without the CUDA plugin.
    """
    fp4 = model.fp4_experts and deployment.fp4 == "keep"
    try:
        split = deployment.tensor_parallel, deployment.decode_context_parallel
        options = EngineOptions(
            speculative_config=deployment.speculative_config,
            tensor_parallel_size=split[0],
            decode_context_parallel_size=split[1],
        )
        model = served(model, options)
        model = dataclasses.replace(model, fp4_experts=fp4)
        devices = aot.gpu_devices(deployment.devices, per_host=deployment.gpus_per_node, target=_target(deployment))
        mesh = rank_mesh(devices, deployment.nodes, *split)
        if deployment.expert_parallel:
            first_expert_map(model, mesh, deployment.redundant_experts)
            compiled = nccl_ep.stand_in(deployment)
            how: dict[str, Any] = {"transport": compiled.expert_transport, "combine": compiled.expert_combine}
            functions = expert_parallel_functions(model, mesh, deployment.redundant_experts, Backend.MOSAIC, **how)
        else:
            drafts: dict[str, Any] = {
                "drafts": bool(model.num_nextn_predict_layers),
                "blocks": model.dspark is not None,
            }
            functions = model_functions(Backend.MOSAIC, dtype=jnp.bfloat16, **drafts)
        params = _with_shardings(abstract_params(model, deployment), functions.param_specs, mesh)
        return PlannedModel(model, deployment, engine_config(model, deployment), mesh, functions, params)
    except ValueError as error:
        raise DeploymentError(f"{deployment.name}: {error}") from error


def runs(planned: PlannedModel, phase: Phase) -> tuple[Run, ...]:
    """Returns the programs of a step of a phase, each with its largest bucket; the model's is first.

    With sparse attention they have the form for requests of the deployment's mean length.
    """
    deployment, cfg, longest = planned.deployment, planned.engine, planned.deployment.context_length
    form = of_module = form_selection.decode_form(planned.layout, longest)
    if phase == "prefill":
        size, width = deployment.prefill_tokens, 1
        rows, drafts = cfg.prefill_rows(size), cfg.tokens_per_row - 1
        form = _prefill_form(planned)
    else:
        rows, drafts = deployment.decode_requests, deployment.drafts
        size, width = rows, 1 + drafts
    room = form_selection.capacity(planned.layout, size, form)
    found = [Run("model", Key(phase, size, form, width), size * width, width, kv_capacity=room)]
    if drafts and planned.model.dspark is not None:
        block = planned.model.dspark.block_size
        return (*found, Run("block", Key(f"dspark {phase}", size, width=width), rows * block, block))
    if drafts:
        found.append(Run("module", Key(f"mtp {phase}", size, of_module, width), size * width, width))
    if drafts > 1:
        found.append(Run("chain", chain_key(rows, 1, of_module), rows, times=drafts - 1))
    return tuple(found)


def _prefill_form(planned: PlannedModel) -> AttentionForm:
    """Returns the attention form of a prefill step of whole prompts of the deployment's mean length."""
    deployment = planned.deployment
    size, hits, length = deployment.prefill_tokens, deployment.prefix_hit_rate, deployment.context_length
    prompts = max(1, round(size / max(1.0, length * (1 - hits))))
    page_size = planned.model.page_size
    keys, pairs = prompts * pages_for(length, page_size) * page_size, round(size * hits * length)
    return form_selection.prefill_form(planned.layout, size, hits > 0, length, keys, pairs)


def compile_step(planned: PlannedModel, phase: Phase) -> tuple[CompiledProgram, ...]:
    """Compiles the programs of a step. Raises `AotUnavailableError` without ptxas."""
    return tuple(compile_run(planned, phase, run) for run in runs(planned, phase))


def compile_run(planned: PlannedModel, phase: Phase, run: Run) -> CompiledProgram:
    """Compiles one program of a step; raises as `compile_step` does."""
    start = time.perf_counter()
    with aot.explained():
        program: Any = planned.programs.get(run.key)
    memory = program.memory_analysis()
    return CompiledProgram(
        phase=phase,
        run=run,
        compile_seconds=time.perf_counter() - start,
        arguments=memory.argument_size_in_bytes,
        results=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        limits=limits_of(planned.programs.options),
        text=program.as_text(),
    )


def engine_config(model: ModelConfig, deployment: Deployment) -> EngineConfig:
    """Returns the engine's limits: a pool for the tokens of `cache_tokens`, and the longest request that fits it."""
    num_pages = pages_for(cache_tokens(deployment, model.page_size), model.page_size)
    wanted = deployment.max_model_len or longest_context(model)
    per_row = 1 + deployment.speculative.most_drafts if deployment.speculative else 1
    max_num_seqs = deployment.decode_requests or _PREFILL_REQUESTS
    return EngineConfig(
        max_model_len=min(wanted, num_pages * model.page_size - tokens_ahead(per_row)),
        num_pages=num_pages,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=deployment.prefill_tokens or deployment.max_num_batched_tokens,
        num_ranks=deployment.ranks,
        num_nodes=deployment.nodes,
        tensor_parallel_size=deployment.tensor_parallel,
        decode_context_parallel_size=deployment.decode_context_parallel,
        page_size=model.page_size,
        window_size=window_size(model),
        num_window_pages=window_pages(model, deployment.kv_cache_dtype, num_pages, max_num_seqs),
        cache_dtype=deployment.kv_cache_dtype,
        reserved_multiprocessors=nccl_ep.stand_in(deployment).reserved_multiprocessors,
        tokens_per_row=per_row,
        draft_block=0 if model.dspark is None else model.dspark.block_size,
        eplb_interval=EngineOptions().eplb_interval if deployment.redundant_experts else 0,
        speculative_config=deployment.speculative_config,
    )


def cache_tokens(deployment: Deployment, page_size: int) -> int:
    """Returns the tokens that a rank's cache must hold, in whole pages of `page_size` per request.

    Decode needs all requests at their mean length, prefill the prompts of one step including their cached parts.
    """
    request = pages_for(deployment.context_length, page_size) * page_size
    fresh = max(1.0, deployment.context_length * (1 - deployment.prefix_hit_rate))
    prompts = -(-deployment.prefill_tokens // int(fresh))
    return max(deployment.decode_requests, prompts) * request


def abstract_params(model: ModelConfig, deployment: Deployment) -> Any:
    """Returns the shapes of step functions' parameters as a server holds them: of the checkpoint's precision."""
    redundant = deployment.redundant_experts

    def leaf(spec: ParamSpec) -> Any:
        shape = tuple(n + redundant * (axis == "experts") for n, axis in zip(spec.shape, spec.axes, strict=True))
        form = quantize.packed_form(model, spec)
        if form is quantize.INT4:
            return quantize.abstract_int4(shape)
        if form is quantize.FP4:
            return abstract_fp4(shape)
        if spec.quantizable and model.fp8 is not None:
            scale = jax.ShapeDtypeStruct(scale_shape(shape), jnp.float32)
            return Fp8Weight(jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn), scale)
        return jax.ShapeDtypeStruct(shape, spec.dtype_in(jnp.bfloat16, checkpoint=[jnp.bfloat16]))

    params: Params = jax.tree.map(leaf, declare(model))
    if not deployment.expert_parallel:
        return params
    params = jax.eval_shape(lambda p: arrange(p, model, deployment.tensor_parallel), params)
    layers, experts = model.num_moe_layers + model.num_draft_layers, model.n_routed_experts
    shapes = (layers, experts, redundant + 1), (layers, experts)
    return SpreadParams(params, Placement(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes)))


def abstract_fp4(shape: tuple[int, ...]) -> Fp4Weight:
    """Returns the shapes of a weight `[..., N, K]` on devices."""
    *lead, n, k = shape
    return Fp4Weight(
        jax.ShapeDtypeStruct((*lead, n, k // VALUES_PER_WORD), jnp.uint32),
        jax.ShapeDtypeStruct((*lead, k // BLOCK, n), jnp.uint32),
        jax.ShapeDtypeStruct(scale_shape(shape), jnp.float32),
    )


def _with_shardings(params: Any, specs: Any, mesh: Mesh) -> Any:
    """Returns the shapes with shardings; one partition may cover a subtree (an FP8 weight and its scales)."""

    def place(spec: PartitionSpec, part: Any) -> Any:
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), part)

    return jax.tree.map(place, specs, params, is_leaf=lambda s: isinstance(s, PartitionSpec))


def _target(deployment: Deployment) -> aot.GpuTarget:
    device = deployment.device
    return dataclasses.replace(
        aot.H200,
        name=f"NVIDIA {device.name}",
        multiprocessors=device.multiprocessors,
        memory=int(device.memory_bytes * (deployment.memory_utilization + SLACK)),
        memory_bytes_per_second=int(device.hbm_bytes_per_second),
    )
