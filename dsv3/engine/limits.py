"""The limits of an engine, from the model, the options, the devices and their memory; no device is asked here."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from dsv3.cache.layout import page_bytes, pages_within
from dsv3.cache.page import PAGE_SIZE, pages_for
from dsv3.config import ModelConfig
from dsv3.engine.config import EngineConfig, tokens_ahead
from dsv3.engine.crossover import context_bytes, masked_room
from dsv3.engine.dtypes import EngineDtypes
from dsv3.options import EngineOptions
from pallas_kernels import dsa

_CPU_CACHE_BYTES = 2**30
# The MTP module takes a prefill as one batch, where the model takes two halves in turns: 18.5 GB for 16,384 tokens of
# DeepSeek-V3 where `step_bytes` says 11.0 (`launch.plan prefill_ep32` with drafts).
_WHOLE_BATCH = 1.7
TIER_STEP_BYTES = 2**28
"""Pages that a step copies to the tiers, and from them, at most per rank: 5 ms of a PCIe 5 link."""


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Memory of one device in bytes: what programs may use in all, and what is taken, by the weights above all."""

    limit: int
    in_use: int


@dataclasses.dataclass(frozen=True)
class Hardware:
    """The devices of an engine: `num_ranks` ranks over `num_nodes` hosts; `memory` is None where nothing bounds it."""

    num_ranks: int = 1
    num_nodes: int = 1
    is_cpu: bool = True
    memory: DeviceMemory | None = None


def engine_config(
    model: ModelConfig,
    options: EngineOptions,
    hardware: Hardware,
    dtypes: EngineDtypes,
    *,
    identity: str = "",
    move_bytes: int = 0,
) -> EngineConfig:
    """Returns the limits of an engine whose weights are on its devices already.

    Moving experts takes `move_bytes` between steps. Raises ValueError where no page fits, or no request of
    `options.max_model_len`.
    """
    max_num_seqs = options.max_num_seqs or (64 if hardware.is_cpu else 256)
    batched = options.max_num_batched_tokens or (1024 if hardware.is_cpu else 8192)
    wanted = options.max_model_len or model.max_position_embeddings
    per_row = 1 + options.speculative.most_drafts if options.speculative else 1
    ahead, rows = tokens_ahead(per_row), max_num_seqs * per_row
    working = step_bytes(model, dtypes.compute, batched, rows, options.tensor_parallel_size)
    if model.num_nextn_predict_layers and options.spreads_experts:
        working = int(working * _WHOLE_BATCH)
    working = max(working, move_bytes)
    if model.indexer:
        working += 3 * dsa.BYTES_AT_ONCE  # scores, their order, and copied rows
    working += expanded_bytes(model, dtypes, batched, options.tensor_parallel_size) * (not hardware.is_cpu)
    if options.kv_offloading_size:
        working += 4 * TIER_STEP_BYTES  # both ways, for the step under way and the next one
    budget = cache_budget(hardware.memory, options.gpu_memory_utilization, working)
    num_pages = min(pages_within(model, dtypes.cache, budget), max_num_seqs * pages_for(wanted + ahead))
    if num_pages < 1:
        raise ValueError(
            f"{max(0, budget)} bytes are left for the cache, but one page takes {page_bytes(model, dtypes.cache)}; "
            "raise gpu_memory_utilization or use more devices"
        )
    return EngineConfig(
        max_model_len=wanted if options.max_model_len else min(wanted, num_pages * PAGE_SIZE - ahead),
        num_pages=num_pages,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=batched,
        max_num_queued_reqs=options.max_num_queued_reqs,
        num_ranks=hardware.num_ranks,
        num_nodes=hardware.num_nodes,
        tensor_parallel_size=options.tensor_parallel_size,
        reserved_multiprocessors=options.reserved_multiprocessors,
        enable_prefix_caching=options.enable_prefix_caching,
        cache_dtype=dtypes.cache,
        identity=identity,
        kv_offloading_size=options.kv_offloading_size,
        kv_store=options.kv_store,
        kv_store_size=options.kv_store_size,
        kv_events_config=options.kv_events_config,
        step_metrics_config=options.step_metrics_config,
        role=options.role,
        transfer_address=options.transfer_address,
        transfer_key_file=options.transfer_key_file,
        transfer_carrier=options.transfer_carrier,
        seed=options.seed,
        eplb_interval=options.eplb_interval if options.enable_eplb else 0,
        eplb_threshold=options.eplb_threshold,
        eplb_state=options.eplb_state,
        tokens_per_row=per_row,
        speculative_config=options.speculative_config,
    )


def with_pages(cfg: EngineConfig, num_pages: int, options: EngineOptions) -> EngineConfig:
    """Returns limits with at most `num_pages` pages; requests get shorter unless `options` say how long they are."""
    num_pages = min(cfg.num_pages, num_pages)
    longest = (
        cfg.max_model_len if options.max_model_len else min(cfg.max_model_len, num_pages * PAGE_SIZE - cfg.tokens_ahead)
    )
    return dataclasses.replace(cfg, num_pages=num_pages, max_model_len=longest)


def expanded_bytes(model: ModelConfig, dtypes: EngineDtypes, batched: int, shards: int) -> int:
    """Returns the bytes that prefill after cached tokens takes in expanded form beyond `step_bytes`.

    With sparse attention these are keys and values of the masked form that are not those of the step's own tokens. Else
    the expanded form has neither keys and values of its own tokens nor outputs of latents.
    """
    heads, itemsize = model.num_attention_heads, jnp.dtype(dtypes.compute).itemsize
    own = heads * (model.qk_nope_head_dim + model.v_head_dim)
    if model.indexer:
        more = max(0, masked_room(model, dtypes.cache, batched, shards) - batched)
        return more * own * itemsize // shards
    instead = batched * (own + heads * model.kv_lora_rank) * itemsize // shards
    return max(0, context_bytes(model, batched, shards) - instead)


def cache_budget(memory: DeviceMemory | None, utilization: float, working: int) -> int:
    """Returns the bytes of one rank's pool: a share of the memory less what is taken and `working` memory."""
    if memory is None:
        return _CPU_CACHE_BYTES
    return int(memory.limit * utilization) - memory.in_use - working


def step_bytes(cfg: ModelConfig, dtype: Any, batched: int, rows: int, shards: int) -> int:
    """Estimates the working memory of the largest step, in bytes.

    A prompt token keeps about six hidden states. It also keeps its queries, keys and values of all heads and its
    routed copies, which the `shards` devices of a rank share. Logits of a decode batch of `rows` tokens are float32,
    and the sampler needs about four arrays of their size.
    """
    heads = cfg.num_attention_heads * (2 * cfg.qk_head_dim + cfg.v_head_dim + cfg.kv_lora_rank)
    routed = cfg.num_experts_per_tok * (cfg.hidden_size + 3 * cfg.moe_intermediate_size)
    shared = -(-(heads + routed + 3 * cfg.intermediate_size) // shards)
    token = (6 * cfg.hidden_size + shared) * jnp.dtype(dtype).itemsize
    return batched * token + 4 * rows * cfg.vocab_size * 4
