"""What DeepSeek-V4 keeps of tokens over the whole context: entries of two ratios, and index keys."""

from typing import Any

import pytest

from dsv3.config.hugging_face import from_hf
from dsv3.config.model import HEAVY_ENTRIES, INDEX_KEYS, SPARSE_ENTRIES
from dsv3.kv_cache import layout
from tests.dsv3.deepseek_v4 import FLASH, PRO


@pytest.mark.parametrize(
    ("published", "cache_dtype", "per_token"),
    [(FLASH, "fp8", 3_850), (FLASH, "bfloat16", 6_880), (PRO, "fp8", 5_511), (PRO, "bfloat16", 9_848)],
)
def test_bytes_per_token(published: dict[str, Any], cache_dtype: str, per_token: int) -> None:
    cfg = from_hf(published)
    assert layout.page_bytes(cfg, cache_dtype) // cfg.page_size == per_token


def test_a_page_covers_256_tokens() -> None:
    cfg = from_hf(FLASH)
    entries = {group.name: layout.entries_per_page(cfg, group) for group in cfg.cache_groups("fp8")}
    assert cfg.page_size == 256 and entries == {SPARSE_ENTRIES: 64, INDEX_KEYS: 64, HEAVY_ENTRIES: 2}
    shapes = {name: (array.shape, array.dtype.name) for name, array in layout.pool(cfg, "fp8", 10).items()}
    assert shapes == {
        SPARSE_ENTRIES: ((210, 64, 584), "uint8"),
        INDEX_KEYS: ((210, 64, 132), "uint8"),
        HEAVY_ENTRIES: ((200, 2, 584), "uint8"),
    }


def test_layers_without_entries_keep_nothing_for_the_whole_context() -> None:
    sparse, keys, heavy = from_hf(FLASH).cache_groups("bfloat16")
    assert sparse.layers == keys.layers == tuple(range(2, 43, 2)) and heavy.layers == tuple(range(3, 43, 2))
    assert (sparse.width, keys.width, heavy.width) == (512, 128, 512)
    window_only = FLASH | {"compress_ratios": [0] * 44}
    assert from_hf(window_only).cache_groups("bfloat16") == ()
