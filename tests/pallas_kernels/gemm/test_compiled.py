"""The kernels compiled for an H200 without one: resources, weights in place, a program of eight GPUs.

`python -m benchmarks.gpu.fp8_gemm --compile` gates every shape of `shapes.py`; this file has one of each kind.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import aot, bodies
from pallas_kernels.align import align_groups
from pallas_kernels.backend import Backend
from pallas_kernels.dense import head_gemm, layer_gemm
from pallas_kernels.fp8 import fp8_gemm, quantize_1x128, swiglu_quantize
from pallas_kernels.gemm import dispatch
from pallas_kernels.grouped import fp8_grouped_gemm_contiguous, grouped_gemm_contiguous
from tests.pallas_kernels.main_loops import assert_no_longer
from tools.sass import kernels as main_loop_kernels

pytestmark = pytest.mark.aot
MOSAIC = Backend.MOSAIC
E4M3, BF16, F32, I32 = jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32, jnp.int32


def spec(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


def scaled_x(*shape):
    """Specs of activations [..., M, K] and their scales."""
    *lead, m, k = shape
    return spec(E4M3, *shape), spec(F32, *lead, -(-k // 128), m)


def scaled_w(*shape):
    """Specs of weights [..., N, K] and their scales."""
    *lead, n, k = shape
    return spec(E4M3, *shape), spec(F32, *lead, -(-n // 128), -(-k // 128))


def assert_in_registers(fn, *args):
    resources = aot.kernel_resources(fn, *args)
    assert len(resources) == 1
    assert_no_spills(resources)
    return resources


def assert_no_spills(resources):
    for kernel in resources:
        # At launch; 168 for all three warpgroups, which set_max_registers makes 232, 232 and 40. The limit of a
        # kernel of one warpgroup is the architecture's 255.
        assert kernel.registers <= (168 if "x1" in kernel.name else 255), kernel
        assert kernel.spill_bytes == 0, kernel


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 576, 7168), (64, 24576, 1536), (128, 7168, 16384), (4096, 2112, 7168), (64, 2048, 10944), (4096, 2048, 10944)],
)
def test_dense(m, n, k):
    assert_in_registers(lambda *args: fp8_gemm(*args, backend=MOSAIC), *scaled_x(m, k), *scaled_w(n, k))


@pytest.mark.parametrize("m", [16, 4096])
def test_plain_stack(m):
    args = spec(BF16, m, 7168), spec(BF16, 4, 2112, 7168), spec(I32)
    assert_in_registers(lambda x, w, layer: layer_gemm(x, w, layer, backend=MOSAIC), *args)


def test_float16():
    """The narrow, the wide and the head kernel."""
    F16, layer = jnp.float16, spec(I32)
    for m in (16, 4096):
        assert_in_registers(
            lambda x, w, i: layer_gemm(x, w, i, backend=MOSAIC), spec(F16, m, 7168), spec(F16, 4, 2112, 7168), layer
        )
    heads = spec(F16, 64, 16, 512), spec(F16, 4, 16, 128, 512), layer
    assert_in_registers(lambda x, w, i: head_gemm(x, w, i, backend=MOSAIC), *heads)


@pytest.mark.parametrize("m", [1, 64, 130, 16384])
def test_plain_stack_with_a_float32_result(m):
    """DeepSeek-V3's router."""
    args = spec(BF16, m, 7168), spec(BF16, 4, 256, 7168), spec(I32)
    assert_in_registers(lambda x, w, layer: layer_gemm(x, w, layer, out_dtype=F32, backend=MOSAIC), *args)


@pytest.mark.parametrize(
    ("m", "n", "k"), [(7, 2112, 7168), (33, 24576, 1536), (48, 2112, 7168), (130, 24576, 1536), (130, 2112, 7168)]
)
def test_rows_that_fill_no_tile(m, n, k):
    """TMA rejects an array of more than one tile that is not whole tiles, but only when lowered for a GPU."""

    def product(x, w, w_scale):
        values, scale = quantize_1x128(x, backend=MOSAIC)
        return fp8_gemm(values, scale, w, w_scale, backend=MOSAIC)

    lowered = aot.lower_for(product, spec(BF16, m, k), *scaled_w(n, k))
    assert lowered.out_info.shape == (m, n)


def test_dense_tall():
    """Clusters share the activations; those of the wide plan above share the weights."""
    args = (*scaled_x(4096, 7168), *scaled_w(4, 4096, 7168), spec(I32))
    compiled = assert_in_registers(lambda *args: dispatch.dense(*args, jnp.bfloat16), *args)
    assert_no_longer(main_loop_kernels.dense(4096, 4096, 7168), compiled, instructions=224, cycles=(1024, 1024))


@pytest.mark.parametrize("tile_m", [32, 128])
def test_contiguous(tile_m):
    tiles, offset = spec(I32, 8192 // tile_m), spec(I32)
    compiled = assert_in_registers(
        lambda x, xs, w, ws, t, o: fp8_grouped_gemm_contiguous(
            x, xs, w, ws, t, tile_m=tile_m, group_offset=o, backend=MOSAIC
        ),
        *scaled_x(8192, 7168), *scaled_w(8, 4096, 7168), tiles, offset,
    )  # fmt: skip
    if tile_m == 128:  # the loop of a dense product is the same
        kernel = main_loop_kernels.contiguous(2, 4096, 4096, 7168)
        assert_no_longer(kernel, compiled, instructions=174, cycles=(768, 768))
    assert_in_registers(
        lambda x, w, t, o: grouped_gemm_contiguous(x, w, t, tile_m=tile_m, group_offset=o, backend=MOSAIC),
        spec(BF16, 8192, 2048), spec(BF16, 8, 7168, 2048), tiles, offset,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("m", "heads", "transposed"),
    [(16, 128, True), (64, 16, False), (128, 128, False), (1024, 128, False), (1024, 128, True)],
)
def test_heads(m, heads, transposed):
    """The up-projections of the latents: queries to latents, transposed with carried columns, and latents to values."""
    args = spec(BF16, m, heads, 192 if transposed else 512), spec(BF16, 4, heads, 128, 512), spec(I32)
    how = dict(transposed=transposed, carried=64 if transposed else 0, backend=MOSAIC)
    assert_in_registers(lambda x, w, layer: head_gemm(x, w, layer, **how), *args)


@pytest.mark.parametrize("m", [1, 1024])
def test_widths_that_are_no_multiple_of_64(m):
    """Those of the bundled model: latents and experts of 96, rows of 160."""
    layer, experts = spec(I32), spec(I32, 8)
    assert_in_registers(
        lambda x, w, i: layer_gemm(x, w, i, backend=MOSAIC), spec(BF16, m, 96), spec(BF16, 5, 160, 96), layer
    )
    carried = spec(BF16, m, 4, 64), spec(BF16, 5, 4, 32, 128), layer
    assert_in_registers(lambda x, w, i: head_gemm(x, w, i, transposed=True, carried=32, backend=MOSAIC), *carried)
    tile_m = 8 if m == 1 else 128
    assert_in_registers(
        lambda x, w, t: grouped_gemm_contiguous(x, w, t, tile_m=tile_m, group_offset=0, backend=MOSAIC),
        spec(BF16, 8 * tile_m, 96), spec(BF16, 24, 192, 96), experts,
    )  # fmt: skip


def test_quantization():
    assert_in_registers(lambda x: quantize_1x128(x, backend=MOSAIC), spec(BF16, 4096, 7168))
    assert_in_registers(lambda x: swiglu_quantize(x, ue8m0=True, backend=MOSAIC), spec(BF16, 4096, 4096))


@pytest.mark.parametrize("width", [96, 2112, 10944])
def test_rows_are_quantized_that_are_no_multiple_of_a_block(width):
    """TMA needs whole tiles; 10,944 are the channels of DeepSeek-V2-Lite's dense layer."""
    assert_in_registers(lambda x: quantize_1x128(x, backend=MOSAIC), spec(BF16, 64, width))
    assert_in_registers(lambda x: swiglu_quantize(x, backend=MOSAIC), spec(BF16, 64, 2 * width))


LAYERS, EXPERTS, D, INNER = 5, 4, 2048, 512


def layers_in_place(x, dense, experts, ids, plain):
    """A scan over layers whose products address the stacks."""
    aligned = align_groups(ids, EXPERTS, 8, backend=MOSAIC)

    def layer(x, i):
        q, scale = quantize_1x128(x, backend=MOSAIC)
        x = fp8_gemm(q, scale, *dense, layer=i, backend=MOSAIC)
        q, scale = quantize_1x128(x.at[aligned.source_row].get(mode="fill", fill_value=0), backend=MOSAIC)
        place = {"tile_m": 8, "group_offset": i * EXPERTS, "backend": MOSAIC}
        y = fp8_grouped_gemm_contiguous(q, scale, *experts, aligned.tile_group, **place)
        y = y.at[aligned.aligned_row].get(mode="fill", fill_value=0)
        return layer_gemm(x + y, plain, i, backend=MOSAIC), None

    return lax.scan(layer, x, jnp.arange(LAYERS))[0]


def layers_sliced(x, dense, experts, ids, plain):
    """The same with the dense weight sliced by the scan."""

    def layer(x, i):
        q, scale = quantize_1x128(x, backend=MOSAIC)
        b, b_scale = (lax.dynamic_index_in_dim(v, i, 0, keepdims=False) for v in dense)
        return fp8_gemm(q, scale, b, b_scale, backend=MOSAIC), None

    del experts, ids, plain
    return lax.scan(layer, x, jnp.arange(LAYERS))[0]


def weights_written(compiled_text):
    """Instructions whose result has the shape of a weight, except aliases."""
    weights = rf"(?:f8e4m3fn|bf16)\[(?:\d+,)?(?:{D},{D})\]"
    found = re.findall(rf"= {weights}\S* ([\w-]+)\(", compiled_text)
    return [op for op in found if op not in ("parameter", "get-tuple-element", "bitcast")]


@pytest.mark.parametrize(("layers", "copies"), [(layers_in_place, False), (layers_sliced, True)])
def test_a_scan_over_layers_copies_no_weight(layers, copies):
    x, ids = spec(BF16, 16, D), spec(I32, 16)
    stacks = scaled_w(LAYERS, D, D), scaled_w(LAYERS * EXPERTS, D, D)
    with bodies.left_out():
        lowered = aot.lower_for(layers, x, *stacks, ids, spec(BF16, LAYERS, D, D))
    compiled = aot.compile_to_read(lowered)
    assert bool(weights_written(compiled.as_text())) == copies
    if not copies:  # nor in any other shape: all temporaries together are smaller than one weight
        assert compiled.memory_analysis().temp_size_in_bytes < D * D


def test_experts_on_eight_gpus():
    """Rows that arrive from eight peers, sorted by expert into aligned tiles, as a decode step has them."""
    mesh, rows, local = aot.gpu_mesh({"expert": 8}), 32, 8

    @jax.shard_map(mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=False)
    def experts(x, ids, up, up_scale, down, down_scale):
        x, ids = (lax.all_to_all(v, "expert", 0, 0, tiled=True) for v in (x, ids))
        aligned = align_groups(ids, local, 32, backend=MOSAIC)
        q, scale = quantize_1x128(x.at[aligned.source_row].get(mode="fill", fill_value=0), backend=MOSAIC)
        place = {"tile_m": aligned.tile_m, "backend": MOSAIC}
        gate_up = fp8_grouped_gemm_contiguous(q, scale, up, up_scale, aligned.tile_group, **place)
        q, scale = swiglu_quantize(gate_up, used_rows=aligned.needed, backend=MOSAIC)
        y = fp8_grouped_gemm_contiguous(q, scale, down, down_scale, aligned.tile_group, **place)
        return lax.all_to_all(y.at[aligned.aligned_row].get(mode="fill", fill_value=0), "expert", 0, 0, tiled=True)

    def sharded(*specs):
        return [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=NamedSharding(mesh, P("expert"))) for s in specs]

    weights = (*scaled_w(8 * local, 2 * INNER, D), *scaled_w(8 * local, D, INNER))
    args = sharded(spec(BF16, 64 * rows, D), spec(I32, 64 * rows), *weights)
    compiled, kernels = aot.compile_with_resources(experts, *args, mesh=mesh)
    assert len(kernels) == 4
    assert_no_spills(kernels)
    text = compiled.as_text()
    assert "all-to-all" in text and text.count("mosaic_gpu") >= 4
