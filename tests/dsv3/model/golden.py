"""The golden data of tests/golden: small checkpoints and the results of transformers."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from dsv3.checkpoint import load_params
from dsv3.config.hugging_face import load_config
from dsv3.config.model import ModelConfig
from dsv3.model.forward import ForwardOutput, forward
from dsv3.model.params import Params, abstract

DIRECTORY = pathlib.Path(__file__).parents[2] / "golden"
MEMBERS = ("deepseek_v3", "deepseek_v31", "deepseek_v2", "deepseek_v2_lite", "moonlight", "kimi_k2")


@functools.cache
def model(member: str) -> tuple[Params, ModelConfig]:
    """Parameters in float32, FP8 multiplied out."""
    cfg = load_config(DIRECTORY / member)
    return load_params(DIRECTORY / member, cfg, dtype=jnp.float32, fp8="dequantize", progress=False), cfg


def with_module(member: str) -> tuple[Params, ModelConfig]:
    """Adds a random MTP module to a member without any: its drafts are seldom accepted, and texts stay the same."""
    params, cfg = model(member)
    cfg, rng = dataclasses.replace(cfg, num_nextn_predict_layers=1), np.random.default_rng(0)
    mtp = jax.tree.map(lambda s: rng.normal(0, 0.3, s.shape).astype(s.dtype), abstract(cfg, jnp.float32).mtp)
    return dataclasses.replace(params, mtp=mtp), cfg


@functools.cache
def data(member: str) -> dict[str, np.ndarray]:
    with np.load(DIRECTORY / member / "golden.npz") as file:
        return dict(file)


_forward = jax.jit(forward, static_argnames=("cfg", "with_mtp"))


def run(params: Params, cfg: ModelConfig, tokens: np.ndarray) -> ForwardOutput:
    """The training pass on `tokens` `[B, S]`, with all MTP modules."""
    return _forward(params, cfg=cfg, tokens=jnp.asarray(tokens), with_mtp=cfg.num_nextn_predict_layers > 0)


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference over the largest expected magnitude."""
    return float(np.abs(np.asarray(actual) - expected).max() / np.abs(expected).max())
