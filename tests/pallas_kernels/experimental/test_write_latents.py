"""The fused write: its reference against complex numbers, the kernel in the interpreter and compiled for sm_90a."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import aot
from pallas_kernels.experimental.write_latents import cache_rows, write_new_latents
from pallas_kernels.mla import write
from pallas_kernels.mosaic import interpret_params


def test_rows_are_normed_and_rotated():
    rng = np.random.default_rng(0)
    raw, weight, angles = rng.standard_normal((3, 48)), rng.standard_normal(32), rng.uniform(0, 6, (3, 8))
    f32 = functools.partial(jnp.asarray, dtype=jnp.float32)
    arguments = map(f32, (raw, weight, np.cos(angles), np.sin(angles)))
    rows = cache_rows(*arguments, epsilon=1e-3, value_width=32)
    normed = raw[:, :32] / np.sqrt((raw[:, :32] ** 2).mean(1, keepdims=True) + 1e-3) * weight
    turned = (raw[:, 32::2] + 1j * raw[:, 33::2]) * np.exp(1j * angles)
    expected = np.concatenate([normed, np.stack([turned.real, turned.imag], -1).reshape(3, 16)], 1)
    np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-6)


def test_norm_and_rotation_on_the_way():
    rng = np.random.default_rng(0)
    T = 6
    targets = jnp.asarray([1, 0, write.DROPPED, 1, 2, write.DROPPED], jnp.int32)
    offsets = jnp.asarray([0, 63, 5, 1, 17, 2], jnp.int32)
    raw = jnp.asarray(rng.standard_normal((T, 576)) * 10.0 ** rng.integers(-3, 3, (T, 1)), jnp.bfloat16)
    raw = raw.at[2].set(jnp.nan)
    weight = jnp.asarray(rng.standard_normal(512), jnp.bfloat16)
    angles = rng.uniform(0, 6, (T, 32)).astype(np.float32)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    pool = jnp.asarray(rng.standard_normal((3, 64, 576)), jnp.bfloat16)
    kernel = jax.jit(functools.partial(write_new_latents, epsilon=1e-6, interpret=interpret_params()))
    got = np.asarray(kernel(pool, raw, weight, cos, sin, targets, offsets), np.float32)
    rows = cache_rows(raw, weight, cos, sin, epsilon=1e-6, value_width=512)
    expected = np.asarray(write.write_rows(pool, rows, targets, offsets), np.float32)
    written = expected != np.asarray(pool, np.float32)
    np.testing.assert_array_equal(got[~written], expected[~written])
    # The order of the sum differs, and so may the last bit of the norm, which is rounded twice.
    np.testing.assert_allclose(got[written], expected[written], rtol=2**-7)


def test_other_pools_are_refused():
    with pytest.raises(ValueError, match=r"uint8 \(3, 64, 656\)"):
        write_new_latents(jnp.zeros((3, 64, 656), jnp.uint8), *[None] * 6, epsilon=1e-6)


@pytest.mark.aot
def test_it_writes_in_place_without_spills():
    pages, batch = 4096, 128

    def array(shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    angles, places = array((batch, 32), jnp.float32), array((batch,), jnp.int32)
    arguments = (array((pages, 64, 576)), array((batch, 576)), array((512,)), angles, angles, places, places)
    run = functools.partial(write_new_latents, epsilon=1e-6)
    compiled, (kernel,) = aot.compile_with_resources(run, *arguments, donate_argnums=0)
    assert kernel.name == "mla_write_fused" and kernel.registers <= 168
    assert kernel.spill_bytes == kernel.stack_bytes == 0
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 2 * pages * 64 * 576
    assert memory.temp_size_in_bytes < 1 << 20
