"""Sparse attention over a paged cache (DeepSeek-V3.2): index keys, scores, the best tokens, attention to these."""

from pallas_kernels.dsa.attend import BYTES_AT_ONCE, attend_chosen, chosen_width, rows_at_once
from pallas_kernels.dsa.keys import key_row, write_keys
from pallas_kernels.dsa.scores import index_scores
from pallas_kernels.dsa.select import choose, select_best

__all__ = [
    "BYTES_AT_ONCE",
    "attend_chosen",
    "choose",
    "chosen_width",
    "index_scores",
    "key_row",
    "rows_at_once",
    "select_best",
    "write_keys",
]
