"""The tensors of a DeepSeek-V4 checkpoint: names as published, types and shapes, from the configuration alone."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import ml_dtypes
import numpy as np

from dsv3.checkpoint.layout import scale_shape
from dsv3.config.model import CompressedAttention, ModelConfig
from pallas_kernels.float8 import E4M3
from pallas_kernels.int4 import GROUP

F32, I64, I8 = np.dtype(np.float32), np.dtype(np.int64), np.dtype(np.int8)
BF16, E8M0 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e8m0fnu)


class StoredTensor(NamedTuple):
    """One tensor of a checkpoint."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def stored_tensors(cfg: ModelConfig) -> Iterator[StoredTensor]:
    """Returns all tensors of a checkpoint of `cfg`, those of its MTP modules or DSpark stages included.

    Published files sum to the byte. Without `cfg.fp8` weights are bfloat16 and have no scales.
    """
    compressed = cfg.compressed
    assert compressed is not None
    D, V = cfg.hidden_size, cfg.vocab_size
    yield StoredTensor("embed.weight", BF16, (V, D))
    yield StoredTensor("head.weight", BF16, (V, D))
    yield StoredTensor("norm.weight", BF16, (D,))
    yield from _head_mixing(cfg, "")
    for layer, ratio in enumerate(compressed.ratios):
        yield from _layer(cfg, compressed, f"layers.{layer}.", ratio, hashed=layer < cfg.num_hash_layers)
    for module in range(cfg.num_nextn_predict_layers):
        prefix = f"mtp.{module}."
        yield from _layer(cfg, compressed, prefix, 0, hashed=False)
        yield from _product(cfg, f"{prefix}e_proj", D, D)
        yield from _product(cfg, f"{prefix}h_proj", D, D)
        for name in ("enorm", "hnorm", "norm"):
            yield StoredTensor(f"{prefix}{name}.weight", BF16, (D,))
        yield from _head_mixing(cfg, prefix)
    yield from _dspark(cfg, compressed)


def _dspark(cfg: ModelConfig, compressed: CompressedAttention) -> Iterator[StoredTensor]:
    if cfg.dspark is None:
        return
    D, V, rank, last = cfg.hidden_size, cfg.vocab_size, cfg.dspark.markov_rank, cfg.dspark.stages - 1
    for stage in range(cfg.dspark.stages):
        yield from _layer(cfg, compressed, f"mtp.{stage}.", 0, hashed=False)
    yield from _product(cfg, "mtp.0.main_proj", D, len(cfg.dspark.target_layers) * D)
    yield StoredTensor("mtp.0.main_norm.weight", BF16, (D,))
    yield StoredTensor(f"mtp.{last}.norm.weight", BF16, (D,))
    yield from _head_mixing(cfg, f"mtp.{last}.")
    for name in ("markov_w1", "markov_w2"):
        yield StoredTensor(f"mtp.{last}.markov_head.{name}.weight", BF16, (V, rank))
    yield StoredTensor(f"mtp.{last}.confidence_head.proj.weight", BF16, (1, D + rank))


def _layer(
    cfg: ModelConfig, compressed: CompressedAttention, prefix: str, ratio: int, *, hashed: bool
) -> Iterator[StoredTensor]:
    D = cfg.hidden_size
    for site in ("attn", "ffn"):
        yield StoredTensor(f"{prefix}{site}_norm.weight", BF16, (D,))
        yield from _mixing(cfg, f"{prefix}hc_{site}")
    yield from _attention(cfg, compressed, f"{prefix}attn.", ratio)
    yield from _experts(cfg, f"{prefix}ffn.", hashed=hashed)


def _mixing(cfg: ModelConfig, prefix: str) -> Iterator[StoredTensor]:
    assert cfg.hyper_connections is not None
    n = cfg.hyper_connections.streams
    yield StoredTensor(f"{prefix}_fn", F32, (n * (n + 2), n * cfg.hidden_size))
    yield StoredTensor(f"{prefix}_base", F32, (n * (n + 2),))
    yield StoredTensor(f"{prefix}_scale", F32, (3,))


def _head_mixing(cfg: ModelConfig, prefix: str) -> Iterator[StoredTensor]:
    assert cfg.hyper_connections is not None
    n = cfg.hyper_connections.streams
    yield StoredTensor(f"{prefix}hc_head_fn", F32, (n, n * cfg.hidden_size))
    yield StoredTensor(f"{prefix}hc_head_base", F32, (n,))
    yield StoredTensor(f"{prefix}hc_head_scale", F32, (1,))


def _attention(cfg: ModelConfig, compressed: CompressedAttention, prefix: str, ratio: int) -> Iterator[StoredTensor]:
    D, H, R, d = cfg.hidden_size, cfg.num_attention_heads, cfg.q_lora_rank, cfg.latent_dim
    groups, indexer = compressed.output_groups, compressed.indexer
    assert R is not None  # every configuration with compressed attention has it
    yield StoredTensor(f"{prefix}attn_sink", F32, (H,))
    yield from _product(cfg, f"{prefix}wq_a", R, D)
    yield StoredTensor(f"{prefix}q_norm.weight", BF16, (R,))
    yield from _product(cfg, f"{prefix}wq_b", H * d, R)
    yield from _product(cfg, f"{prefix}wkv", d, D)
    yield StoredTensor(f"{prefix}kv_norm.weight", BF16, (d,))
    yield from _product(cfg, f"{prefix}wo_a", groups * compressed.output_rank, H * d // groups)
    yield from _product(cfg, f"{prefix}wo_b", D, groups * compressed.output_rank)
    if not ratio:
        return
    sparse = ratio == compressed.sparse_ratio
    yield from _compressor(f"{prefix}compressor.", D, d, ratio, overlaps=sparse)
    if sparse:
        yield from _product(cfg, f"{prefix}indexer.wq_b", indexer.num_heads * indexer.head_dim, R)
        yield StoredTensor(f"{prefix}indexer.weights_proj.weight", BF16, (indexer.num_heads, D))
        yield from _compressor(f"{prefix}indexer.compressor.", D, indexer.head_dim, ratio, overlaps=True)


def _compressor(prefix: str, D: int, d: int, ratio: int, *, overlaps: bool) -> Iterator[StoredTensor]:
    width = 2 * d if overlaps else d
    yield StoredTensor(f"{prefix}wkv.weight", BF16, (width, D))
    yield StoredTensor(f"{prefix}wgate.weight", BF16, (width, D))
    yield StoredTensor(f"{prefix}ape", F32, (ratio, width))
    yield StoredTensor(f"{prefix}norm.weight", BF16, (d,))


def _experts(cfg: ModelConfig, prefix: str, *, hashed: bool) -> Iterator[StoredTensor]:
    D, E, I = cfg.hidden_size, cfg.n_routed_experts, cfg.moe_intermediate_size  # noqa: E741
    yield StoredTensor(f"{prefix}gate.weight", BF16, (E, D))
    if hashed:
        yield StoredTensor(f"{prefix}gate.tid2eid", I64, (cfg.vocab_size, cfg.num_experts_per_tok))
    else:
        yield StoredTensor(f"{prefix}gate.bias", F32, (E,))
    routed = _fp4 if cfg.fp4_experts else _product
    for part, product in [*((f"experts.{e}", routed) for e in range(E)), ("shared_experts", _product)]:
        yield from product(cfg, f"{prefix}{part}.w1", I, D)
        yield from product(cfg, f"{prefix}{part}.w2", D, I)
        yield from product(cfg, f"{prefix}{part}.w3", I, D)


def _product(cfg: ModelConfig, name: str, rows: int, columns: int) -> Iterator[StoredTensor]:
    """Returns a weight, and its block scales where it is FP8: float32 ones where experts are FP8 too (V4-*-Base)."""
    yield StoredTensor(f"{name}.weight", BF16 if cfg.fp8 is None else E4M3, (rows, columns))
    if cfg.fp8 is not None:
        yield StoredTensor(f"{name}.scale", E8M0 if cfg.fp4_experts else F32, scale_shape((rows, columns)))


def _fp4(cfg: ModelConfig, name: str, rows: int, columns: int) -> Iterator[StoredTensor]:
    yield StoredTensor(f"{name}.weight", I8, (rows, columns // 2))
    yield StoredTensor(f"{name}.scale", E8M0, (rows, columns // GROUP))
