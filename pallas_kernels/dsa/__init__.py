"""Sparse attention over a paged cache (DeepSeek-V3.2): index keys, scores, top-k selection, attention to the result."""

from pallas_kernels.dsa.attend import BYTES_AT_ONCE, attend_topk, rows_at_once, topk_width
from pallas_kernels.dsa.keys import key_row, write_keys
from pallas_kernels.dsa.topk import index_scores, scores_unsupported, select_topk, topk_indices, topk_scores

__all__ = [
    "BYTES_AT_ONCE",
    "attend_topk",
    "index_scores",
    "key_row",
    "rows_at_once",
    "scores_unsupported",
    "select_topk",
    "topk_indices",
    "topk_scores",
    "topk_width",
    "write_keys",
]
