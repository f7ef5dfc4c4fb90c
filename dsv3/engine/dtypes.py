"""The dtypes of an engine's activations, weights and cache, resolved from the options, the model and the device."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp

from dsv3.config.model import FP8, ModelConfig
from dsv3.config.options import EngineOptions
from dsv3.model.params import declare
from pallas_kernels import mla, native
from pallas_kernels.backend import Backend, is_hopper, resolve_backend
from pallas_kernels.float8 import BLOCK

_KERNEL_PAGES: Mapping[str, tuple[str, ...]] = {"bfloat16": ("bfloat16", FP8), "float16": ("float16",)}
"""Cache dtypes that the attention kernels read, by the dtype of the queries; float32 queries have no kernel."""
EXACT_PARAMETERS = 16 * 2**20
"""With up to so many parameters per token (64 MiB in float32) a step takes few milliseconds: exactness is worth more.
"""


@dataclasses.dataclass(frozen=True)
class EngineDtypes:
    """`compute` is the dtype of weights without scales and of activations, `cache` names that of the pages.

    `reason` explains what "auto" resolved to, where that depends on the machine and the model.
    """

    compute: jnp.dtype
    cache: str
    reason: str = dataclasses.field(default="", compare=False)


def resolve_dtypes(
    model: ModelConfig, options: EngineOptions, device: jax.Device, stored: str | None = None
) -> EngineDtypes:
    """Returns the dtypes for a model whose checkpoint declares the dtype `stored`, or none.

    Raises ValueError where no product or no attention exists for the combination.
    """
    compute, reason = _compute_name(model, options.dtype, device, stored)
    cache = compute if options.kv_cache_dtype == "auto" else options.kv_cache_dtype
    fp8_weights = options.fp8 == "quantize" or (model.fp8 is not None and options.fp8 != "dequantize")
    if compute == "float32" and is_hopper(device) and fp8_weights:
        raise ValueError(
            "dtype: 'float32' does not go with FP8 weights on this GPU, whose products of few rows have 16 bits; "
            "set dtype to bfloat16, or load no FP8 weights (fp8: dequantize, or keep for a checkpoint without them)"
        )
    if compute == "float16" and model.fp8 is not None and options.fp8 != "dequantize":
        raise ValueError(
            "dtype: 'float16' does not go with FP8 weights, whose products are bfloat16 or float32; "
            "set dtype to bfloat16, or fp8 to dequantize"
        )
    if compute == "float16" and model.int4_experts and options.int4 != "dequantize":
        raise ValueError(
            f"dtype: 'float16' does not go with INT4 experts under int4 {options.int4!r}, whose products are bfloat16 "
            "or float32; set dtype to bfloat16, or int4 to dequantize"
        )
    dense = model.compressed is None  # rows of windows and entries have scales of their own
    if dense and cache == FP8 and model.kv_lora_rank > BLOCK and model.kv_lora_rank % BLOCK:
        raise ValueError(
            f"kv_cache_dtype: 'fp8' needs latents of whole blocks of {BLOCK} values, but kv_lora_rank is "
            f"{model.kv_lora_rank}; set kv_cache_dtype to auto"
        )
    if dense and is_hopper(device) and cache == FP8 and model.kv_lora_rank != mla.FP8_VALUE_WIDTH:
        raise ValueError(
            f"kv_cache_dtype: 'fp8' has no attention kernel for a kv_lora_rank of {model.kv_lora_rank}, only for "
            f"{mla.FP8_VALUE_WIDTH}; set kv_cache_dtype to auto"
        )
    readable = _KERNEL_PAGES.get(compute)
    if readable and cache not in readable and resolve_backend(device) in (Backend.MOSAIC, Backend.TRITON):
        raise ValueError(
            f"kv_cache_dtype: {cache!r} has no attention kernel for dtype {compute}; "
            f"set kv_cache_dtype to auto or {' or '.join(readable)}"
        )
    if options.batch_invariant:
        _check_invariant(model, compute, cache, device)
    return EngineDtypes(jnp.dtype(compute), cache, reason)


def _check_invariant(model: ModelConfig, compute: str, cache: str, device: jax.Device) -> None:
    """Raises ValueError for dtypes whose products or attention are not the kernels', but XLA's."""
    backend = resolve_backend(device)
    if backend is Backend.REFERENCE:
        raise ValueError(
            f"batch_invariant: XLA's products depend on the batch, and {device.device_kind} has no kernels; on a CPU "
            "install a C++ compiler, on a GPU the 'triton' extra"
        )
    fitting = ("float32", "bfloat16") if backend is Backend.NATIVE else ("bfloat16", "float16")
    if compute not in fitting:
        raise ValueError(
            f"batch_invariant: products of {compute} are XLA's here, which depend on the batch; "
            f"set dtype to {' or '.join(fitting)}"
        )
    if backend is Backend.NATIVE and model.compressed is None and cache != compute:
        raise ValueError(
            f"batch_invariant: attention to a cache of {cache} is XLA's here, which depends on the batch; "
            "set kv_cache_dtype to auto"
        )


def _compute_name(model: ModelConfig, dtype: str, device: jax.Device, stored: str | None) -> tuple[str, str]:
    """Resolves "auto" and gives the reason: on a GPU float16 for a float16 checkpoint, bfloat16 for all others."""
    if dtype != "auto":
        return dtype, ""
    if device.platform == "cpu":
        return fastest_on_cpu(model, stored)
    return ("float16" if stored == "float16" else "bfloat16"), ""


def fastest_on_cpu(model: ModelConfig, stored: str | None) -> tuple[str, str]:
    """Returns the dtype for a checkpoint of dtype `stored` on this machine's CPU, and the reason.

    In measurements bfloat16 was faster than float32 at each size, number of rows and length of prompt, where the CPU
    multiplies it and the C++ kernels are built. It rounds, so a model whose step is short in either dtype stays
    float32.
    """
    if stored != "bfloat16":
        return "float32", f"bfloat16 would round a checkpoint of {stored or 'no stated type'}"
    if model.int4_experts:
        return "float32", "INT4 experts were not measured in bfloat16 on a CPU"
    active = count_parameters(model)[1]
    if active <= EXACT_PARAMETERS:
        return "float32", f"{short(active)} parameters per token are few"
    if not native.library().multiplies_bfloat16:
        return "float32", "no kernel multiplies bfloat16 as it is on this CPU"
    return "bfloat16", "this CPU multiplies it and reads half the bytes"


def packed_mode(model: ModelConfig, options: EngineOptions) -> Literal["keep", "fp8", "dequantize"] | None:
    """Returns how the model's experts of four bits are served; None where it has none."""
    if model.int4_experts:
        return options.int4
    if model.fp4_experts:
        return "dequantize" if options.fp8 == "dequantize" else options.fp4
    return None


def fp8_experts(model: ModelConfig, options: EngineOptions) -> bool:
    """Returns whether the routed experts multiply e4m3 values, FP4 ones too: then rows travel to them as FP8."""
    packed = packed_mode(model, options)
    if packed is None:
        return model.fp8 is not None and options.fp8 != "dequantize"
    return packed == "fp8" or (packed == "keep" and model.fp4_experts)


def count_parameters(cfg: ModelConfig) -> tuple[int, int]:
    """Returns the number of parameters, and how many of them each token uses: of the routed experts only its own.

    The embedding counts in the first number alone, unless it is the head too.
    """
    total = active = 0
    for spec in jax.tree.leaves(declare(cfg)):
        size = math.prod(spec.shape)
        total += size
        active += size // cfg.n_routed_experts * cfg.num_experts_per_tok if "experts" in spec.axes else size
    embedding = cfg.vocab_size * cfg.hidden_size
    return total, active if cfg.tie_word_embeddings else active - embedding


def short(count: int) -> str:
    """Returns a count with three digits: "30.6 billion"."""
    for power, word in ((12, "trillion"), (9, "billion"), (6, "million")):
        if count >= 10**power:
            return f"{count / 10**power:.3g} {word}"
    return f"{count:,}"
