"""FP8 (e4m3) with block scales: quantization and the dense products."""

from pallas_kernels.fp8.gemm import fp8_gemm
from pallas_kernels.fp8.quantize import dequantize_128x128, quantize_1x128, quantize_128x128, swiglu_quantize
from pallas_kernels.fp8.trained import trained_gemm

__all__ = [
    "dequantize_128x128",
    "fp8_gemm",
    "quantize_1x128",
    "quantize_128x128",
    "swiglu_quantize",
    "trained_gemm",
]
