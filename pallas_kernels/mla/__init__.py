"""Multi-head latent attention over a paged cache: decode, prefill, cache write."""

from pallas_kernels.mla.layout import FP8_PAGES_DTYPE, PAGE_SIZE, fp8_pages_of_rows, fp8_row_bytes, pack_fp8, unpack_fp8
from pallas_kernels.mla.mosaic_fp8_cache import VALUE_WIDTH as FP8_VALUE_WIDTH
from pallas_kernels.mla.mosaic_ops import decode_schedule
from pallas_kernels.mla.ops import (
    decode_unsupported,
    gather_latents,
    merge_attention,
    merge_parts,
    mla_decode,
    mla_prefill,
    mla_prefill_context,
    mla_prefill_spans,
    mla_prefill_topk,
    prefill_unsupported,
    topk_bitmask,
    whole_keys,
    write_pages,
)
from pallas_kernels.mla.schedule import DecodeSchedule

__all__ = [
    "FP8_PAGES_DTYPE",
    "FP8_VALUE_WIDTH",
    "PAGE_SIZE",
    "DecodeSchedule",
    "decode_schedule",
    "decode_unsupported",
    "fp8_pages_of_rows",
    "fp8_row_bytes",
    "gather_latents",
    "merge_attention",
    "merge_parts",
    "mla_decode",
    "mla_prefill",
    "mla_prefill_context",
    "mla_prefill_spans",
    "mla_prefill_topk",
    "pack_fp8",
    "prefill_unsupported",
    "topk_bitmask",
    "unpack_fp8",
    "whole_keys",
    "write_pages",
]
