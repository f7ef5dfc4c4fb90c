"""The Triton kernels compiled for every GPU of the table, and the jax programs that start them."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import aot, gpus
from pallas_kernels.backend import Backend
from pallas_kernels.fp8 import fp8_gemm
from pallas_kernels.mla import mla_decode, write_pages
from pallas_kernels.triton.resources import kernel_resources

pytestmark = pytest.mark.aot
TRITON = Backend.TRITON
E4M3 = jnp.float8_e4m3fn


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


DECODE = (
    functools.partial(mla_decode, scale=0.1, pages_per_layer=64, backend=TRITON),
    (array(8, 1, 16, 576), array(128, 64, 576), array(8, 32, dtype=jnp.int32), array(8, dtype=jnp.int32)),
)
PRODUCT = (
    functools.partial(fp8_gemm, backend=TRITON),
    (array(64, 512, dtype=E4M3), array(4, 64, dtype=jnp.float32), array(256, 512, dtype=E4M3),
     array(2, 4, dtype=jnp.float32)),
)  # fmt: skip


@pytest.mark.parametrize("gpu", gpus.KINDS, ids=lambda gpu: gpu.architecture)
def test_kernels_fit_every_gpu(gpu):
    """Compiles a product for each, and decode attention for those of least and of most shared memory."""
    (product,) = kernel_resources(PRODUCT[0], *PRODUCT[1], gpu=gpu)
    decode = kernel_resources(DECODE[0], *DECODE[1], gpu=gpu) if gpu.number in (86, 100) else ()
    for kernel in (product, *decode):
        assert kernel.spilled_bytes == 0
        assert kernel.shared_memory <= gpu.shared_memory
        assert f".target {gpu.architecture}" in kernel.ptx
    # Tensor cores get e4m3, or float16.
    assert bool(re.search(r"mma\S*(e4m3|f8)", product.ptx)) is gpu.fp8, set(re.findall(r"\S*mma\S+", product.ptx))


@pytest.mark.parametrize("number", [80, 120])
def test_jax_programs_hold_the_kernels(number):
    """Compiles them with XLA for a GPU: neither weights nor pages are copied, only bitcast.

    Code for sm_80 also runs on the H200 of this topology; that for sm_120 does not.
    """
    capability = gpus.by_number(number).capability if number > 90 else (9, 0)
    mesh = aot.gpu_mesh({"device": 1}, target=dataclasses.replace(aot.H200, compute_capability=capability))
    pages = array(128, 64, 576)

    def program(x, x_scale, w, w_scale, pages, rows, ids, offsets):
        y = fp8_gemm(x, x_scale, w, w_scale, layer=ids[0], backend=TRITON)
        return y, write_pages(pages, rows, ids, offsets, layer=1, pages_per_layer=64, backend=TRITON)

    arguments = (
        array(16, 256, dtype=E4M3), array(2, 16, dtype=jnp.float32), array(4, 512, 256, dtype=E4M3),
        array(4, 4, 2, dtype=jnp.float32), pages, array(16, 576), array(16, dtype=jnp.int32),
        array(16, dtype=jnp.int32),
    )  # fmt: skip
    with gpus.compiling_for(gpus.by_number(number)):
        compiled = aot.compile_for(program, *arguments, mesh=mesh, donate_argnums=(4,))
    text = compiled.as_text()
    assert text.count("triton_kernel_call") >= 2
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 128 * 64 * 576 * 2  # the pool is written in place
    assert memory.temp_size_in_bytes < 4 * 512 * 256  # a copy of the weights would be as large


def test_the_error_without_a_gpu_says_how_to_name_one():
    with pytest.raises(gpus.UnknownGpuError, match="compiling_for"):
        jax.eval_shape(*DECODE[:1], *DECODE[1])
