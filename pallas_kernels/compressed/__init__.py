"""Attention to a window of tokens and to compressed entries (DeepSeek-V4), whose rows are in paged arrays."""

from pallas_kernels.compressed.attend import attend_compressed, attend_part, bytes_of_query
from pallas_kernels.compressed.entries import (
    Given,
    PoolSizes,
    StepTokens,
    complete_entries,
    completes,
    write_rings,
)
from pallas_kernels.compressed.entry_row import decode_rows, encode_rows
from pallas_kernels.compressed.reference import sink_attention
from pallas_kernels.compressed.row_list import RowList
from pallas_kernels.dsa.triton_ops import usable

__all__ = [
    "Given",
    "PoolSizes",
    "RowList",
    "StepTokens",
    "attend_compressed",
    "attend_part",
    "bytes_of_query",
    "complete_entries",
    "completes",
    "decode_rows",
    "encode_rows",
    "sink_attention",
    "usable",
    "write_rings",
]
