"""Fallbacks of operations: one by one, including inner operations, and in all callers."""

import functools
import re
import runpy
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from configs.deepseek_v4 import DEEPSEEK_V4_FLASH as V4
from dsv3.kv_cache.layout import pool
from dsv3.model import DecodeBatch
from dsv3.model.batch import StepRows
from dsv3.model.layers.attention import LayerPlace, Projected
from dsv3.model.layers.compressed_paged import paged_attend_compressed
from dsv3.model.layers.router import route
from dsv3.model.params import CompressedAttentionParams
from pallas_kernels import (
    align,
    backend,
    bodies,
    compressed,
    dense,
    dsa,
    entries,
    fp8,
    gpus,
    grouped,
    heads,
    mixing,
    mla,
    rows,
)
from pallas_kernels.align import queue_rows
from pallas_kernels.backend import OPERATIONS, Backend, fallbacks, set_fallbacks, with_fallback
from pallas_kernels.float8 import E4M3

BF16, F32, I32, U32, U8 = jnp.bfloat16, jnp.float32, jnp.int32, jnp.uint32, jnp.uint8
T, H, R, P, K, N, E = 128, 16, 512, 64, 256, 128, 4


def of(shape: tuple[int, ...], dtype=BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


Q, POOL, TABLE, COUNTS = of((T, H, R + P)), of((8, 64, R + P)), of((T, 4), I32), of((T,), I32)
PART, SHARED, VALUES, CU = of((T, H, 128)), of((T, 64)), of((T, H, 128)), of((3,), I32)
PAGED = {"scale": 1.0, "pages_per_layer": 8, "value_width": R}
INDEX = of((T, 64, 128)), of((T, 64), F32), of((8, 64, 128)), TABLE, COUNTS
FP8_ROWS, FP8_SCALES = of((T, K), E4M3), of((K // 128, T), F32)
FP8_WEIGHT, FP8_BLOCKS = of((E, N, K), E4M3), of((E, 1, K // 128), F32)
EVEN = SimpleNamespace(scoring_func="softmax", n_group=1, topk_method="greedy", num_experts_per_tok=2)
EVEN.norm_topk_prob, EVEN.routed_scaling_factor = False, 1.0
SIGMOID = SimpleNamespace(**vars(EVEN) | {"scoring_func": "sigmoid"})
TILE = {"tile_m": 16}
ROUTER = of((T, E), F32)


def entries_of_a_layer(backend: Backend | None) -> jax.Array:
    """The window after a layer of DeepSeek-V4 without entries. The kernel of attention does not take these queries."""
    counts, width = jnp.ones(1, I32), V4.latent_dim
    batch = DecodeBatch(jnp.ones((1, 1), I32), counts, counts[None], window_table=counts[None], slots=counts)
    pages = {name: jnp.zeros(a.shape, a.dtype) for name, a in pool(V4, "bfloat16", 2, 2, 2).items()}
    tokens = Projected(jnp.ones((1, 2, width), F32), jnp.ones((1, width), BF16))
    params = CompressedAttentionParams(*[None] * 4, jnp.ones((1, 2)), *[None] * 5)
    attend = paged_attend_compressed(V4, batch, StepRows.of(batch), backend)
    return attend(tokens, params, LayerPlace(0, 0), pages)[1]["window_latents"]


# Each operation: the backend that has kernels for it, its call, and its operands.
CASES: dict[str, tuple[Backend, Callable, tuple]] = {
    "mla_decode": (
        Backend.MOSAIC,
        functools.partial(mla.mla_decode, **PAGED),
        (of((T, 1, H, R + P)), POOL, TABLE, COUNTS),
    ),
    "mla_prefill": (
        Backend.MOSAIC,
        lambda q, k, v, cu, s, backend: mla.mla_prefill(q, k, v, cu, scale=1.0, shared_key=s, backend=backend),
        (of((T, H, 192)), PART, VALUES, CU, SHARED),
    ),
    "mla_prefill_context": (
        Backend.MOSAIC,
        functools.partial(mla.mla_prefill_context, **PAGED),
        (Q, POOL, of((2, 4), I32), of((2,), I32), CU),
    ),
    "mla_prefill_spans": (
        Backend.MOSAIC,
        lambda q, k, v, a, b, s, backend: mla.mla_prefill_spans(
            q, k, v, a, b, scale=1.0, shared_key=s, backend=backend
        ),
        (of((T, H, 192)), PART, VALUES, COUNTS, COUNTS, SHARED),
    ),
    "mla_prefill_topk": (
        Backend.MOSAIC,
        lambda q, k, v, bits, a, b, s, backend: mla.mla_prefill_topk(
            q, k, v, bits, a, b, scale=1.0, shared_key=s, backend=backend
        ),
        (of((T, H, 192)), PART, VALUES, of((T // 32, T), I32), COUNTS, COUNTS, SHARED),
    ),
    "write_pages": (
        Backend.MOSAIC,
        functools.partial(mla.write_pages, pages_per_layer=8, value_width=R),
        (POOL, of((T, R + P)), COUNTS, COUNTS),
    ),
    "index_scores": (Backend.MOSAIC, functools.partial(dsa.index_scores, first_page=0), INDEX),
    "topk_indices": (Backend.TRITON, functools.partial(dsa.topk_indices, first_page=0, topk=64), INDEX),
    "attend_topk": (
        Backend.TRITON,
        functools.partial(dsa.attend_topk, scale=1.0, first_page=0, value_width=R),
        (Q, POOL, TABLE, of((T, 64), I32), COUNTS),
    ),
    "attend_compressed": (
        Backend.TRITON,
        lambda q, sink, own, rows, numbers, counts, backend: compressed.attend_compressed(
            q, sink, own, compressed.RowList(rows, numbers, counts), None, scale=1.0, plain=448, backend=backend
        ),
        (of((T, H, R)), of((1, H), F32), of((T, R)), of((8, 64, R)), of((T, 128), I32), COUNTS),
    ),
    "fp8_gemm": (
        Backend.MOSAIC,
        functools.partial(fp8.fp8_gemm, layer=1),
        (FP8_ROWS, FP8_SCALES, FP8_WEIGHT, FP8_BLOCKS),
    ),
    "quantize_1x128": (Backend.MOSAIC, fp8.quantize_1x128, (of((T, K)),)),
    "swiglu_quantize": (Backend.MOSAIC, fp8.swiglu_quantize, (of((T, 2 * K)),)),
    "trained_gemm": (Backend.MOSAIC, fp8.trained_gemm, (of((T, K)), of((N, K)))),
    "layer_gemm": (Backend.MOSAIC, functools.partial(dense.layer_gemm, layer=1), (of((T, K)), of((2, N, K)))),
    "plain_gemm": (Backend.NATIVE, dense.plain_gemm, (of((8, K)), of((N, K)))),
    "head_gemm": (Backend.MOSAIC, functools.partial(dense.head_gemm, layer=1), (of((T, H, K)), of((2, H, N, K)))),
    "grouped_gemm_contiguous": (
        Backend.MOSAIC,
        functools.partial(grouped.grouped_gemm_contiguous, **TILE),
        (of((T, K)), of((E, N, K)), of((T // 16,), I32)),
    ),
    "fp8_grouped_gemm_contiguous": (
        Backend.MOSAIC,
        functools.partial(grouped.fp8_grouped_gemm_contiguous, **TILE),
        (FP8_ROWS, FP8_SCALES, FP8_WEIGHT, FP8_BLOCKS, of((T // 16,), I32)),
    ),
    "int4_grouped_gemm_contiguous": (
        Backend.MOSAIC,
        functools.partial(grouped.int4_grouped_gemm_contiguous, **TILE),
        (of((T, K)), of((E, N, K // 8), I32), of((E, K // 32, N)), of((T // 16,), I32)),
    ),
    "fp4_grouped_gemm_contiguous": (
        Backend.MOSAIC,
        functools.partial(grouped.fp4_grouped_gemm_contiguous, **TILE),
        (FP8_ROWS, FP8_SCALES, of((E, N, K // 8), U32), of((E, K // 128, N), U32), FP8_BLOCKS, of((T // 16,), I32)),
    ),
    "trained_gemm_contiguous": (
        Backend.MOSAIC,
        grouped.trained_gemm_contiguous,
        (of((T, K)), of((E, N, K)), of((T // 128,), I32)),
    ),
    "align_groups": (
        Backend.NATIVE,
        lambda ids, backend: align.align_groups(ids, E, 16, backend=backend),
        (COUNTS,),
    ),
    "queue_rows": (
        Backend.TRITON,
        lambda ids, backend: queue_rows(ids, 4, E, T, backend=backend),
        (of((T, 2), I32),),
    ),
    "choose_experts": (Backend.NATIVE, lambda logits, backend: route(EVEN, logits, None, backend), (ROUTER,)),
    "weighted_experts": (Backend.TRITON, lambda logits, backend: route(SIGMOID, logits, None, backend), (ROUTER,)),
    "rms_norm": (Backend.NATIVE, functools.partial(rows.rms_norm, layer=0, eps=1e-6), (of((T, K)), of((1, K)))),
    "swiglu": (Backend.NATIVE, rows.swiglu, (of((T, 2 * K)),)),
    "rotate_heads": (Backend.NATIVE, rows.rotate_heads, (of((T, H, K)), of((T, 32), F32), of((T, 32), F32))),
    "read_streams": (
        Backend.TRITON,
        functools.partial(mixing.read_streams, layer=0, iterations=20, eps=1e-6, norm_eps=1e-6),
        (of((T, 4, K)), of((1, 24, 4 * K), F32), of((1, 24), F32), of((1, 3), F32), of((1, K))),
    ),
    "write_streams": (
        Backend.TRITON,
        mixing.write_streams,
        (of((T, 4, K)), of((T, 4), F32), of((T, 4, 4), F32), of((T, K))),
    ),
    "unit_rotated_heads": (
        Backend.TRITON,
        functools.partial(heads.unit_rotated_heads, eps=1e-6),
        (of((T, H, K)), of((T, 32), F32), of((T, 32), F32)),
    ),
    "normed_latents": (
        Backend.TRITON,
        lambda *a, backend: heads.normed_latents(*a[:3], 0, *a[3:], 1e-6, backend=backend),
        (of((T, R + P)), of((1, P)), of((1, R)), of((T, 32), F32), of((T, 32), F32)),
    ),
    "encode_rows": (Backend.TRITON, functools.partial(entries.encode_rows, plain=448, dtype=U8), (of((T, R)),)),
    "complete_entries": (Backend.TRITON, entries_of_a_layer, ()),
    "latent_rows": (
        Backend.NATIVE,
        lambda down, w, cos, sin, backend: rows.latent_rows(down, w, 0, cos, sin, 1e-6, backend=backend),
        (of((T, R + P)), of((1, R)), of((T, 32), F32), of((T, 32), F32)),
    ),
}


@pytest.fixture(autouse=True)
def nothing_replaced() -> Iterator[None]:
    yield
    set_fallbacks({})


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[Backend], None]:
    """Gives this process's device another backend."""
    return lambda kind: monkeypatch.setattr(backend, "_on_cpu", lambda: (kind, "a test says so"))


def traced(name: str, asked: Backend | None = None) -> str:
    """The program of an operation as text, without bodies of Hopper's kernels and addresses of functions."""
    _, call, operands = CASES[name]
    with gpus.compiling_for(gpus.by_number(90)), bodies.left_out():
        text = str(jax.make_jaxpr(functools.partial(call, backend=asked))(*operands))
    return re.sub(r"0x[0-9a-f]+", "", text)


def test_every_operation_has_a_case() -> None:
    assert CASES.keys() == OPERATIONS


@pytest.mark.parametrize("name", CASES)
def test_a_fallback_includes_inner_operations(name, on) -> None:
    on(CASES[name][0])
    own = traced(name)
    set_fallbacks({name: Backend.REFERENCE})
    assert traced(name) == traced(name, Backend.REFERENCE) != own
    set_fallbacks(dict.fromkeys(OPERATIONS - {name}, Backend.REFERENCE) if name in ALONE else {})
    assert traced(name) == own


# Operations without inner operations, which no other fallback changes.
ALONE = CASES.keys() - {
    "topk_indices",
    "attend_topk",
    "plain_gemm",
    "trained_gemm",
    "trained_gemm_contiguous",
    "complete_entries",
}


@pytest.mark.parametrize(
    ("whole", "part"),
    [
        ("topk_indices", "index_scores"),
        ("attend_topk", "mla_decode"),
        ("plain_gemm", "layer_gemm"),
        ("trained_gemm", "fp8_gemm"),
        ("trained_gemm_contiguous", "quantize_1x128"),
    ],
)
def test_a_fallback_applies_in_callers_and_nowhere_else(whole, part, on) -> None:
    on(CASES[whole][0])
    own = traced(whole)
    set_fallbacks({part: Backend.REFERENCE})
    assert own != traced(whole)
    if CASES[whole][0] is not Backend.NATIVE:
        assert traced(whole) != traced(whole, Backend.REFERENCE)


@pytest.mark.parametrize("name", ["mla_decode", "fp8_gemm", "index_scores", "grouped_gemm_contiguous", "write_pages"])
def test_on_hopper_the_fallback_may_be_triton(name, on) -> None:
    on(Backend.MOSAIC)
    set_fallbacks({name: Backend.TRITON})
    assert traced(name) == traced(name, Backend.TRITON) != traced(name, Backend.MOSAIC)


def test_a_type_without_a_triton_kernel_falls_back_to_the_reference(on) -> None:
    on(Backend.MOSAIC)
    x, w = jnp.ones((2, 8), F32), jnp.ones((1, 8, 8), F32)
    set_fallbacks({"layer_gemm": Backend.TRITON})
    assert dense.layer_gemm(x, w, 0).tolist() == [[8.0] * 8] * 2


def test_a_requested_backend_wins() -> None:
    set_fallbacks({"mla_decode": Backend.REFERENCE})
    assert with_fallback("mla_decode", Backend.MOSAIC) is Backend.MOSAIC
    assert with_fallback("mla_decode", None) is Backend.REFERENCE
    assert with_fallback("fp8_gemm", None) is None
    assert fallbacks() == {"mla_decode": Backend.REFERENCE}


def test_tiles_are_those_of_the_products_backend(on) -> None:
    on(Backend.MOSAIC)
    tiles = {dtype: align.choose_tile_m(8, 8, dtype=dtype) for dtype in (E4M3, BF16, I32)}
    set_fallbacks({"fp8_grouped_gemm_contiguous": Backend.REFERENCE})
    assert align.choose_tile_m(8, 8, dtype=E4M3) == 4 != tiles[E4M3]
    set_fallbacks({"fp8_grouped_gemm_contiguous": Backend.TRITON})
    assert align.choose_tile_m(8, 8, dtype=E4M3) == 16
    assert {dtype: align.choose_tile_m(8, 8, dtype=dtype) for dtype in (BF16, I32)} == {BF16: 8, I32: 8}


def test_traced_functions_are_retraced() -> None:
    seen: list[Backend | None] = []

    @jax.jit
    def program(x):
        seen.append(with_fallback("swiglu", None))
        return x

    for table in ({}, {"swiglu": Backend.REFERENCE}, {"swiglu": Backend.REFERENCE}, {}):
        set_fallbacks(table)
        program(1)
    assert seen == [None, Backend.REFERENCE, None]


def test_an_unknown_operation_is_rejected() -> None:
    with pytest.raises(ValueError, match="fp9_gemm is not in OPERATIONS"):
        set_fallbacks({"fp9_gemm": Backend.REFERENCE})


@pytest.mark.filterwarnings("ignore:.*found in sys.modules.*:RuntimeWarning")
def test_the_command_prints_the_backend(capsys) -> None:
    runpy.run_module("pallas_kernels.backend", run_name="__main__")
    assert capsys.readouterr().out == f"{backend.resolve_backend().value}\n"
