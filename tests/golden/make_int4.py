"""Makes `int4.npz`: a weight that compressed-tensors has quantized, packed, unpacked and dequantized.

Run where compressed-tensors 0.20 and a CPU torch are installed (CI needs neither):

    python tests/golden/make_int4.py

`original` float32 [6, 512], `packed` int32 [6, 64], `scale` [6, 16] and `weight` [6, 512] bfloat16 as uint16.
"""

import pathlib

import numpy as np
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize

OUTPUT = pathlib.Path(__file__).parent / "int4.npz"
ARGS = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)


def main() -> None:
    """Writes the file. Rows are of sizes 0.001 to 10."""
    sizes = torch.logspace(-3, 1, 6)[:, None]
    original = torch.randn(6, 512, generator=torch.Generator().manual_seed(0)) * sizes
    scale = (original.reshape(6, 16, 32).abs().amax(-1) / 7.5).bfloat16()
    zero = torch.zeros(scale.shape, dtype=torch.int8)
    values = quantize(original, scale, zero, ARGS, dtype=torch.int8)
    packed = pack_to_int32(values, 4)
    weight = dequantize(unpack_from_int32(packed, 4, original.shape), scale, zero, ARGS, dtype=torch.bfloat16)
    np.savez_compressed(
        OUTPUT,
        original=original.numpy(),
        packed=packed.numpy(),
        scale=scale.view(torch.uint16).numpy(),
        weight=weight.view(torch.uint16).numpy(),
    )


if __name__ == "__main__":
    main()
