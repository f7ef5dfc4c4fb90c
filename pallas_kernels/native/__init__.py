"""C++ for a CPU: products of few rows, attention, norms and routing; each active weight is read once, where it lies."""

from pallas_kernels.native.build import Library, library
from pallas_kernels.native.ops import (
    MAX_ROWS,
    align_rows,
    attends,
    choose_experts,
    context_attention,
    decode_attention,
    fp8_grouped_product,
    grouped_product,
    head_product,
    layer_product,
    norms,
    prefill_attention,
    quantize_rows,
    rms_norm,
    takes,
)

__all__ = [
    "MAX_ROWS",
    "Library",
    "align_rows",
    "attends",
    "choose_experts",
    "context_attention",
    "decode_attention",
    "fp8_grouped_product",
    "grouped_product",
    "head_product",
    "layer_product",
    "library",
    "norms",
    "prefill_attention",
    "quantize_rows",
    "rms_norm",
    "takes",
]
