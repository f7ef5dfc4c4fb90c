"""Pages of other types, and float16 models, against float32: bounds that a wrong scale would break."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.precision import Difference, Reading, read, texts
from dsv3.checkpoint import load_params
from dsv3.config.hugging_face import load_config
from dsv3.config.model import FP8
from dsv3.engine.build import bundled_model
from dsv3.kv_cache.layout import pool
from dsv3.text.tokenizer import Tokenizer
from tests.dsv3.model import test_steps

TOKENS = 40
LIMIT = Difference(mean=0.03, largest=0.7, same_best=0.95)
"""Twice what FP8 pages measure here."""


@functools.cache
def bundled(dtype: str) -> tuple:
    cfg = dataclasses.replace(load_config(bundled_model()), num_nextn_predict_layers=0)
    return load_params(bundled_model(), cfg, dtype=jnp.dtype(dtype), progress=False), cfg


@functools.cache
def tokens() -> np.ndarray:
    return texts(Tokenizer.from_directory(bundled_model()), TOKENS)[:3]


@functools.cache
def expected() -> Reading:
    return read(*bundled("float32"), tokens(), "float32")


def differs(seen: Difference) -> bool:
    return seen.mean > LIMIT.mean or seen.largest > LIMIT.largest or seen.same_best < LIMIT.same_best


@pytest.mark.parametrize(("dtype", "pages"), [("float32", FP8), ("float16", "bfloat16")])
def test_log_probabilities_stay_close(dtype: str, pages: str) -> None:
    seen = Difference.between(read(*bundled(dtype), tokens(), pages), expected())
    assert seen.mean > 0 and not differs(seen), seen


def test_the_bound_detects_a_wrong_scale() -> None:
    """A scale that is read as twice its value raises no error of types or shapes.

    Decode reads every latent from pages, and only these two weights multiply it: doubling them has the same effect.
    """
    params, cfg = bundled("float32")
    stacks = [stack for stack in (params.dense, params.moe) if stack is not None]
    latent = [leaf for stack in stacks for leaf in (stack.attention.k_up, stack.attention.v_up)]
    doubled = jax.tree.map(lambda a: 2 * a if any(a is each for each in latent) else a, params)
    assert differs(Difference.between(read(doubled, cfg, tokens(), FP8), expected()))


def test_chunks_and_decode_over_fp8_pages_follow_the_training_pass() -> None:
    """A prompt in two chunks, the second of which reads pages, and decode: the logits of the golden model.

    A float16 model over FP8 pages: engine/test_dtypes.py.
    """
    prompt, full = test_steps.expected("deepseek_v2_lite", 0)
    cache = test_steps.Cache("deepseek_v2_lite", [[3, 1]])
    empty = pool(cache.cfg, FP8, test_steps.POOL)["latents"]
    cache.pages = {"latents": np.full(empty.shape, 0xFF, empty.dtype)}
    cut, end = len(prompt) // 2, len(prompt) - 2
    chunks = [cache.prefill([(0, prompt[:cut])])[0], cache.prefill([(0, prompt[cut:end])])[0]]
    decoded = [cache.decode({0: prompt[i : i + 1]})[0] for i in range(end, len(prompt))]
    logits = np.concatenate([*chunks, *decoded])
    assert cache.pages["latents"].dtype == empty.dtype and np.isfinite(logits).all()
    assert 0 < np.abs(logits - full).mean() < 0.02 * np.abs(full).mean()
