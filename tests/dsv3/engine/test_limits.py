"""Limits from options, hardware and memory, without a device."""

import dataclasses

import jax.numpy as jnp
import pytest

from dsv3.cache.layout import page_bytes
from dsv3.engine.dtypes import EngineDtypes
from dsv3.engine.limits import DeviceMemory, Hardware, engine_config, step_bytes, with_pages
from dsv3.options import EngineOptions
from tests.dsv3.engine import toy

MODEL = toy.toy_config(max_position_embeddings=1000)
FLOAT32 = EngineDtypes(jnp.dtype(jnp.float32), "float32")
SMALL = EngineOptions(max_num_seqs=4, max_num_batched_tokens=64)


def on_gpu(pages: float, **changes) -> Hardware:
    """A GPU whose memory holds the weights, the working memory of `SMALL` and so many pages."""
    needed = step_bytes(MODEL, jnp.float32, 64, 4, 1) + int(pages * page_bytes(MODEL, "float32"))
    return Hardware(is_cpu=False, memory=DeviceMemory(limit=int((5000 + needed) / 0.9) + 1, in_use=5000), **changes)


def test_the_device_decides_what_nobody_set() -> None:
    cpu = engine_config(MODEL, EngineOptions(), Hardware(), FLOAT32)
    gpu = engine_config(MODEL, EngineOptions(), Hardware(is_cpu=False), FLOAT32)
    assert (cpu.max_num_seqs, cpu.max_num_batched_tokens) == (64, 1024)
    assert (gpu.max_num_seqs, gpu.max_num_batched_tokens) == (256, 8192)
    assert (cpu.max_model_len, cpu.num_pages) == (1000, 64 * 16)


def test_pages_fill_the_memory_that_is_left() -> None:
    cfg = engine_config(MODEL, SMALL, on_gpu(5.5, num_ranks=6, num_nodes=2), FLOAT32)
    assert (cfg.num_pages, cfg.max_model_len, cfg.num_ranks, cfg.num_nodes) == (5, 5 * 64, 6, 2)


def test_experts_that_move_take_from_the_cache() -> None:
    extra = 3 * page_bytes(MODEL, "float32")
    moving = step_bytes(MODEL, jnp.float32, 64, 4, 1) + extra
    assert engine_config(MODEL, SMALL, on_gpu(5.5), FLOAT32, move_bytes=moving).num_pages == 2


def with_room_for(nbytes: float) -> Hardware:
    """A GPU with so many bytes for cache and working memory."""
    return Hardware(is_cpu=False, memory=DeviceMemory(limit=int(nbytes / 0.9) + 1, in_use=0))


def test_pages_on_their_way_take_from_the_cache() -> None:
    options = dataclasses.replace(SMALL, kv_offloading_size=1.0)
    working = step_bytes(MODEL, jnp.float32, 64, 4, 1) + 2**30
    hardware = with_room_for(working + 5.5 * page_bytes(MODEL, "float32"))
    assert engine_config(MODEL, options, hardware, FLOAT32).num_pages == 5


def test_a_module_that_takes_a_whole_batch_takes_more_memory() -> None:
    model = dataclasses.replace(MODEL, num_nextn_predict_layers=1)
    drafts = dataclasses.replace(SMALL, speculative_config={"method": "mtp"})
    spread = dataclasses.replace(drafts, enable_expert_parallel=True)
    one, page = step_bytes(model, jnp.float32, 64, 8, 1), page_bytes(model, "float32")
    hardware = with_room_for(1.7 * one + 5.5 * page)
    assert engine_config(model, spread, hardware, FLOAT32).num_pages == 5
    assert engine_config(model, drafts, hardware, FLOAT32).num_pages == min(64, int((0.7 * one + 5.5 * page) / page))


def test_a_device_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="raise gpu_memory_utilization or use more devices"):
        engine_config(MODEL, SMALL, on_gpu(0.5), FLOAT32)


def test_a_length_that_was_asked_for_is_not_shortened() -> None:
    options = EngineOptions(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=640)
    with pytest.raises(ValueError, match="lower max_model_len"):
        engine_config(MODEL, options, on_gpu(5.5), FLOAT32)


def test_another_process_with_less_room_shortens_the_rest() -> None:
    cfg = engine_config(MODEL, SMALL, on_gpu(5.5), FLOAT32)
    assert with_pages(cfg, 9, SMALL) == cfg
    less = with_pages(cfg, 3, SMALL)
    assert (less.num_pages, less.max_model_len) == (3, 3 * 64)
    asked = EngineOptions(max_model_len=300)
    with pytest.raises(ValueError, match="lower max_model_len"):
        with_pages(cfg, 3, asked)


def test_drafts_have_room_behind_the_longest_request() -> None:
    """One request of whole pages takes one page more; where pages are fewer, requests get shorter by the drafts."""
    drafts = {"method": "mtp", "num_speculative_tokens": 3}
    asked = EngineOptions(max_num_seqs=1, max_model_len=128, speculative_config=drafts)
    cfg = engine_config(MODEL, asked, Hardware(), FLOAT32)
    assert (cfg.max_model_len, cfg.num_pages, cfg.pages_per_seq) == (128, 3, 3)
    silent = EngineOptions(max_num_seqs=4, speculative_config=drafts)
    short = with_pages(engine_config(MODEL, silent, Hardware(), FLOAT32), 3, silent)
    assert (short.max_model_len, short.pages_per_seq) == (3 * 64 - short.tokens_ahead, 3)
