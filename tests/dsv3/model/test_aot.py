"""FP8 steps of DeepSeek-V3's shape compile for one H200, write the page pool in place and copy no FP8 weight."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks.toolchains.cases import compiled_step
from configs.bundled import MODEL
from configs.deepseek_v3 import DEEPSEEK_V3
from dsv3.model import PAGE_SIZE, DecodeBatch, Fp8Weight, Params, PrefillBatch, declare, decode, prefill
from pallas_kernels import bodies
from pallas_kernels.aot import H200, compile_to_read, lower_for
from pallas_kernels.backend import Backend

PAGES_PER_LAYER = 64
# Layers with experts alone: dense ones, which the plans compile too, took as long again.
CFG = dataclasses.replace(DEEPSEEK_V3, first_k_dense_replace=0)
MiB = 1 << 20

ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
PREFILL = PrefillBatch(ints((1024,)), ints((1024,)), ints((9,)), ints((8,)), ints((8, 32)))
DECODE = DecodeBatch(ints((128, 1)), ints((128,)), ints((128, 8)))


def fp8_params() -> Params:
    """Shapes of DeepSeek-V3's parameters as an FP8 checkpoint has them."""

    def shape(spec) -> Any:
        if not spec.quantizable:
            return jax.ShapeDtypeStruct(spec.shape, spec.dtype_in(jnp.bfloat16, checkpoint=[jnp.bfloat16]))
        blocks = (*spec.shape[:-2], *(-(-n // 128) for n in spec.shape[-2:]))
        data = jax.ShapeDtypeStruct(spec.shape, jnp.float8_e4m3fn)
        return Fp8Weight(data, jax.ShapeDtypeStruct(blocks, jnp.float32))

    return jax.tree.map(shape, declare(CFG))


@pytest.mark.aot
@pytest.mark.parametrize("step, batch, temporaries", [(prefill, PREFILL, 600 * MiB), (decode, DECODE, 150 * MiB)])
def test_served_steps_compile_for_an_h200(step, batch, temporaries: int) -> None:
    pool = jax.ShapeDtypeStruct((62 * PAGES_PER_LAYER, PAGE_SIZE, 576), jnp.bfloat16)
    donating = jax.jit(lambda p, b, g: step(p, CFG, b, g, backend=Backend.MOSAIC), donate_argnums=2)
    # `tests/pallas_kernels` compiles the kernels; their bodies would take half of the time here.
    with bodies.left_out():
        lowered = lower_for(donating, fp8_params(), batch, {"latents": pool})
    compiled = compile_to_read(lowered)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == pool.size * 2, "the pool is updated in place"
    assert memory.temp_size_in_bytes < temporaries
    text = compiled.as_text()
    assert "mosaic_gpu" in text
    # Weights of one layer that a fusion would write out: [2112, 7168], [1, 24576, 1536], [4096, 7168] and so on.
    copied = re.findall(r"= f8e4m3fn\[(?:1,)?(?:256,)?(?:2112|24576|7168|36864|4096),\d+\][^=]*fusion\(", text)
    assert not copied


@pytest.mark.aot
def test_the_bundled_model_compiles_for_an_h200() -> None:
    """Reads kernel bodies too: the model's widths are no multiples of 128, and no other test compiles it for a GPU."""
    compiled = compiled_step(MODEL, "decode", H200)
    assert "mosaic_gpu" in compiled.as_text()
