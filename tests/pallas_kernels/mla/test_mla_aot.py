"""The kernels compiled for sm_90a at production shapes, with no GPU: no spills, no copies of the page pool."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import aot
from pallas_kernels.backend import Backend
from pallas_kernels.mla import (
    decode_schedule,
    mla_decode,
    mla_prefill,
    mla_prefill_context,
    mla_prefill_spans,
    mla_prefill_topk,
    write_pages,
)
from pallas_kernels.multiprocessors import Multiprocessors, taking
from tests.pallas_kernels.main_loops import assert_no_longer
from tools.sass import kernels as main_loop_kernels

pytestmark = pytest.mark.aot

SCALE = 0.1352338
BATCH, TABLE, LAYERS = 128, 512, 4  # 32,768 tokens per request
PAGES_PER_LAYER = BATCH * TABLE
POOL_SHAPE = (LAYERS * PAGES_PER_LAYER, 64, 576)
LAUNCH_REGISTERS = 168  # 65,536 over 384 threads, before `setmaxnreg`

i32, bf16 = jnp.int32, jnp.bfloat16
decode = functools.partial(mla_decode, scale=SCALE, backend=Backend.MOSAIC)


def array(shape, dtype=bf16):
    return jax.ShapeDtypeStruct(shape, dtype)


def assert_clean(kernels, *names):
    assert [kernel.name for kernel in kernels] == sorted(names)
    for kernel in kernels:
        assert kernel.spill_bytes == kernel.stack_bytes == 0, kernel
        assert kernel.registers <= LAUNCH_REGISTERS, kernel


def test_decode():
    """And its main loop; several queries and other widths are compiled below."""
    H = 128
    kernels = aot.kernel_resources(
        functools.partial(decode, pages_per_layer=PAGES_PER_LAYER),
        array((BATCH, 1, H, 576)),
        array(POOL_SHAPE),
        array((BATCH, TABLE), i32),
        array((BATCH,), i32),
        layer=array((), i32),
    )
    assert_clean(kernels, "mla_decode", "mla_combine")
    assert_no_longer(main_loop_kernels.decode(H), kernels, instructions=1661, cycles=(5456, 4786))


def test_decode_from_fp8_pages_copies_nothing():
    """Takes 16 heads, and its main loops; those with 128 are compiled in `dsa/test_dsa_aot.py`."""
    pool = array((PAGES_PER_LAYER, 64, 656), jnp.uint8)
    run = functools.partial(decode, pages_per_layer=PAGES_PER_LAYER)
    arguments = (array((BATCH, 2, 16, 576)), pool, array((BATCH, TABLE), i32), array((BATCH,), i32))
    compiled, kernels = aot.compile_with_resources(run, *arguments)
    assert_clean(kernels, "mla_decode", "mla_combine")
    assert compiled.memory_analysis().temp_size_in_bytes < 128 << 20
    assert_no_longer(main_loop_kernels.decode(16, fp8=True), kernels, instructions=2556, cycles=(5832, 5781))


def test_decode_from_latents_of_256():
    """Takes float16: its kernels are those of bfloat16 but for the type in their products."""
    kernels = aot.kernel_resources(
        functools.partial(decode, pages_per_layer=PAGES_PER_LAYER, value_width=256),
        array((BATCH, 1, 32, 320), jnp.float16),
        array((PAGES_PER_LAYER, 64, 320), jnp.float16),
        array((BATCH, TABLE), i32),
        array((BATCH,), i32),
    )
    assert_clean(kernels, "mla_decode", "mla_combine")


@pytest.mark.parametrize(("H", "key", "value", "reserved"), [(20, 256, 256, 0), (32, 128, 128, 0), (128, 192, 128, 24)])
def test_prefill_of_other_families_and_beside_transfers(H, key, value, reserved):
    run = functools.partial(mla_prefill, scale=SCALE, backend=Backend.MOSAIC)
    shapes = [(4096, H, key), (4096, H, key), (4096, H, value)]
    with taking(Multiprocessors(132, reserved)):
        kernels = aot.kernel_resources(run, *map(array, shapes), array((9,), i32))
    assert_clean(kernels, "mla_prefill")


def test_prefill_with_a_shared_key():
    """Spans of keys, and top-k keys."""
    T, H, K = 4096, 128, 12288

    def attend(q, keys, values, rope, bits, spans):
        ranges, how = (spans[0], spans[1]), {"scale": SCALE, "shared_key": rope, "backend": Backend.MOSAIC}
        return (
            mla_prefill_topk(q, keys, values, bits, *ranges, **how),
            mla_prefill_spans(q, keys, values, *ranges, **how),
        )

    shapes = [(T, H, 192), (K, H, 128), (K, H, 128), (K, 64)]
    kernels = aot.kernel_resources(attend, *map(array, shapes), array((K // 32, T), i32), array((2, T), i32))
    assert_clean(kernels, "mla_prefill", "mla_prefill_topk")
    assert_no_longer(main_loop_kernels.prefill_topk(), kernels, instructions=722, cycles=(3378, 3370))
    assert_no_longer(main_loop_kernels.prefill_spans(), kernels, instructions=573, cycles=(2852, 2802))


def test_context_is_decode_of_single_queries():
    """Its kernels are lowered for a GPU, and compiled in `test_decode`: rows of the page table differ, no code."""
    attend = functools.partial(
        mla_prefill_context, scale=SCALE, pages_per_layer=PAGES_PER_LAYER, backend=Backend.MOSAIC
    )
    T, H, G = 4096, 128, 8
    shapes = [array((T, H, 576)), array(POOL_SHAPE), array((G, TABLE), i32), array((G,), i32), array((G + 1,), i32)]
    text = aot.lower_for(attend, *shapes, layer=array((), i32)).as_text()
    assert text.count("mosaic_gpu_v2") == 2


def layers_step(pages, q, latents, page_ids, offsets, table, lengths):
    """Every layer writes its new token and attends, as a decode step's scan does."""
    schedule = decode_schedule(lengths, queries=1, heads=q.shape[2])

    def layer_step(carry, layer):
        pages, q = carry
        pages = write_pages(
            pages,
            latents,
            page_ids,
            offsets,
            layer=layer,
            pages_per_layer=pages.shape[0] // LAYERS,
            backend=Backend.MOSAIC,
        )
        out, _ = decode(
            q, pages, table, lengths, layer=layer, pages_per_layer=pages.shape[0] // LAYERS, schedule=schedule
        )
        return (pages, q.at[..., :512].add(out)), None

    (pages, q), _ = lax.scan(layer_step, (pages, q), jnp.arange(LAYERS, dtype=i32))
    return pages, q


def test_eight_gpus_scan_layers_over_a_pool_that_is_never_copied():
    mesh = aot.gpu_mesh({"data": 8})
    step = jax.shard_map(layers_step, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    B, per_device = 8 * 16, LAYERS * 4096
    shapes = [
        ((8 * per_device, 64, 576), bf16),
        ((B, 1, 16, 576), bf16),
        ((B, 576), bf16),
        ((B,), i32),
        ((B,), i32),
        ((B, 256), i32),
        ((B,), i32),
    ]
    arguments = [jax.ShapeDtypeStruct(s, d, sharding=NamedSharding(mesh, P("data"))) for s, d in shapes]
    compiled, kernels = aot.compile_with_resources(step, *arguments, mesh=mesh, donate_argnums=0)
    memory, pool_bytes = compiled.memory_analysis(), per_device * 64 * 576 * 2
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 8
    assert_clean(kernels, "mla_decode", "mla_combine", "mla_write")
