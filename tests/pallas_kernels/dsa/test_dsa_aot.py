"""The kernels of sparse attention compiled for sm_90a at DeepSeek-V3.2's shapes: no spills, no copy of pages."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import aot, dsa, gpus
from pallas_kernels.backend import Backend
from pallas_kernels.triton.resources import kernel_resources

pytestmark = pytest.mark.aot
T, TABLE, PAGES = 64, 2560, 8 * 2560  # 64 queries on 163,840 tokens each
BEST = 2048


def array(shape: tuple[int, ...], dtype: jax.typing.DTypeLike = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def topk(q, weights, keys, table, visible):
    return dsa.topk_indices(q, weights, keys, table, visible, first_page=0, topk=BEST, backend=Backend.MOSAIC)


def topk_and_attend(q, weights, keys, table, visible, latents, queries):
    indices = topk(q, weights, keys, table, visible)
    counts = jnp.minimum(visible, BEST)
    where = dict(first_page=0, scale=0.1, value_width=512, backend=Backend.MOSAIC)
    return dsa.attend_topk(queries, latents, table, indices, counts, **where)[0]


def arguments(dtype: jax.typing.DTypeLike | None) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes for `topk`; None is FP8."""
    width, kind = dsa.key_row(128, dtype)
    q, weights = array((T, 64, 128), jnp.bfloat16), array((T, 64), jnp.float32)
    return q, weights, array((PAGES, 64, width), kind), array((T, TABLE)), array((T,))


FP8 = (*arguments(None), array((PAGES, 64, 656), jnp.uint8), array((T, 128, 576), jnp.bfloat16))


def test_sparse_attention_on_fp8_pages_is_its_kernels() -> None:
    """Scores, selection, copy and attention are one kernel each; temporaries are the scores and the copied rows."""
    compiled, kernels = aot.compile_with_resources(topk_and_attend, *FP8)
    assert [kernel.name for kernel in kernels] == ["dsa_scores", "mla_combine", "mla_decode"]
    assert all(kernel.spill_bytes == kernel.stack_bytes == 0 for kernel in kernels), kernels
    text = compiled.as_text()
    calls = [line for line in text.splitlines() if " custom-call(" in line]
    assert sum("triton_kernel_call" in line for line in calls) == 2
    assert "sort(" not in text and "DeviceRadixSort" not in text and " topk(" not in text and 'TopK"' not in text
    scores, copied = 4 * T * 64 * TABLE, T * BEST * 656
    partial = 2 * 132 * 64 * 513 * 4 * 2
    assert compiled.memory_analysis().temp_size_in_bytes < scores + copied + partial + (32 << 20)


def test_scores_on_keys_of_16_bits() -> None:
    kernels = aot.kernel_resources(topk, *arguments(jnp.bfloat16))
    assert [kernel.name for kernel in kernels] == ["dsa_scores"]
    assert all(kernel.spill_bytes == kernel.stack_bytes == 0 for kernel in kernels), kernels


def test_selection_and_copies_do_not_spill() -> None:
    gpu = gpus.by_number(90)
    kernels = kernel_resources(topk_and_attend, *FP8, gpu=gpu)
    assert [kernel.name for kernel in kernels] == ["select", "copy_rows"]
    for kernel in kernels:
        assert kernel.spilled_bytes == 0, kernel
        assert kernel.shared_memory <= gpu.shared_memory
