"""Grouped products for mixture-of-experts layers: contiguous (prefill, training) and masked (decode)."""

from pallas_kernels.grouped.align import GroupAlignment, align_groups, choose_tile_m, padded_rows
from pallas_kernels.grouped.contiguous import (
    fp8_grouped_gemm_contiguous,
    grouped_gemm_contiguous,
    grouped_weight_gradient,
)
from pallas_kernels.grouped.heads import head_gemm
from pallas_kernels.grouped.masked import fp8_grouped_gemm_masked, grouped_gemm_masked
from pallas_kernels.grouped.stacked import stacked_gemm

__all__ = [
    "GroupAlignment",
    "align_groups",
    "choose_tile_m",
    "fp8_grouped_gemm_contiguous",
    "fp8_grouped_gemm_masked",
    "grouped_gemm_contiguous",
    "grouped_gemm_masked",
    "grouped_weight_gradient",
    "head_gemm",
    "padded_rows",
    "stacked_gemm",
]
