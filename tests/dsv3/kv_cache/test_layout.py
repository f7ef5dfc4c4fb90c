"""Cache sizes against the published ones, and layouts of several cache groups."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.deepseek_v3 import DEEPSEEK_V32
from dsv3.config.engine import pages_for
from dsv3.config.model import CacheGroup, ModelConfig, cache_row
from dsv3.kv_cache import layout
from pallas_kernels import dsa, mla
from tests.dsv3.engine.toy import toy_config

V3 = toy_config(num_hidden_layers=61, kv_lora_rank=512, qk_rope_head_dim=64)


@dataclasses.dataclass(frozen=True)
class Grouped(ModelConfig):
    """A model whose entries cover 4 and 16 tokens."""

    @property
    def page_size(self) -> int:
        return 32

    def cache_groups(self, cache_dtype: str) -> tuple[CacheGroup, ...]:
        return CacheGroup("fine", (0, 2), 6, cache_dtype, 4), CacheGroup("coarse", (1,), 3, "float32", 16)


@dataclasses.dataclass(frozen=True)
class Drawn(ModelConfig):
    """A model with any groups, in pages of 16 tokens."""

    groups: tuple[CacheGroup, ...] = ()

    @property
    def page_size(self) -> int:
        return 16

    def cache_groups(self, cache_dtype: str) -> tuple[CacheGroup, ...]:
        return self.groups


@st.composite
def drawn_groups(draw: st.DrawFn) -> tuple[CacheGroup, ...]:
    count = draw(st.integers(1, 3))
    names = draw(st.permutations(["a", "b", "c"]))[:count]
    row = st.tuples(st.integers(1, 3), st.sampled_from(["float32", "bfloat16", "uint8"]), st.sampled_from([1, 4, 16]))
    layers = st.integers(1, 3).map(lambda n: tuple(range(n)))
    return tuple(CacheGroup(name, draw(layers), *draw(row)) for name in names)


GROUPED = Grouped(**dataclasses.asdict(toy_config()))


def test_deepseek_v3_takes_70_kb_a_token():
    assert layout.token_bytes(V3, "bfloat16") == 70_272
    assert layout.page_bytes(V3, "bfloat16") == 64 * 70_272


def test_mtp_modules_have_cache_layers():
    assert layout.token_bytes(toy_config(num_nextn_predict_layers=1), "float32") == 2 * 2 * 4


def test_a_budget_holds_whole_pages():
    page = layout.page_bytes(V3, "bfloat16")
    assert [layout.pages_within(V3, "bfloat16", n) for n in (-5, 0, page - 1, page, 10 * page + 7)] == [
        0,
        0,
        0,
        1,
        10,
    ]


def test_pages_for_tokens():
    assert [pages_for(n, 64) for n in (0, 1, 64, 65)] == [0, 1, 1, 2]


def test_the_groups_of_sparse_attention_are_latents_and_then_index_keys():
    latents, keys = DEEPSEEK_V32.cache_groups("fp8")
    assert (latents.name, len(latents.layers), latents.width) == ("latents", DEEPSEEK_V32.num_cache_layers, 656)
    assert (keys.name, keys.layers, keys.width) == ("index_keys", DEEPSEEK_V32.index_layers, 132)
    assert layout.row_bytes(DEEPSEEK_V32, "bfloat16", "index_keys") == 256
    assert layout.row_bytes(V3, "bfloat16", "index_keys") == 0


@pytest.mark.parametrize("values", [1, 127, 128, 129, 512])
@pytest.mark.parametrize("cache_dtype", ["float32", "bfloat16", "fp8"])
def test_rows_have_the_width_of_the_kernels(values: int, cache_dtype: str):
    fp8 = cache_dtype == "fp8"
    width, dtype = cache_row(cache_dtype, values, 64)
    assert width == (mla.fp8_row_bytes(values, 64) if fp8 else values + 64)
    assert jnp.dtype(dtype) == (mla.FP8_PAGES_DTYPE if fp8 else cache_dtype)
    width, dtype = cache_row(cache_dtype, values)
    assert (width, jnp.dtype(dtype)) == dsa.key_row(values, None if fp8 else jnp.dtype(cache_dtype))


def test_entries_of_several_tokens_give_fewer_rows_per_page():
    shapes = layout.pool(GROUPED, "bfloat16", 5)
    assert shapes["fine"].shape == (10, 8, 6) and shapes["coarse"].shape == (5, 2, 3)
    assert layout.page_bytes(GROUPED, "bfloat16") == 2 * 8 * 6 * 2 + 2 * 3 * 4 == 216
    assert layout.token_bytes(GROUPED, "bfloat16") == 7, "a share of 6.75 bytes, rounded up"
    assert layout.payload_shape(GROUPED, "bfloat16").shape == (216,)


def test_a_page_size_that_splits_an_entry_is_refused():
    class SplitEntries(Grouped):
        page_size = 24

    with pytest.raises(ValueError, match="page_size 24: an entry of the cache group 'coarse' covers 16 tokens"):
        layout.pool(SplitEntries(**dataclasses.asdict(toy_config())), "bfloat16", 1)


def test_a_pool_that_does_not_match_the_model_is_refused():
    shapes = layout.pool(GROUPED, "bfloat16", 5)
    assert layout.pages_per_layer(GROUPED, shapes) == 5
    with pytest.raises(ValueError, match="a dict of an array per cache group of the model: coarse, fine"):
        layout.pages_per_layer(GROUPED, {"fine": shapes["fine"]})
    with pytest.raises(ValueError, match=r"as many pages, got \[5, 6\]"):
        layout.pages_per_layer(GROUPED, shapes | {"coarse": layout.pool(GROUPED, "bfloat16", 6)["coarse"]})


@settings(max_examples=10, deadline=None)
@given(drawn_groups(), st.permutations(range(4)), st.data())
def test_payloads_hold_the_groups_in_order_and_round_trip(
    groups: tuple[CacheGroup, ...], order: list[int], data: st.DataObject
) -> None:
    cfg = Drawn(**dataclasses.asdict(toy_config()), groups=groups)
    rng, shapes = np.random.default_rng(data.draw(st.integers(0, 9))), layout.pool(cfg, "any", 4)
    assert sum(s.size * s.dtype.itemsize for s in shapes.values()) == 4 * layout.page_bytes(cfg, "any")
    pool = {n: rng.integers(0, 200, s.shape).astype(s.dtype) for n, s in shapes.items()}
    pages = np.array([*order[: data.draw(st.integers(1, 4))], -1], np.int32)
    # Jitted: each operation of its own would be compiled for each of the drawn shapes.
    gather, scatter = (jax.jit(functools.partial(f, groups)) for f in (layout.gather_pages, layout.scatter_pages))
    payloads, one = np.asarray(gather(pool, pages)), layout.payload_shape(cfg, "any")
    assert payloads.shape == (len(pages), *one.shape) and payloads.dtype == one.dtype
    assert not payloads[-1].any(), "zeros for -1"
    for page, payload in zip(pages[:-1], payloads, strict=False):
        stored = [pool[group.name][page::4].tobytes() for group in groups]
        assert payload.tobytes() == b"".join(stored)
    filled, _ = scatter({name: np.zeros_like(array) for name, array in pool.items()}, pages, payloads)
    for name, array in pool.items():
        kept = np.isin(np.arange(len(array)) % 4, pages)[:, None, None]
        np.testing.assert_array_equal(np.asarray(filled[name]), np.where(kept, array, np.zeros_like(array)))
