"""Sparse attention over a paged cache (DeepSeek-V3.2): index keys, scores, the best tokens, attention to these."""

from pallas_kernels.dsa.attend import BYTES_AT_ONCE, attend_chosen, chosen_width, rows_at_once
from pallas_kernels.dsa.keys import key_row, write_keys
from pallas_kernels.dsa.scores import index_scores, scores_unsupported
from pallas_kernels.dsa.select import choose, select_best
from pallas_kernels.dsa.triton_ops import usable as has_kernels

__all__ = [
    "BYTES_AT_ONCE",
    "attend_chosen",
    "choose",
    "chosen_width",
    "has_kernels",
    "index_scores",
    "key_row",
    "rows_at_once",
    "scores_unsupported",
    "select_best",
    "write_keys",
]
