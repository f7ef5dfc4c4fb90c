"""DeepSeek-V4 computes what transformers' class computes, and each rule that other implementations had wrong counts."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv3.config.hugging_face import from_hf
from dsv3.config.model import ModelConfig
from dsv3.model import decoder, forward
from dsv3.model.inspection import inspect
from dsv3.model.layers import compressed_attention, compressed_uncached, experts, hyper_connections, linear, router
from dsv3.model.layers.hyper_connections import MixedStreams, Streams
from dsv3.model.layers.rope import Rotation
from dsv3.model.params import Params, abstract, declare
from pallas_kernels import heads, rows
from pallas_kernels.compressed import sink_attention
from pallas_kernels.mixing import doubly_stochastic
from tests.dsv3.checkpoint.deepseek_v4_tensors import stored_tensors
from tests.dsv3.deepseek_v4 import FLASH, FLASH_0731, PRO
from tests.dsv3.model.deepseek_v4 import MEMBERS, model
from tests.dsv3.model.golden import data, relative_error, run

Patch = Callable[[Any, str, Any], None]
Wrong = Callable[[Params, ModelConfig, Patch], tuple[Params, ModelConfig]]


@pytest.mark.parametrize("member", MEMBERS)
def test_logits_and_32_greedy_continuations(member: str) -> None:
    golden = data(member)
    lengths = (golden["prompts"] >= 0).sum(1).tolist()
    tokens = np.zeros((33, golden["input_ids"].shape[1]), np.int32)
    tokens[0] = golden["input_ids"][0]
    for row, prompt, more, n in zip(tokens[1:], golden["prompts"], golden["greedy"], lengths, strict=True):
        row[:n], row[n : n + len(more)] = prompt[:n], more
    logits = np.asarray(run(*model(member), tokens).logits)
    assert relative_error(logits[:1], golden["logits"]) < 1e-5
    for row, more, n in zip(logits[1:], golden["greedy"], lengths, strict=True):
        assert row[n - 1 : n - 1 + len(more)].argmax(-1).tolist() == more.tolist()


def test_the_golden_data_reach_every_rule() -> None:
    """Prompts are several windows long, and longer than what an indexer chooses all of."""
    for member in MEMBERS:
        attention, length = model(member)[1].compressed, data(member)["input_ids"].shape[1]
        assert set(attention.ratios) == {0, 4, max(attention.ratios)} and length >= 2 * max(attention.ratios)
        assert length > 4 * attention.window and length // 4 > 2 * attention.indexer.topk


@pytest.mark.parametrize("published", [FLASH, PRO], ids=["Flash", "Pro"])
def test_declared_parameters_are_all_that_a_checkpoint_holds(published: dict[str, Any]) -> None:
    cfg = from_hf(published)
    stored = [t for t in stored_tensors(cfg) if not t.name.endswith(".scale")]
    values = sum(math.prod(t.shape) * (2 if t.dtype == np.int8 else 1) for t in stored)
    assert sum(math.prod(spec.shape) for spec in jax.tree.leaves(declare(cfg))) == values


def test_the_golden_parameters_are_those_declared() -> None:
    params, cfg = model("deepseek_v4_plain")
    shapes = jax.tree.map(lambda a: (a.shape, a.dtype), params)
    assert shapes == jax.tree.map(lambda a: (a.shape, a.dtype), abstract(cfg, jnp.float32))


def test_like_layers_are_run_by_one_loop() -> None:
    def runs(cfg: ModelConfig) -> list[Any]:
        return [(run.first, tuple(kind for (kind,) in run.kinds), run.turns) for run in decoder.patterns(cfg, 0, 43)]

    found = runs(from_hf(FLASH))
    assert found == [
        (0, ((0, True, None),), 2),
        (2, ((4, True, None),), 1),
        (3, ((128, False, None), (4, False, None)), 20),
    ]
    found = runs(from_hf(FLASH_0731))
    assert found[2:] == [
        (3, ((128, False, None), (4, False, None)), 18),
        (39, ((128, False, None),), 1),
        *((layer, ((ratio, False, layer),), 1) for layer, ratio in ((40, 4), (41, 128), (42, 4))),
    ]
    for published in (FLASH, PRO):
        cfg = from_hf(published)
        passes = decoder.patterns(cfg, 0, cfg.num_hidden_layers)
        kinds = [kind for run in passes for (kind,) in run.kinds * run.turns]
        assert [ratio for ratio, *_ in kinds] == list(cfg.compressed.ratios)
        assert sum(hashed for _, hashed, _ in kinds) == 3


@pytest.mark.parametrize("offsets", [(-1, 0), (0, 1)])
def test_overlapped_passes_have_the_layers_of_their_neighbors(offsets: tuple[int, int]) -> None:
    """The first pass of prefill, which finishes no layer, has the first one twice."""
    for cfg in (from_hf(FLASH), from_hf(FLASH_0731), from_hf(PRO)):
        depth, stack = cfg.num_hidden_layers, decoder.Stack(None, 0)
        alone, pairs = (
            [places for run in runs for turn in range(run.turns) for places in run.places(stack, turn)]
            for runs in (decoder.patterns(cfg, 0, depth), decoder.patterns(cfg, 0, depth, offsets))
        )
        layers = [place for (place,) in alone]
        assert [place.layer for place in layers] == list(range(depth))
        numbers = range(depth - max(offsets))
        assert pairs == [tuple(layers[max(n + offset, 0)] for offset in offsets) for n in numbers]
        assert max(run.turns for run in decoder.patterns(cfg, 0, depth, offsets)) >= 17


def test_what_goes_between_streams_is_doubly_stochastic() -> None:
    hyper = hyper_connections.hyper_of(model("deepseek_v4")[1])
    logits = np.random.default_rng(0).normal(size=(100, 4, 4)).astype(np.float32)
    found = np.asarray(jax.jit(doubly_stochastic, static_argnums=1)(logits, hyper.sinkhorn_iterations, hyper.eps))
    assert np.allclose(found.sum(1), 1, atol=1e-5) and np.allclose(found.sum(2), 1, atol=1e-3)
    assert not np.allclose(found, found.swapaxes(1, 2), atol=0.1)


def test_a_token_alone_sees_what_it_sees_in_a_batch() -> None:
    """The parts of attention work on rows at any positions, each with keys of its own: decode's form."""
    cfg, rng, attend = model("deepseek_v4")[1], np.random.default_rng(0), jax.jit(sink_attention)
    q, keys = (rng.normal(size=shape).astype(np.float32) for shape in ((1, 40, 6, 32), (1, 50, 32)))
    visible, sink = rng.random((1, 40, 50)) < 0.3, rng.normal(size=6).astype(np.float32)
    visible[0, 7] = False  # such a row sees the sink alone
    whole = np.asarray(attend(q, keys, visible, sink, cfg.softmax_scale)[0])
    assert not whole[0, 7].any()
    for t in (0, 39):
        (own,) = np.nonzero(visible[0, t])
        seen = np.ones((1, 1, len(own)), bool)
        alone = np.asarray(attend(q[:, t : t + 1], keys[:, own], seen, sink, cfg.softmax_scale)[0])
        assert np.allclose(alone[0, 0], whole[0, t], atol=1e-6)


def test_tokens_out_of_range_have_the_experts_of_the_last_one() -> None:
    cfg, table = model("deepseek_v4")[1], jnp.arange(8).reshape(4, 2)
    found = router.route_by_token(cfg, jnp.zeros((4, 8)), table, jnp.array([0, 3, 4, 2**31 - 1]))
    assert found.ids.tolist() == [[0, 1], [6, 7], [6, 7], [6, 7]]
    assert np.allclose(found.weights, cfg.routed_scaling_factor / 2)


def test_layers_with_several_streams_are_not_recorded() -> None:
    with pytest.raises(ValueError, match="deepseek_v4: layers with several residual streams are not recorded"):
        inspect(*model("deepseek_v4"), [1, 2, 3])


def attention_of(**changes: Any) -> Wrong:
    def wrong(params: Params, cfg: ModelConfig, patch: Patch) -> tuple[Params, ModelConfig]:
        return params, dataclasses.replace(cfg, compressed=dataclasses.replace(cfg.compressed, **changes))

    return wrong


def streams_of(**changes: Any) -> Wrong:
    def wrong(params: Params, cfg: ModelConfig, patch: Patch) -> tuple[Params, ModelConfig]:
        return params, dataclasses.replace(cfg, hyper_connections=dataclasses.replace(cfg.hyper_connections, **changes))

    return wrong


def patched(module: Any, name: str, other: Callable[[Any], Any]) -> Wrong:
    """Replaces a function by what `other` makes of it."""

    def wrong(params: Params, cfg: ModelConfig, patch: Patch) -> tuple[Params, ModelConfig]:
        patch(module, name, other(getattr(module, name)))
        return params, cfg

    return wrong


def without(path: str, fill: float = 0.0) -> Wrong:
    """Fills the parameters at a path."""

    def wrong(params: Params, cfg: ModelConfig, patch: Patch) -> tuple[Params, ModelConfig]:
        def changed(keys: Any, leaf: jax.Array) -> jax.Array:
            here = jax.tree_util.keystr(keys, simple=True, separator=".")
            return jnp.full_like(leaf, fill) if here.endswith(path) else leaf

        return jax.tree_util.tree_map_with_path(changed, params), cfg

    return wrong


def temperature(params: Params, cfg: ModelConfig, patch: Patch) -> tuple[Params, ModelConfig]:
    return attention_of(yarn=dataclasses.replace(cfg.compressed.yarn, mscale=1.0))(params, cfg, patch)


def one_rotation(params: Params, cfg: ModelConfig, patch: Patch) -> tuple[Params, ModelConfig]:
    return params, dataclasses.replace(cfg, rope_theta=cfg.compressed.rope_theta, yarn=cfg.compressed.yarn)


def halves(params: Params, cfg: ModelConfig, patch: Patch) -> tuple[Params, ModelConfig]:
    def turned(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        at = (slice(None), *(None,) * (x.ndim - 2))
        first, second = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([first * cos[at] - second * sin[at], second * cos[at] + first * sin[at]], -1)

    patch(rows, "rotate", turned)
    plain = lambda x, cos, sin, backend=None: rows._rotate_heads(x, cos, sin)  # noqa: E731
    for module in (compressed_attention, heads):
        patch(module, "rotate_heads", plain)
    return params, cfg


def turned_at(places: Callable[[jax.Array], jax.Array]) -> Wrong:
    """Rotates entries as if they stood elsewhere."""
    return patched(compressed_uncached, "entry_rotation", lambda right: lambda cfg, at: right(cfg, places(at)))


def mixed(change: Callable[[MixedStreams], MixedStreams]) -> Wrong:
    def other(right: Any) -> Any:
        return lambda *args: change(right(*args))

    return patched(Streams, "at", other)


def of_index(change: Callable[[Any, Any], Any]) -> Wrong:
    """Changes the queries of the indexer, `change(index, rotation)`."""

    def other(right: Any) -> Any:
        return lambda *args: change(right(*args), args[5])

    return patched(compressed_attention, "_index_queries", other)


def back(x: jax.Array, by: Rotation) -> jax.Array:
    return rows.rotate_heads(x, by.cos, -by.sin)


def swapped(right: Any) -> Any:
    """Gives the first series to a token's own window."""

    def other(given: jax.Array, exists: jax.Array, width: int) -> jax.Array:
        swap = lambda a: jnp.roll(a, width, axis=-1) if a.shape[-1] > width else a  # noqa: E731
        return right(jnp.concatenate([*map(swap, jnp.split(given, 2, axis=-1))], axis=-1), exists, width)

    return other


def limits(gate: float, up: float, low: float = -jnp.inf) -> Callable[[Any], Any]:
    def clamp_gate_up(gate_up: jax.Array, numerics: Any) -> jax.Array:
        g, u = jnp.split(gate_up, 2, axis=-1)
        return jnp.concatenate([jnp.clip(g, low, gate), jnp.clip(u, -up, up)], axis=-1)

    return lambda right: clamp_gate_up


def unlike(weights: Callable[[jax.Array], jax.Array]) -> Callable[[Any], Any]:
    return lambda right: lambda *args: right(*args)._replace(weights=weights(right(*args).weights))


WRONG: dict[str, Wrong] = {
    "YaRN with a temperature": temperature,
    "the compressed rotation in window-only layers": one_rotation,
    "the main theta in layers with entries": attention_of(rope_theta=10000.0),
    "no YaRN": attention_of(yarn=None),
    "pairs of halves": halves,
    "entries that are not rotated": turned_at(lambda at: at * 0),
    "entries rotated by their number": turned_at(lambda at: jnp.arange(len(at), dtype=jnp.int32)),
    "entries rotated by a later token": turned_at(lambda at: at + 3),
    "an output that is not turned back": patched(
        compressed_attention,
        "output",
        lambda right: lambda h, p, layer, by, n: right(h, p, layer, Rotation(by.cos, 0 * by.sin), n),
    ),
    "entries before they are complete": patched(
        compressed_uncached, "num_complete", lambda right: lambda ratio, queries: (queries + ratio) // ratio
    ),
    "entries one token late": patched(
        compressed_uncached, "num_complete", lambda right: lambda ratio, queries: queries // ratio
    ),
    "a first entry with rows that do not exist": patched(
        compressed_uncached, "pool_window", lambda right: lambda rows, exists, width: right(rows, exists | True, width)
    ),
    "series that change places": patched(compressed_uncached, "pool_window", swapped),
    "no position in a window": without("position"),
    "a window of one token less": attention_of(window=7),
    "a window of one token more": attention_of(window=9),
    "no sink": without("sink", -1e9),
    "queries without their norm": patched(
        compressed_attention,
        "unit_rotated_heads",
        lambda right: lambda x, cos, sin, eps, backend: rows.rotate_heads(x, cos, sin),
    ),
    "all entries seen": attention_of(indexer=dataclasses.replace(model("deepseek_v4")[1].compressed.indexer, topk=999)),
    "an indexer that does not rotate": of_index(lambda i, by: dataclasses.replace(i, q=back(i.q, by))),
    "an indexer without weights of heads": of_index(lambda i, by: dataclasses.replace(i, weights=i.weights * 0 + 1)),
    "C transposed": mixed(lambda m: dataclasses.replace(m, between=m.between.swapaxes(1, 2))),
    "post without its factor": mixed(lambda m: dataclasses.replace(m, post=m.post / 2)),
    "one step of Sinkhorn": streams_of(sinkhorn_iterations=1),
    "streams that are averaged": mixed(lambda m: dataclasses.replace(m, between=m.between * 0 + 0.25)),
    "a head of the plain mean": without("head_mixing.weight"),
    "hash layers with even weights": patched(decoder, "route_by_token", unlike(lambda w: w * 0 + 0.75)),
    "weights that are not scaled": patched(decoder, "route", unlike(lambda w: w / 1.5)),
    "experts without their bias": without("router_bias"),
    "scores without their root": patched(router, "_SCORES", lambda right: right | {"sqrtsoftplus": jax.nn.softplus}),
    "a shared expert without limits": patched(linear, "clamp_gate_up", limits(jnp.inf, jnp.inf)),
    "a shared expert's gate with a lower limit": patched(linear, "clamp_gate_up", limits(1.5, 1.5, -0.5)),
    "routed experts without limits": patched(experts, "clamp_gate_up", limits(jnp.inf, jnp.inf)),
    "routed experts' gates with a lower limit": patched(experts, "clamp_gate_up", limits(1.5, 1.5, -0.5)),
    "groups of every other head": patched(
        compressed_attention,
        "output",
        lambda right: lambda h, *rest: right(h.reshape(len(h), 2, 3, -1).swapaxes(1, 2).reshape(h.shape), *rest),
    ),
}


@pytest.mark.usefixtures("parts_compiled")
@pytest.mark.parametrize("rule", WRONG)
def test_a_wrong_rule_changes_the_logits(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params, cfg = WRONG[rule](*model("deepseek_v4_plain"), monkeypatch.setattr)
    golden = data("deepseek_v4_plain")
    out = forward(params, cfg, jnp.asarray(golden["input_ids"]))  # not jitted: operations are compiled once for all
    assert relative_error(out.logits, golden["logits"]) > 0.01, relative_error(out.logits, golden["logits"])
