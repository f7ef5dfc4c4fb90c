"""Rotary embedding: interleaved pairs, YaRN's published numbers."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from configs.deepseek_v2 import DEEPSEEK_V2_LITE
from configs.deepseek_v3 import DEEPSEEK_V3
from configs.kimi import KIMI_K2, MOONLIGHT_16B_A3B
from dsv3.config.model import ModelConfig, YarnConfig
from dsv3.model.layers.rope import amplitude, inverse_frequencies, rotate, rotation


@functools.partial(jax.jit, static_argnums=2)
def rotated(x: jax.Array, positions: jax.Array, cfg: ModelConfig) -> jax.Array:
    return rotate(x, rotation(cfg, positions))


def test_yarn_of_deepseek_v3() -> None:
    frequencies = inverse_frequencies(DEEPSEEK_V3)
    plain = inverse_frequencies(dataclasses.replace(DEEPSEEK_V3, yarn=None))
    assert frequencies.shape == (32,)
    np.testing.assert_allclose(frequencies[:11], plain[:11], rtol=1e-6)
    np.testing.assert_allclose(frequencies[23:], plain[23:] / 40, rtol=1e-6)
    assert (frequencies[11:23] < plain[11:23]).all()
    assert (frequencies[11:23] > plain[11:23] / 40).all()
    assert frequencies[10] == pytest.approx(0.0562341, rel=1e-6)
    assert frequencies[23] == pytest.approx(3.3338e-5, rel=1e-4)


def test_equal_betas_make_a_step() -> None:
    frequencies = inverse_frequencies(KIMI_K2)
    plain = inverse_frequencies(dataclasses.replace(KIMI_K2, yarn=None))
    ratio = plain / frequencies
    assert set(np.round(ratio, 3)) == {1.0, 32.0}
    assert (np.diff(ratio) >= 0).all()


@pytest.mark.parametrize(
    "cfg, scale",
    [
        (DEEPSEEK_V3, 0.1352338),
        (DEEPSEEK_V2_LITE, 0.114721),
        (KIMI_K2, 0.130861),
        (dataclasses.replace(KIMI_K2, yarn=YarnConfig(64.0, 4096, 1.0, 1.0, 1.0, 1.0)), 0.144680),
        (MOONLIGHT_16B_A3B, 192**-0.5),
    ],
)
def test_softmax_scale(cfg: ModelConfig, scale: float) -> None:
    assert cfg.softmax_scale == pytest.approx(scale, rel=1e-5)
    assert amplitude(cfg.yarn) == 1.0


def test_amplitude_without_mscale_all_dim() -> None:
    assert amplitude(YarnConfig(40.0, 4096)) == pytest.approx(0.1 * np.log(40) + 1)
    assert amplitude(YarnConfig(1.0, 4096)) == 1.0


def test_pairs_are_interleaved_and_turn_by_position_times_frequency() -> None:
    cfg = dataclasses.replace(DEEPSEEK_V3, qk_rope_head_dim=8)
    positions = np.array([0, 1, 77, 5000], np.int32)
    x = np.random.default_rng(0).normal(size=(4, 3, 8)).astype(np.float32)
    turned = np.asarray(rotated(x, positions, cfg))
    as_complex = x[..., 0::2] + 1j * x[..., 1::2]
    angles = positions[:, None].astype(np.float32) * inverse_frequencies(cfg)
    wanted = as_complex * np.exp(1j * angles)[:, None]
    np.testing.assert_allclose(turned[..., 0::2], wanted.real, atol=1e-5)
    np.testing.assert_allclose(turned[..., 1::2], wanted.imag, atol=1e-5)


def test_scores_depend_on_distance_only() -> None:
    q, k = np.random.default_rng(1).normal(size=(2, 64)).astype(np.float32)
    near = _score(q, k, 130, 100)
    assert near == pytest.approx(_score(q, k, 1030, 1000), rel=1e-3)
    assert near != pytest.approx(_score(q, k, 140, 100), rel=1e-3)


def _score(q: np.ndarray, k: np.ndarray, q_position: int, k_position: int) -> float:
    turned = np.asarray(rotated(np.stack([q, k]), np.array([q_position, k_position], np.int32), DEEPSEEK_V3))
    return float(turned[0] @ turned[1])
