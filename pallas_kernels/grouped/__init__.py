"""Products grouped by expert, for mixture-of-experts layers."""

from pallas_kernels.grouped.align import GroupAlignment, align_groups, aligned_rows, choose_tile_m
from pallas_kernels.grouped.contiguous import (
    fp4_grouped_gemm_contiguous,
    fp8_grouped_gemm_contiguous,
    grouped_gemm_contiguous,
    int4_grouped_gemm_contiguous,
)
from pallas_kernels.grouped.reference import dequantize_four_bit
from pallas_kernels.grouped.trained import trained_gemm_contiguous

__all__ = [
    "GroupAlignment",
    "align_groups",
    "aligned_rows",
    "choose_tile_m",
    "dequantize_four_bit",
    "fp4_grouped_gemm_contiguous",
    "fp8_grouped_gemm_contiguous",
    "grouped_gemm_contiguous",
    "int4_grouped_gemm_contiguous",
    "trained_gemm_contiguous",
]
