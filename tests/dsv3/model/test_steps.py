"""The served steps: however a sequence is cut, batched and padded, they equal the training form."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.deepseek_v3 import DEEPSEEK_V3
from dsv3.config.model import LayerGroup, ModelConfig
from dsv3.model import PAGE_SIZE, DecodeBatch, PrefillBatch, abstract, declare, decode, logits, prefill
from dsv3.model.decoder import Stack, embed, final_norm, run_layers
from dsv3.model.forward import uncached_context
from dsv3.model.layers.hyper_connections import OneStream
from tests.dsv3.model.golden import data, model, run

POOL, TABLE = 12, 4  # pages per layer, pages of a request at most
T, B = 160, 4


@functools.cache
def programs(cfg: ModelConfig) -> tuple:
    return (
        jax.jit(lambda p, b, g: prefill(p, cfg, b, g)),
        jax.jit(lambda p, b, g: decode(p, cfg, b, g)),
        jax.jit(lambda p, h: logits(p, cfg, h)),
    )


class Cache:
    """Drives the two steps for a few sequences on one pool; unwritten rows are NaN, so that reading them shows."""

    def __init__(self, member: str, tables: list[list[int]], *, slots: int = 3):
        self.params, self.cfg = model(member)
        self.pages = {"latents": jnp.full((self.cfg.num_cache_layers * POOL, PAGE_SIZE, self.cfg.latent_dim), jnp.nan)}
        self.tables = np.zeros((len(tables), TABLE), np.int32)
        for row, ids in zip(self.tables, tables, strict=True):
            row[: len(ids)] = ids
        self.lengths = np.zeros(len(tables), np.int32)
        self.slots = slots
        self.counts = 0

    def prefill(self, chunks: list[tuple[int, np.ndarray]]) -> list[np.ndarray]:
        """Logits of one chunk of tokens each for some of the sequences, in one batch padded to T rows."""
        tokens, positions, cu = np.full(T, 5, np.int32), np.zeros(T, np.int32), [0]
        context, table = np.zeros(self.slots, np.int32), np.full((self.slots, TABLE), POOL - 1, np.int32)
        for slot, (request, chunk) in enumerate(chunks):
            rows = slice(cu[-1], cu[-1] + len(chunk))
            tokens[rows] = chunk
            positions[rows] = self.lengths[request] + np.arange(len(chunk))
            context[slot], table[slot] = self.lengths[request], self.tables[request]
            cu.append(cu[-1] + len(chunk))
            self.lengths[request] += len(chunk)
        cu += [cu[-1]] * (self.slots + 1 - len(cu))
        batch = PrefillBatch(*map(jnp.asarray, (tokens, positions, np.array(cu, np.int32), context, table)))
        out = self._step(0, batch, sum(len(c) for _, c in chunks))
        return [out[cu[i] : cu[i + 1]] for i in range(len(chunks))]

    def decode(self, tokens: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
        """Logits of S further tokens for some of the sequences, in a batch of B rows with inactive ones between."""
        width = len(next(iter(tokens.values())))
        rows, lengths = np.full((B, width), 7, np.int32), np.zeros(B, np.int32)
        table = np.full((B, TABLE), POOL - 1, np.int32)
        for request, new in tokens.items():
            self.lengths[request] += width
            rows[request], lengths[request], table[request] = new, self.lengths[request], self.tables[request]
        live = sum(int((new >= 0).sum()) for new in tokens.values())
        out = self._step(1, DecodeBatch(*map(jnp.asarray, (rows, lengths, table))), live)
        return {request: out[request] for request in tokens}

    def _step(self, which: int, batch, live: int) -> np.ndarray:
        step = programs(self.cfg)
        out = step[which](self.params, batch, self.pages)
        self.pages = out.pages
        per_layer = np.asarray(out.expert_counts).sum(axis=1)
        assert (per_layer == live * self.cfg.num_experts_per_tok).all(), "padding reaches no expert"
        return np.asarray(step[2](self.params, out.hidden))

    def written(self) -> np.ndarray:
        """[cache layers, pages, rows]: which rows of the pool are written."""
        rows = np.isfinite(np.asarray(self.pages["latents"])).all(axis=-1)
        return rows.reshape(self.cfg.num_cache_layers, POOL, PAGE_SIZE)


def expected(member: str, sequence: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [S] of a golden sequence and the training form's logits [S, W]."""
    params, cfg = model(member)
    ids = data(member)["input_ids"]
    return ids[sequence], np.asarray(run(params, cfg, ids).logits[sequence])


def close(actual: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(actual, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())


# Routers with sigmoid and groups, and with softmax and none; a query latent, and none. The others mix these.
@pytest.mark.parametrize("member", ["deepseek_v3", "deepseek_v2_lite"])
def test_chunks_and_decode_equal_the_full_pass(member: str) -> None:
    tokens, wanted = expected(member, 0)
    cache = Cache(member, [[3, 9]])
    close(cache.prefill([(0, tokens[:50])])[0], wanted[:50])
    close(cache.prefill([(0, tokens[50:85])])[0], wanted[50:85])
    for i in range(85, 88):
        close(cache.decode({0: tokens[i : i + 1]})[0], wanted[i : i + 1])


@pytest.mark.parametrize("first", [1, 63, 64, 65, 95])
def test_every_page_boundary(first: int) -> None:
    tokens, wanted = expected("deepseek_v3", 1)
    cache = Cache("deepseek_v3", [[4, 2]])
    close(cache.prefill([(0, tokens[:first])])[0], wanted[:first])
    close(cache.decode({0: tokens[first : first + 1]})[0], wanted[first : first + 1])
    written = cache.written()
    decoder_layers = model("deepseek_v3")[1].num_hidden_layers
    assert (written[:decoder_layers].sum(axis=(1, 2)) == first + 1).all()
    assert not written[decoder_layers:].any(), "the decoder must leave the MTP modules' pages alone"
    assert written[0, 4].sum() == min(first + 1, PAGE_SIZE)


@pytest.mark.parametrize("sizes", [(96,), (32, 32, 32), (1, 62, 1, 1, 31), (64, 32)])
def test_any_chunking(sizes: tuple[int, ...]) -> None:
    tokens, wanted = expected("deepseek_v2_lite", 0)
    cache, start = Cache("deepseek_v2_lite", [[8, 0]]), 0
    for size in sizes:
        close(cache.prefill([(0, tokens[start : start + size])])[0], wanted[start : start + size])
        start += size


def test_requests_in_one_batch_equal_each_alone() -> None:
    (tokens_a, wanted_a), (tokens_b, wanted_b) = (expected("deepseek_v3", i) for i in range(2))
    cache = Cache("deepseek_v3", [[5, 1], [2, 7], [0, 3]])
    first = cache.prefill([(1, tokens_b[:40]), (0, tokens_a[:70])])
    close(first[0], wanted_b[:40])
    close(first[1], wanted_a[:70])
    second = cache.prefill([(0, tokens_a[70:80]), (2, tokens_a[:64]), (1, tokens_b[40:90])])
    close(second[0], wanted_a[70:80])
    close(second[1], wanted_a[:64])
    close(second[2], wanted_b[40:90])
    third = cache.decode({0: tokens_a[80:82], 2: tokens_a[64:66]})
    close(third[0], wanted_a[80:82])
    close(third[2], wanted_a[64:66])
    fourth = cache.decode({0: tokens_a[82:83], 1: tokens_b[90:91]})
    close(fourth[0], wanted_a[82:83])
    close(fourth[1], wanted_b[90:91])
    fifth = cache.decode({0: tokens_a[83:85], 1: np.array([tokens_b[91], -1])})  # -1: no draft, and no expert's work
    close(fifth[0], wanted_a[83:85])
    close(fifth[1][:1], wanted_b[91:92])
    cache.lengths[1] -= 1
    close(cache.decode({1: tokens_b[92:94]})[1], wanted_b[92:94])


def test_padding_writes_nothing() -> None:
    tokens, _ = expected("deepseek_v2_lite", 0)
    cache = Cache("deepseek_v2_lite", [[1], [2]])
    cache.prefill([(0, tokens[:10])])
    cache.decode({0: tokens[10:11]})
    used = np.zeros((POOL, PAGE_SIZE), bool)
    used[1, :11] = True
    assert (cache.written() == used).all()


def test_a_pool_that_does_not_divide_is_rejected() -> None:
    params, cfg = model("moonlight")
    batch = DecodeBatch(jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32), jnp.zeros((1, 1), jnp.int32))
    with pytest.raises(ValueError, match="7 pages"):
        decode(params, cfg, batch, {"latents": jnp.zeros((7, PAGE_SIZE, cfg.latent_dim))})


def test_the_steps_of_61_layers_take_few_arguments() -> None:
    params = abstract(DEEPSEEK_V3, jnp.bfloat16)
    assert len(jax.tree.leaves(params)) < 100
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    pages = {"latents": jax.ShapeDtypeStruct((62 * 4, PAGE_SIZE, 576), jnp.bfloat16)}
    prefill_batch = PrefillBatch(ints((64,)), ints((64,)), ints((3,)), ints((2,)), ints((2, 4)))
    decode_batch = DecodeBatch(ints((8, 1)), ints((8,)), ints((8, 4)))
    for step, batch in ((prefill, prefill_batch), (decode, decode_batch)):
        traced = jax.jit(lambda p, b, g, step=step: step(p, DEEPSEEK_V3, b, g)).trace(params, batch, pages)
        assert len(traced.jaxpr.in_avals) < 300
        assert traced.out_info.hidden.shape[-1] == 7168
        assert traced.out_info.pages["latents"].shape == pages["latents"].shape
        assert traced.out_info.expert_counts.shape == (58, 256)


class ExpertsFirst(ModelConfig):
    """A model whose last layers are the dense ones."""

    @property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        return LayerGroup("moe", 0, self.num_moe_layers), LayerGroup("dense", self.num_moe_layers, 1)


def test_groups_of_layers_run_in_the_order_of_the_config() -> None:
    params, cfg = model("deepseek_v3")
    turned = ExpertsFirst(**{field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg)})
    tokens, plain = expected("deepseek_v3", 0)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(lambda spec: spec.shape, declare(turned))
    context, x = uncached_context(turned, 1, len(tokens), None), OneStream(embed(params, tokens))
    for layers, first in ((params.moe, 0), (params.dense, turned.num_moe_layers)):
        x, _, _ = run_layers(Stack(layers, first), context, x, None)
    wanted = np.asarray(logits(params, turned, final_norm(params, turned, x, None)))
    assert np.abs(wanted - plain).max() > 0.1 * np.abs(plain).max()
    close(np.asarray(run(params, turned, tokens[None]).logits[0]), wanted)
    cache = Cache("deepseek_v3", [[3, 9]])
    cache.cfg = turned
    close(cache.prefill([(0, tokens[:50])])[0], wanted[:50])
    close(cache.decode({0: tokens[50:51]})[0], wanted[50:51])
