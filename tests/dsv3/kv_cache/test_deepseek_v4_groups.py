"""What DeepSeek-V4 keeps of tokens: entries and index keys of the whole context, and rows of the last tokens."""

import dataclasses
from typing import Any

import pytest

from configs.deepseek_v3 import DEEPSEEK_V3
from dsv3.config.hugging_face import from_hf
from dsv3.config.model import (
    HEAVY_ENTRIES,
    HEAVY_PARTS,
    INDEX_KEYS,
    INDEX_PARTS,
    INDEX_TAILS,
    SPARSE_ENTRIES,
    SPARSE_PARTS,
    SPARSE_TAILS,
    WINDOW_LATENTS,
)
from dsv3.kv_cache import layout
from tests.dsv3.deepseek_v4 import FLASH, FLASH_0731, PRO
from tests.dsv3.model.deepseek_v4_steps import first_window_page


@pytest.mark.parametrize(
    ("published", "cache_dtype", "per_token"),
    [(FLASH, "fp8", 3_850), (FLASH, "bfloat16", 6_880), (PRO, "fp8", 5_511), (PRO, "bfloat16", 9_848)],
)
def test_bytes_per_token(published: dict[str, Any], cache_dtype: str, per_token: int) -> None:
    cfg = from_hf(published)
    assert layout.page_bytes(cfg, cache_dtype) // cfg.page_size == per_token


def test_a_page_covers_256_tokens() -> None:
    cfg = from_hf(FLASH)
    groups = layout.groups_of(cfg, "fp8", "context")
    entries = {group.name: layout.entries_per_page(cfg, group) for group in groups}
    assert cfg.page_size == 256 and entries == {SPARSE_ENTRIES: 64, INDEX_KEYS: 64, HEAVY_ENTRIES: 2}
    pool = layout.pool(cfg, "fp8", 10, 3, 2)
    shapes = {name: (array.shape, array.dtype.name) for name, array in pool.items()}
    assert shapes == {
        SPARSE_ENTRIES: ((210, 64, 584), "uint8"),
        INDEX_KEYS: ((210, 64, 132), "uint8"),
        HEAVY_ENTRIES: ((200, 2, 584), "uint8"),
        WINDOW_LATENTS: ((132, 136, 584), "uint8"),
        SPARSE_TAILS: ((63, 4, 1024), "float32"),
        INDEX_TAILS: ((63, 4, 256), "float32"),
        SPARSE_PARTS: ((42, 16, 2048), "float32"),
        INDEX_PARTS: ((42, 16, 512), "float32"),
        HEAVY_PARTS: ((40, 136, 1024), "float32"),
    }
    assert [layout.pages_per_layer(cfg, pool, lifetime) for lifetime in ("context", "window", "request")] == [10, 3, 2]


def test_devices_that_divide_pages_each_have_whole_pages_of_the_window() -> None:
    alone = from_hf(FLASH)
    cfg = dataclasses.replace(alone, context_shards=8)
    pages = {group.name: layout.entries_per_page(cfg, group) for group in layout.groups_of(cfg, "fp8", "context")}
    assert cfg.page_size == 2048 and pages == {SPARSE_ENTRIES: 512, INDEX_KEYS: 512, HEAVY_ENTRIES: 16}
    for lifetime, times in (("context", 8), ("window", 1), ("request", 1)):
        assert layout.page_bytes(cfg, "fp8", lifetime) == times * layout.page_bytes(alone, "fp8", lifetime)
    assert layout.page_cost(cfg, "fp8") == layout.page_cost(alone, "fp8"), "on a device"
    assert layout.window_pages(cfg, "fp8", 1000, 4) == layout.window_pages(alone, "fp8", 1000, 4)


@pytest.mark.parametrize(
    ("published", "cache_dtype", "latents", "tails", "slot"),
    [
        (FLASH, "fp8", 3_494_656, 430_080, 14_581_760),
        (FLASH, "bfloat16", 6_127_616, 430_080, 14_581_760),
        (PRO, "fp8", 4_924_288, 614_400, 22_183_936),
        (PRO, "bfloat16", 8_634_368, 614_400, 22_183_936),
    ],
)
def test_bytes_of_the_last_tokens(
    published: dict[str, Any], cache_dtype: str, latents: int, tails: int, slot: int
) -> None:
    """A page of the window is what a prefix costs beside its entries; a slot is what a running request costs."""
    cfg = from_hf(published)
    assert layout.page_bytes(cfg, cache_dtype, "window") == latents + tails
    assert layout.page_bytes(cfg, cache_dtype, "request") == slot
    assert layout.payload_shape(cfg, cache_dtype, "window").shape == (latents + tails,)


def test_pages_of_the_window_are_needed_as_long_as_a_token_sees_them() -> None:
    cfg = from_hf(FLASH)
    first = {tokens: first_window_page(cfg, tokens) for tokens in (0, 127, 256, 382, 383, 638, 639)}
    assert first == {0: 0, 127: 0, 256: 0, 382: 0, 383: 1, 638: 1, 639: 2}


def test_layers_without_entries_keep_nothing_for_the_whole_context() -> None:
    sparse, keys, heavy = layout.groups_of(from_hf(FLASH), "bfloat16", "context")
    assert sparse.layers == keys.layers == tuple(range(2, 43, 2)) and heavy.layers == tuple(range(3, 43, 2))
    assert (sparse.width, keys.width, heavy.width) == (512, 128, 512)


def test_the_cache_is_split_by_rules() -> None:
    """A slot has its state and four window pages; a fifth of the rest is window pages that are kept."""
    cfg, nbytes, slots = from_hf(FLASH), 10**10, 64
    page, window, state = (layout.page_bytes(cfg, "fp8", kind) for kind in ("context", "window", "request"))
    pages, least = layout.pages_within(cfg, "fp8", nbytes, slots), 4 * slots + 8
    windows = layout.window_pages(cfg, "fp8", pages, slots)
    rest = nbytes - slots * state - least * window
    assert layout.slots_bytes(cfg, "fp8", slots) == nbytes - rest
    assert pages * page == pytest.approx(0.8 * rest, rel=1e-3)
    assert (windows - least) * window == pytest.approx(0.2 * rest, rel=1e-2)
    assert pages * page + windows * window + slots * state <= nbytes


def test_models_without_a_window_have_pages_alone() -> None:
    cfg = DEEPSEEK_V3
    assert layout.page_cost(cfg, "bfloat16") == layout.page_bytes(cfg, "bfloat16")
    assert layout.window_pages(cfg, "bfloat16", 1000, 64) == layout.slots_bytes(cfg, "bfloat16", 64) == 0


def test_stages_of_dspark_have_windows_behind_those_of_the_model() -> None:
    groups = {group.name: group for group in from_hf(FLASH_0731).cache_groups("fp8")}
    assert groups[WINDOW_LATENTS].layers == tuple(range(46))
    assert groups[SPARSE_TAILS].layers == tuple(range(2, 43, 2))
