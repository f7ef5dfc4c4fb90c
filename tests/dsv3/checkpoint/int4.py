"""Small checkpoints with INT4 experts in the format of compressed-tensors, and the same ones dequantized."""

import numpy as np

from dsv3.config.model import ModelConfig
from tests.dsv3.checkpoint import hf
from tests.pallas_kernels import int4_weights


def config(**changes) -> ModelConfig:
    """Widths that INT4 takes, all else as small as it may be."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "n_routed_experts": 4, "num_nextn_predict_layers": 0}
    return hf.config(**{**sizes, "int4_experts": True, **changes})


def is_expert(name: str) -> bool:
    return ".mlp.experts." in name


def packed(tensors: hf.Tensors) -> tuple[hf.Tensors, hf.Tensors]:
    """The checkpoint with packed experts, and with the float32 values of these."""
    small: hf.Tensors = {}
    plain: hf.Tensors = {}
    for name, tensor in tensors.items():
        if not is_expert(name):
            small[name] = plain[name] = tensor
            continue
        values, scale = int4_weights.quantize(tensor.astype(np.float32))
        small[f"{name}_packed"] = int4_weights.pack(values)
        small[f"{name}_scale"] = scale
        small[f"{name}_shape"] = np.array(tensor.shape, np.int32)
        plain[name] = int4_weights.real(values, scale, np.float32)
    return small, plain
