"""The limits of an engine, computed from the model, the options and the devices; no device is queried here."""

import dataclasses

from dsv3.config.declaration import options_of
from dsv3.config.engine import EngineConfig, pages_for, tokens_ahead
from dsv3.config.model import ModelConfig
from dsv3.config.options import EngineOptions, RunOptions
from dsv3.engine.dtypes import EngineDtypes
from dsv3.kv_cache.layout import pages_within, window_pages, window_size

_CPU_CACHE_BYTES = 2**30
TIER_STEP_BYTES = 2**28
"""The most that a step offloads, and loads, per rank: 5 ms of a PCIe 5 link."""


@dataclasses.dataclass(frozen=True)
class Hardware:
    """The devices of an engine: `num_ranks` ranks on `num_nodes` nodes, in `num_processes` processes."""

    num_ranks: int = 1
    num_nodes: int = 1
    is_cpu: bool = True
    num_processes: int = 1


def longest_context(model: ModelConfig) -> int:
    """Returns the tokens that the model was trained for: its `max_position_embeddings`, or that extended by YaRN."""
    stretched = 0 if model.yarn is None else int(model.yarn.factor * model.yarn.original_max_position_embeddings)
    return max(model.max_position_embeddings, stretched)


def pages_of_one(model: ModelConfig, options: EngineOptions) -> int:
    """Returns the pages of the longest request, which are the smallest pool that can serve every request.

    Raises ValueError for an `options.max_model_len` beyond the model's context.
    """
    most = longest_context(model)
    if options.max_model_len and options.max_model_len > most:
        raise ValueError(
            f"max_model_len: {options.max_model_len} is greater than the model's context of {most} tokens "
            "(max_position_embeddings of its config.json, or YaRN's factor times its original length); lower it"
        )
    return pages_for((options.max_model_len or most) + tokens_ahead(_tokens_per_row(options)), model.page_size)


def staging_bytes(options: EngineOptions) -> int:
    """Returns the memory of pages being offloaded and loaded, in the step in flight and the next one."""
    return 4 * TIER_STEP_BYTES if options.kv_offloading_size else 0


def engine_config(
    model: ModelConfig,
    options: EngineOptions,
    hardware: Hardware,
    dtypes: EngineDtypes,
    *,
    pages: int | None = None,
    identity: str = "",
) -> EngineConfig:
    """Returns the limits of an engine with a pool of `pages`; None: as many as 1 GiB holds, on a CPU.

    Raises ValueError where no request of `options.max_model_len` fits the pool, or that exceeds the model's context.
    """
    one, per_row = pages_of_one(model, options), _tokens_per_row(options)
    max_num_seqs = options.max_num_seqs or (64 if hardware.is_cpu else 256)
    batched = options.max_num_batched_tokens or (1024 if hardware.is_cpu else 8192)
    wanted, ahead = options.max_model_len or longest_context(model), tokens_ahead(per_row)
    most = pages_within(model, dtypes.cache, _CPU_CACHE_BYTES, max_num_seqs) if pages is None else pages
    num_pages = min(most, max_num_seqs * one)
    return EngineConfig(
        max_model_len=wanted if options.max_model_len else min(wanted, num_pages * model.page_size - ahead),
        num_pages=num_pages,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=batched,
        num_ranks=hardware.num_ranks,
        num_processes=hardware.num_processes,
        num_nodes=hardware.num_nodes,
        page_size=model.page_size,
        window_size=window_size(model),
        num_window_pages=window_pages(model, dtypes.cache, num_pages, max_num_seqs),
        draft_block=0 if model.dspark is None else model.dspark.block_size,
        cache_dtype=dtypes.cache,
        identity=identity,
        eplb_interval=options.eplb_interval if options.enable_eplb else 0,
        tokens_per_row=per_row,
        **{each.name: getattr(options, each.name) for each in options_of(RunOptions)},
    )


def _tokens_per_row(options: EngineOptions) -> int:
    return 1 + options.speculative.most_drafts if options.speculative else 1


def with_pages(cfg: EngineConfig, num_pages: int, options: EngineOptions) -> EngineConfig:
    """Returns limits with at most `num_pages` pages; max_model_len shrinks with them unless `options` set it."""
    num_pages = min(cfg.num_pages, num_pages)
    fitting = num_pages * cfg.page_size - cfg.tokens_ahead
    longest = cfg.max_model_len if options.max_model_len else min(cfg.max_model_len, fitting)
    kept = (cfg.num_window_pages - cfg.least_window_pages) * num_pages // cfg.num_pages
    windows = cfg.least_window_pages + kept
    return dataclasses.replace(cfg, num_pages=num_pages, num_window_pages=windows, max_model_len=longest)
