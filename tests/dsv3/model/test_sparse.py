"""Sparse attention in the served steps agrees with the training pass, and with dense attention in short texts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv3.config.model import FP8, ModelConfig
from dsv3.kv_cache.layout import Pool, pool, token_bytes
from dsv3.model import PAGE_SIZE, AttentionForm, DecodeBatch, PrefillBatch, decode, logits, prefill
from dsv3.model.params import AttentionParams, Params, abstract
from dsv3.model.steps import predict
from pallas_kernels import dsa
from pallas_kernels.dsa import attend
from tests.dsv3.model import needle, test_steps
from tests.dsv3.model.golden import data, model, relative_error, run, with_module
from tests.dsv3.model.test_families import batch
from tests.dsv3.model.test_steps import POOL, Cache, close

FAMILIES = ("deepseek_v32", "glm_moe_dsa")


class SparseCache(Cache):
    """Drives the steps of a model with sparse attention, whose pool has index keys too; `form` is the batches'."""

    def __init__(self, family: str, tables: list[list[int]], cache_dtype: str = "float32", form=AttentionForm.ANY):
        super().__init__(family, tables)
        self.form = form
        shapes = pool(self.cfg, cache_dtype, POOL)
        self.pages = jax.tree.map(
            lambda s: jnp.full(s.shape, 0xFF if s.dtype == jnp.uint8 else jnp.nan, s.dtype), shapes
        )

    def _step(self, which: int, batch, live: int) -> np.ndarray:
        return super()._step(which, dataclasses.replace(batch, form=self.form), live)


def expected(family: str) -> tuple[np.ndarray, np.ndarray]:
    """A text of 64 tokens, a prompt and its continuation, and the training pass's logits."""
    tokens = batch(family)
    row = int((tokens > 0).sum(axis=1).argmax())
    return tokens[row], np.asarray(run(*model(family), tokens).logits[row])


@pytest.mark.parametrize(("family", "form"), [("deepseek_v32", AttentionForm.TOPK), ("glm_moe_dsa", AttentionForm.ANY)])
def test_chunks_and_decode_equal_the_full_pass(family: str, form: AttentionForm) -> None:
    """The form is static (top-k in short texts too) or decided by the device."""
    tokens, wanted = expected(family)
    cache = SparseCache(family, [[3, 9], [5, 1]], form=form)
    both = cache.prefill([(0, tokens[:20]), (1, tokens[:10])])
    close(both[0], wanted[:20])
    close(both[1], wanted[:10])
    close(cache.prefill([(1, tokens[10:11]), (0, tokens[20:50])])[1], wanted[20:50])
    for i in range(50, 54, 2):  # two tokens at once, as with a draft
        both = cache.decode({0: tokens[i : i + 2], 1: tokens[i - 39 : i - 37]})
        close(both[0], wanted[i : i + 2])
        close(both[1], wanted[i - 39 : i - 37])


def test_layers_without_an_indexer_write_no_keys() -> None:
    tokens, _ = expected("glm_moe_dsa")
    cache = SparseCache("glm_moe_dsa", [[4]])
    assert cache.cfg.index_layers == (0, 2)
    assert cache.pages["index_keys"].shape[0] == 2 * POOL and cache.pages["latents"].shape[0] == 3 * POOL
    cache.prefill([(0, tokens[:30])])
    written = np.isfinite(np.asarray(cache.pages["index_keys"])).all(axis=-1).reshape(2, POOL, PAGE_SIZE)
    assert (written.sum(axis=(1, 2)) == 30).all() and written[:, 4, :30].all()


def without_indexer(params: Params, cfg: ModelConfig) -> tuple[Params, ModelConfig]:
    """The same model, dense: DeepSeek-V3."""

    def stripped(node):
        return dataclasses.replace(node, indexer=None)

    is_attention = lambda node: isinstance(node, AttentionParams)  # noqa: E731
    return jax.tree.map(lambda n: stripped(n) if is_attention(n) else n, params, is_leaf=is_attention), (
        dataclasses.replace(cfg, indexer=None)
    )


def short_texts(params: Params, cfg: ModelConfig) -> list[np.ndarray]:
    """Hidden states of 60 tokens: of two chunks of 29, the second with context, and of two tokens in decode."""
    pages = jax.tree.map(lambda s: jnp.full(s.shape, jnp.nan, s.dtype), pool(cfg, "float32", 3))
    tokens, table = np.random.default_rng(1).integers(0, cfg.vocab_size, 60).astype(np.int32), jnp.array([[2, 0]])
    run_prefill, run_decode, _ = test_steps.programs(cfg)
    params, found = jax.tree.map(jnp.asarray, params), []
    for start in (0, 29):
        positions, ends = np.arange(start, start + 29, dtype=np.int32), np.array([0, 29], np.int32)
        context = np.array([start], np.int32)
        batch = PrefillBatch(tokens[positions], positions, ends, context, table)
        out = run_prefill(params, batch, pages)
        pages = out.pages
        found.append(np.asarray(out.hidden))
    batch = DecodeBatch(tokens[None, 58:], np.array([60], np.int32), table)
    return [*found, np.asarray(run_decode(params, batch, pages).hidden)]


def test_up_to_topk_tokens_attention_has_the_bits_of_dense_attention() -> None:
    """The device finds that all 60 tokens are within top-k. One layer, since each does the same.

    The test below covers the static form.
    """
    cfg, rng = needle.config(interleaved=True, topk=60), np.random.default_rng(0)
    params = jax.tree.map(lambda s: rng.normal(0, 0.3, s.shape).astype(s.dtype), abstract(cfg, jnp.float32))
    dense = short_texts(*without_indexer(params, cfg))
    for each, wanted in zip(short_texts(params, cfg), dense, strict=True):
        np.testing.assert_array_equal(each, wanted)
    assert all(np.isfinite(each).all() for each in dense)


def test_a_page_table_of_at_most_topk_tokens_compiles_the_dense_program() -> None:
    few, enough = needle.config(interleaved=True, topk=127), needle.config(interleaved=True, topk=128)
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)

    def traced(step, cfg: ModelConfig, given) -> str:
        arguments = abstract(cfg, jnp.float32), given, pool(cfg, "float32", 3)
        return str(jax.make_jaxpr(lambda p, b, g: step(p, cfg, b, g).hidden)(*arguments))

    chunk = PrefillBatch(ints((29,)), ints((29,)), ints((2,)), ints((1,)), ints((1, 2)))
    for step, given in ((prefill, chunk), (decode, DecodeBatch(ints((1, 1)), ints((1,)), ints((1, 2))))):
        none, all_ = (dataclasses.replace(given, form=AttentionForm[name]) for name in ("ABSORBED", "TOPK"))
        alike = {traced(step, enough, given), traced(step, enough, all_), traced(step, few, none)}
        assert len(alike) == 1 and traced(step, few, given) not in alike


def test_fp8_pages_follow_the_training_pass() -> None:
    """Rounded scores select a few other tokens; wrong scores or keys would select mostly others."""
    golden = data("deepseek_v32")
    tokens, wanted, dense = (golden[name][0] for name in ("input_ids", "logits", "dense"))
    cache = SparseCache("deepseek_v32", [[3, 1]], FP8, AttentionForm.TOPK)
    assert cache.pages["index_keys"].dtype == cache.pages["latents"].dtype == jnp.uint8
    got = [cache.prefill([(0, tokens[:30])])[0], cache.prefill([(0, tokens[30:44])])[0]]
    got = np.concatenate([*got, *(cache.decode({0: tokens[i : i + 1]})[0] for i in range(44, len(tokens)))])
    assert np.isfinite(got).all()
    error, without = (np.abs(each - wanted)[17:].mean() for each in (got, dense))
    assert 0 < error < without / 3


def test_the_cache_counts_132_bytes_per_token_and_layer() -> None:
    _, cfg = model("glm_moe_dsa")
    wide = dataclasses.replace(cfg, indexer=dataclasses.replace(cfg.indexer, head_dim=128))
    plain = dataclasses.replace(cfg, indexer=None)
    assert token_bytes(wide, FP8) - token_bytes(plain, FP8) == 2 * 132
    assert token_bytes(wide, "bfloat16") - token_bytes(plain, "bfloat16") == 2 * 256


def test_dense_pages_are_rejected() -> None:
    params, cfg = model("deepseek_v32")
    batch = DecodeBatch(jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32), jnp.zeros((1, 1), jnp.int32))
    with pytest.raises(ValueError, match="a dict of an array per cache group of the model: index_keys, latents"):
        decode(params, cfg, batch, {"latents": jnp.zeros((2 * cfg.num_cache_layers, PAGE_SIZE, cfg.latent_dim))})


def test_the_golden_texts_need_topk() -> None:
    """They are long enough: dense attention gives other logits."""
    for family in FAMILIES:
        golden = data(family)
        assert relative_error(golden["dense"][0, :16], golden["logits"][0, :16]) < 1e-6
        assert relative_error(golden["dense"][0, 16:], golden["logits"][0, 16:]) > 0.01


def answer(cfg: ModelConfig, params: Params) -> int:
    """The model's answer to the needle's prompt: four chunks of prefill, then the question in decode."""
    tokens, rows = needle.prompt(), (needle.LENGTH - 1) // 4
    table = jnp.arange(-(-needle.LENGTH // PAGE_SIZE), dtype=jnp.int32)[None]
    pages = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), pool(cfg, "float32", table.shape[1]))
    params, programs = jax.tree.map(jnp.asarray, params), test_steps.programs(cfg)
    form = AttentionForm.TOPK  # in every step: a program without the dense path compiles faster
    for start in range(0, needle.LENGTH - 1, rows):
        positions = jnp.arange(start, start + rows, dtype=jnp.int32)
        ends, context = jnp.array([0, rows], jnp.int32), jnp.array([start], jnp.int32)
        chunk = PrefillBatch(jnp.asarray(tokens[start : start + rows]), positions, ends, context, table, form)
        pages = programs[0](params, chunk, pages).pages
    last = DecodeBatch(jnp.asarray(tokens[None, -1:]), jnp.array([needle.LENGTH], jnp.int32), table, form)
    return int(programs[2](params, programs[1](params, last, pages).hidden)[0, 0].argmax())


@pytest.mark.parametrize(
    ("pairs", "interleaved", "digit"),
    [(False, False, needle.NEEDLE), (True, True, needle.NEEDLE), (False, True, 3), (True, False, 4)],
    ids=["deepseek", "glm", "deepseek_as_glm", "glm_as_deepseek"],
)
def test_a_distant_needle_is_found_only_with_the_right_rotation_of_the_indexer(
    pairs: bool, interleaved: bool, digit: int
) -> None:
    assert answer(needle.config(interleaved=interleaved), needle.params(pairs=pairs)) == digit


def test_an_mtp_module_uses_its_own_indexer_and_rows_are_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of another layer would select other tokens.

    60 tokens and 20 padding rows make 12 groups of seven rows; three groups are padding only.
    """
    monkeypatch.setattr(attend, "BYTES_AT_ONCE", 7 * PAGE_SIZE * 24 * 4)
    params, cfg = with_module("deepseek_v32")
    tokens, length = expected("deepseek_v32")[0], 60
    wanted = np.asarray(run(params, cfg, tokens[None, : length + 1]).mtp_logits[0][0])
    assert cfg.index_layers == (0, 1, 2)
    pages = jax.tree.map(lambda s: jnp.full(s.shape, jnp.nan), pool(cfg, "float32", 2))
    table, positions = jnp.array([[1, 0]], jnp.int32), jnp.arange(length + 20, dtype=jnp.int32)
    ends, context = jnp.array([0, length], jnp.int32), jnp.zeros(1, jnp.int32)
    padded = np.pad(tokens[: length + 1], (0, 20))

    def both(params: Params, pages: Pool) -> jax.Array:
        batch = PrefillBatch(jnp.asarray(padded[:-1]), positions, ends, context, table, AttentionForm.TOPK)
        assert dsa.rows_at_once(pages["latents"], table, cfg.indexer.topk) == 7
        out = prefill(params, cfg, batch, pages)
        following = dataclasses.replace(batch, tokens=jnp.asarray(padded[1:]))
        module = predict(params, cfg, following, out.pages, out.hidden)
        return logits(params, cfg, module.hidden[:length])

    close(np.asarray(jax.jit(both)(params, pages)), wanted)
