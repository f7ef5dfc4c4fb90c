"""Compressed entries in Triton's interpreter, as DeepSeek-V4's attention completes them: the cache after each step."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv3.config.model import FP8, INDEX_KEYS, ModelConfig
from dsv3.kv_cache.layout import pool
from dsv3.model import DecodeBatch, PrefillBatch
from dsv3.model.batch import StepRows
from dsv3.model.layers.attention import LayerPlace, Projected
from dsv3.model.layers.compressed_paged import paged_attend_compressed
from dsv3.model.layers.indexer import IndexTokens
from dsv3.model.params import CompressedAttentionParams, CompressorParams, PooledIndexerParams
from pallas_kernels import backend, gpus
from pallas_kernels.backend import Backend, set_fallbacks
from pallas_kernels.dsa.keys import keys_of_pages
from pallas_kernels.entries import Given, PoolSizes, StepTokens, complete_entries, decode_rows, write_rings
from pallas_kernels.triton.resources import kernel_resources
from tests.dsv3.model.deepseek_v4 import model

TABLE, PAGES, WINDOW_PAGES, SLOTS = 2, 5, 4, 3
D, KEY, RATIOS = 128, 64, (0, 4, 8, 4, 8)
PLACES = (LayerPlace(0, 0), LayerPlace(3, 3, 4, 1), LayerPlace(4, 4, 8, 1))
CASES = [(PLACES[1], "bfloat16"), *((place, FP8) for place in PLACES)]
PAGE_TABLE = np.array([[3, 1], [4, 0], [2, 0]], np.int32)
WINDOW_TABLE = np.array([[2, 0], [3, -1], [-1, 1]], np.int32)
ROWS = 49
LENGTHS = (270, 39, 260)
"""Tokens after the prefill. The first entry of a page begins in the last rows of the page before: the last request has
no window page there, as where a step's earlier micro-batch has filled the page.
"""


def small() -> ModelConfig:
    cfg = model("deepseek_v4")[1]
    assert cfg.compressed is not None
    indexer = dataclasses.replace(cfg.compressed.indexer, head_dim=KEY, topk=16)
    compressed = dataclasses.replace(cfg.compressed, ratios=RATIOS, window=8, indexer=indexer)
    widths = {"kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": D}
    return dataclasses.replace(cfg, **widths, num_hidden_layers=len(RATIOS), compressed=compressed)


def drawn(rng: np.random.Generator, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape), dtype)


def parameters(cfg: ModelConfig) -> CompressedAttentionParams:
    rng, heads = np.random.default_rng(0), cfg.num_attention_heads

    def compressor(ratio: int, series: int, width: int) -> CompressorParams:
        position, norm = drawn(rng, 2, ratio, series * width), drawn(rng, 2, width, dtype=jnp.bfloat16)
        return CompressorParams(None, position, norm)

    indexer = PooledIndexerParams(None, None, compressor(4, 2, KEY))
    return CompressedAttentionParams(
        *[None] * 4, drawn(rng, len(RATIOS), heads), None, None, compressor(4, 2, D), indexer, compressor(8, 1, D)
    )


def given_tokens(cfg: ModelConfig, T: int, ratio: int, seed: int) -> Projected:
    rng = np.random.default_rng(seed)
    q, latent = (drawn(rng, T, *shape, dtype=jnp.bfloat16) for shape in ((cfg.num_attention_heads, D), (D,)))
    if not ratio:
        return Projected(q, latent)
    index = None
    if ratio == 4:
        heads = 2
        keys = drawn(rng, T, 4 * KEY)
        index = IndexTokens(drawn(rng, T, heads, KEY, dtype=jnp.bfloat16), keys, drawn(rng, T, heads))
    return Projected(q, latent, index, drawn(rng, T, (4 if ratio == 4 else 2) * D))


@pytest.fixture
def only_entries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels complete entries and write rings; everything else is the reference."""
    monkeypatch.setattr(backend, "_on_cpu", lambda: (Backend.TRITON, "a test says so"))
    set_fallbacks({"attend_compressed": Backend.REFERENCE, "topk_indices": Backend.REFERENCE})
    yield
    set_fallbacks({})


def batches() -> list[PrefillBatch | DecodeBatch]:
    """A chunk of each request with padding, whole windows and parts of them; then two steps with drafts."""
    tables = {"window_table": jnp.asarray(WINDOW_TABLE), "slots": jnp.asarray([2, 0, 1], jnp.int32)}
    found: list[PrefillBatch | DecodeBatch] = []
    contexts = np.array([244, 0, 254], np.int32)
    for chunks in ((14, 6, 4), (12, 33, 2)):
        padding = np.full(ROWS - sum(chunks), 9)
        positions = np.concatenate([*(c + np.arange(n) for c, n in zip(contexts, chunks, strict=True)), padding])
        cu = jnp.asarray(np.cumsum([0, *chunks]), jnp.int32)
        flat = jnp.asarray(positions, jnp.int32)
        arrays = flat, flat, cu, jnp.asarray(contexts), jnp.asarray(PAGE_TABLE)
        found.append(PrefillBatch(*arrays, **tables))
        contexts = contexts + np.array(chunks, np.int32)
    assert tuple(contexts) == LENGTHS
    for ahead in (3, 5):
        lengths = jnp.asarray([LENGTHS[0] + ahead, LENGTHS[1] + ahead if ahead == 3 else 0, 0], jnp.int32)
        found.append(DecodeBatch(jnp.zeros((3, 3), jnp.int32), lengths, jnp.asarray(PAGE_TABLE), **tables))
    return found


def steps(cfg: ModelConfig, params: Any, place: LayerPlace, on: Backend | None) -> Any:
    """Returns what a step writes, compiled once per kind of batch: XLA leaves out its attention."""

    def step(batch: PrefillBatch | DecodeBatch, tokens: Projected, pages: Any) -> Any:
        return paged_attend_compressed(cfg, batch, StepRows.of(batch), on)(tokens, params, place, pages)[1]

    return jax.jit(step)


@pytest.mark.parametrize(("place", "cache_dtype"), CASES, ids=lambda case: str(getattr(case, "ratio", case)))
@pytest.mark.usefixtures("interpreted", "only_entries")
def test_the_cache_after_each_step_is_the_references(place: LayerPlace, cache_dtype: str) -> None:
    cfg = small()
    params, rng = parameters(cfg), np.random.default_rng(1)
    shapes = pool(cfg, cache_dtype, PAGES, WINDOW_PAGES, SLOTS)
    pages = {name: jnp.asarray(rng.integers(0, 99, a.shape), a.dtype) for name, a in shapes.items()}
    tested, reference = (steps(cfg, params, place, on) for on in (None, Backend.REFERENCE))
    for seed, batch in enumerate(batches()):
        tokens = given_tokens(cfg, batch.tokens.size, place.ratio, seed)
        found, pages = tested(batch, tokens, pages), reference(batch, tokens, pages)
        for name, wanted in pages.items():
            mine, wanted = floats(cfg, name, found[name]), floats(cfg, name, wanted)
            if wanted.dtype == np.float32 and shapes[name].dtype == jnp.float32:
                np.testing.assert_array_equal(mine, wanted, err_msg=name)
            else:
                error = 2**-6 if shapes[name].dtype == jnp.bfloat16 else 2**-3
                np.testing.assert_allclose(mine, wanted, rtol=error, atol=error, err_msg=name)


def floats(cfg: ModelConfig, name: str, array: jax.Array) -> np.ndarray:
    if array.dtype != jnp.uint8:
        return np.asarray(array, np.float32)
    if name == INDEX_KEYS:
        return np.asarray(_keys_of_pages(array, np.arange(len(array)), KEY, jnp.float32))
    return np.asarray(_decode_rows(array, cfg.kv_lora_rank, D, jnp.float32))


_keys_of_pages = jax.jit(keys_of_pages, static_argnums=(2, 3))
_decode_rows = jax.jit(decode_rows, static_argnums=(1, 2, 3))


@pytest.mark.aot
def test_the_kernels_fit() -> None:
    """They are compiled at the sizes of DeepSeek-V4, for both forms of the cache."""
    gpu, T, sizes = gpus.by_number(90), 64, PoolSizes(4096, 256, 64, 256)
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    f32, bf16, u8 = (functools.partial(jax.ShapeDtypeStruct, dtype=d) for d in (jnp.float32, jnp.bfloat16, jnp.uint8))
    tokens = StepTokens(*[ints((T,))] * 6, ints((T, 32)), ints((T, 32)))

    def given(ratio: int, width: int, ring: int, tails: bool) -> Given:
        channels = 2 * width if tails else width
        kept = f32((512, ratio, 2 * width)) if tails else None
        return Given(f32((T, 2 * channels)), f32((2, ratio, channels)), f32((128, ring, 2 * channels)), kept)

    heavy, sparse, key = given(128, 512, 136, False), given(4, 512, 16, True), given(4, 128, 16, True)
    how: dict[str, Any] = {"layer": 1, "sizes": sizes, "eps": 1e-6, "backend": Backend.TRITON}
    names, angles = [], f32((T, 32))
    for each, rows, is_key in ((heavy, 2, False), (sparse, 64, False), (key, 64, True)):
        width = each.position.shape[2] // (1 if each.tails is None else 2)
        for entries in (bf16((8192, rows, width)), u8((8192, rows, 132 if is_key else 584))):
            call = functools.partial(complete_entries, is_key=is_key, **how)
            kernels = kernel_resources(
                lambda e, g, n, t, c, s, call=call: call(e, g, n, tokens=t, cos=c, sin=s),
                entries, each, bf16((2, width)), tokens, angles, angles, gpu=gpu,
            )  # fmt: skip
            assert [(k.name, k.spilled_bytes) for k in kernels] == [("complete", 0)]
    for compressors in ((), (heavy,), (sparse, key)):
        call = functools.partial(write_rings, cache_layer=3, layer=1, sizes=sizes, backend=Backend.TRITON)
        kernels = kernel_resources(
            lambda w, n, g, t, call=call: call(w, n, given=g, tokens=t),
            u8((1024, 136, 584)), u8((T, 584)), compressors, tokens, gpu=gpu,
        )  # fmt: skip
        names += [(k.name, k.spilled_bytes) for k in kernels]
    assert names == [("rings_plain", 0), ("rings_heavy", 0), ("rings_sparse", 0)]
