"""The golden checkpoints of DeepSeek-V4 as parameters, read by hand: float32, FP8 and FP4 multiplied out."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv3.checkpoint.fp4 import decode
from dsv3.checkpoint.safetensors_file import read_header
from dsv3.config.hugging_face import from_hf
from dsv3.config.model import DSparkConfig, ModelConfig
from dsv3.model.layers import compressed_uncached, hyper_connections
from dsv3.model.params import (
    CompressedAttentionParams,
    CompressorParams,
    LayerParams,
    MixingParams,
    MlpParams,
    MoeParams,
    Params,
    PooledIndexerParams,
    abstract,
)
from pallas_kernels import dense, dsa
from tests.dsv3.model.golden import DIRECTORY

MEMBERS = ("deepseek_v4", "deepseek_v4_plain")


@functools.cache
def model(member: str, *layers: int) -> tuple[Params, ModelConfig]:
    """Reads a golden checkpoint, or some of its layers: a test that needs fewer kinds compiles in less time."""
    cfg = from_hf(json.loads((DIRECTORY / member / "config.json").read_text()))
    layers = layers or tuple(range(cfg.num_hidden_layers))
    ratios = tuple(cfg.compressed.ratios[layer] for layer in layers)
    cfg = dataclasses.replace(
        cfg,
        num_hidden_layers=len(layers),
        num_hash_layers=sum(layer < cfg.num_hash_layers for layer in layers),
        compressed=dataclasses.replace(cfg.compressed, ratios=ratios),
    )
    return jax.device_put(_Reader(DIRECTORY / member / "model.safetensors", cfg, layers).params()), cfg


@functools.cache
def with_module(member: str, *layers: int) -> tuple[Params, ModelConfig]:
    """Adds a random MTP module, in which no rule can be left out unseen: streams keep apart, and change places."""
    params, cfg = model(member, *layers)
    return _with_drafters(params, dataclasses.replace(cfg, num_nextn_predict_layers=1))


STAGES = DSparkConfig(stages=3, block_size=5, noise_token_id=63, target_layers=(1, 2, 3), markov_rank=16)


@functools.cache
def with_stages(
    member: str, markov_rank: int = STAGES.markov_rank, layers: tuple[int, ...] = ()
) -> tuple[Params, ModelConfig]:
    """Adds random stages of DSpark in the same way. If `layers` are named, all are target layers."""
    params, cfg = model(member, *layers)
    targets = tuple(range(len(layers))) if layers else STAGES.target_layers
    dspark = dataclasses.replace(STAGES, markov_rank=markov_rank, target_layers=targets)
    return _with_drafters(params, dataclasses.replace(cfg, dspark=dspark))


def _with_drafters(params: Params, cfg: ModelConfig) -> tuple[Params, ModelConfig]:
    n, rng = cfg.hyper_connections.streams, np.random.default_rng(0)

    def drawn(path: Any, spec: jax.ShapeDtypeStruct) -> np.ndarray:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        value = rng.normal(0, 0.3, spec.shape)
        if name.endswith(("norm", "scale")):
            value += 1
        if name.endswith("moe_mixing.base") or name.endswith("attention_mixing.base"):
            value[..., 2 * n :] += 2.5 * np.roll(np.eye(n), 1, axis=0).ravel()
        return value.astype(spec.dtype)

    mtp = jax.tree_util.tree_map_with_path(drawn, abstract(cfg, jnp.float32).mtp)
    return dataclasses.replace(params, mtp=jax.device_put(mtp)), cfg


PARTS = [
    (module, name, jax.jit(getattr(module, name), static_argnums=numbers, static_argnames=names))
    for module, name, numbers, names in (
        (hyper_connections, "read_streams", (), ("iterations", "eps", "norm_eps", "backend")),
        (hyper_connections, "write_streams", (), ("backend",)),
        (compressed_uncached, "pool_window", (2,), ()),
        (compressed_uncached, "sink_attention", (), ()),
        (dsa, "select_topk", (2,), ()),
        (dense, "layer_gemm", (), ("out_dtype", "backend")),
    )
]
"""Functions that call nothing which a test of a wrong rule replaces, each as one program instead of many."""


_decode = jax.jit(decode)


class _Reader:
    def __init__(self, path: Path, cfg: ModelConfig, layers: tuple[int, ...]):
        """`cfg` is that of the `layers` alone, which are named by their numbers in the file."""
        self.layers = layers
        data, header = path.read_bytes(), read_header(path)
        self.cfg, self.tensors = cfg, {
            name: np.frombuffer(data[t.offset : t.offset + t.nbytes], t.dtype).reshape(t.shape)
            for name, t in header.items()
        }  # fmt: skip

    def one(self, name: str) -> np.ndarray:
        value, scale = self.tensors[name], self.tensors.get(name.removesuffix("weight") + "scale")
        if scale is None:
            return value.astype(np.int32 if value.dtype == np.int64 else np.float32)
        if value.dtype == np.int8:
            return np.asarray(_decode(value, scale))
        spread = np.repeat(np.repeat(scale.astype(np.float32), 128, 0), 128, 1)
        return value.astype(np.float32) * spread[: value.shape[0], : value.shape[1]]

    def stack(self, *names: str, layers: list[int] | None = None) -> Any:
        """The named tensors of each layer, one below the other; None if there are no layers."""
        among = range(self.cfg.num_hidden_layers) if layers is None else layers
        if not among:
            return None
        return np.stack(
            [np.concatenate([self.one(f"layers.{self.layers[n]}.{name}") for name in names]) for n in among]
        )

    def params(self) -> Params:
        return Params(
            embed=self.one("embed.weight"),
            dense=None,
            moe=self.layer_params(),
            norm=self.one("norm.weight"),
            head=self.one("head.weight"),
            mtp=None,
            head_mixing=MixingParams(*(self.one(f"hc_head_{part}") for part in ("fn", "base", "scale"))),
        )

    def layer_params(self) -> LayerParams:
        return LayerParams(
            input_norm=self.stack("attn_norm.weight"),
            attention=self.attention(),
            post_norm=self.stack("ffn_norm.weight"),
            mlp=None,
            moe=self.moe(),
            post_moe_norm=None,
            attention_mixing=MixingParams(*(self.stack(f"hc_attn_{part}") for part in ("fn", "base", "scale"))),
            moe_mixing=MixingParams(*(self.stack(f"hc_ffn_{part}") for part in ("fn", "base", "scale"))),
        )

    def attention(self) -> CompressedAttentionParams:
        ratios, chosen = self.cfg.compressed.ratios, self.cfg.compressed.sparse_ratio
        sparse = [n for n, ratio in enumerate(ratios) if ratio == chosen]
        o_a = self.stack("attn.wo_a.weight")
        return CompressedAttentionParams(
            qkv_a=self.stack("attn.wq_a.weight", "attn.wkv.weight"),
            q_norm=self.stack("attn.q_norm.weight"),
            q_b=self.stack("attn.wq_b.weight"),
            kv_norm=self.stack("attn.kv_norm.weight"),
            sink=self.stack("attn.attn_sink"),
            o_a=o_a.reshape(len(o_a), self.cfg.compressed.output_groups, -1, o_a.shape[2]),
            o_b=self.stack("attn.wo_b.weight"),
            sparse=self.compressor("attn.compressor", sparse),
            indexer=self.indexer(sparse),
            heavy=self.compressor("attn.compressor", [n for n, r in enumerate(ratios) if r not in (0, chosen)]),
        )

    def indexer(self, layers: list[int]) -> PooledIndexerParams | None:
        compressor = self.compressor("attn.indexer.compressor", layers)
        if compressor is None:
            return None
        return PooledIndexerParams(
            q_b=self.stack("attn.indexer.wq_b.weight", layers=layers),
            weights=self.stack("attn.indexer.weights_proj.weight", layers=layers),
            compressor=compressor,
        )

    def compressor(self, prefix: str, layers: list[int]) -> CompressorParams | None:
        if not layers:
            return None
        return CompressorParams(
            value_score=self.stack(f"{prefix}.wkv.weight", f"{prefix}.wgate.weight", layers=layers),
            position=self.stack(f"{prefix}.ape", layers=layers),
            norm=self.stack(f"{prefix}.norm.weight", layers=layers),
        )

    def moe(self) -> MoeParams:
        hashed, E = self.cfg.num_hash_layers, self.cfg.n_routed_experts

        def experts(*names: str) -> np.ndarray:
            return np.stack([self.stack(*(f"ffn.experts.{e}.{name}.weight" for name in names)) for e in range(E)], 1)

        return MoeParams(
            router=self.stack("ffn.gate.weight"),
            router_bias=self.stack("ffn.gate.bias", layers=list(range(hashed, self.cfg.num_hidden_layers))),
            gate_up=experts("w1", "w3"),
            down=experts("w2"),
            shared=MlpParams(
                gate_up=self.stack("ffn.shared_experts.w1.weight", "ffn.shared_experts.w3.weight"),
                down=self.stack("ffn.shared_experts.w2.weight"),
            ),
            by_token=self.stack("ffn.gate.tid2eid", layers=list(range(hashed))),
        )
