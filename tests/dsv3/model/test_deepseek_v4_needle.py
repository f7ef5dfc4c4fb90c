"""A needle is found at the published ratios and angles, whole and in pages, and lost where a single rule is wrong."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv3.config.model import ModelConfig
from dsv3.kv_cache import layout
from dsv3.model import DecodeBatch, Params, PrefillBatch, decode, forward, logits, prefill
from dsv3.model.layers import compressed_attention
from dsv3.model.layers.rope import Rotation
from tests.dsv3.model.deepseek_v4_needle import ASKED, NEEDLE, Question, config, params, prompt
from tests.dsv3.model.deepseek_v4_steps import first_window_page
from tests.dsv3.model.test_deepseek_v4 import WRONG, Wrong, attention_of, patched, without

CASES: list[tuple[int, Question]] = [(0, "near"), (4, "near"), (4, "far"), (128, "near"), (128, "far")]
CHUNK = 640


@functools.cache
def model(ratio: int) -> tuple[Params, ModelConfig]:
    return params(ratio), config(ratio)


@pytest.mark.usefixtures("parts_compiled")
@pytest.mark.parametrize(("ratio", "question"), CASES)
def test_the_needle_is_found(ratio: int, question: Question) -> None:
    assert answer(*model(ratio), prompt(ratio, question)) == NEEDLE


def answer(params: Params, cfg: ModelConfig, tokens: np.ndarray) -> int:
    """The likeliest token behind the question; not jitted: operations are compiled once for all."""
    return int(forward(params, cfg, jnp.asarray(tokens[None])).logits[0, ASKED].argmax())


@pytest.mark.parametrize("ratio", [4, 128])
def test_the_needle_is_found_in_pages(ratio: int) -> None:
    """Nothing but the first page of the context knows the needle, and the window has given that page back."""
    (params, cfg), tokens = model(ratio), prompt(ratio, "far")
    pages = -(-ASKED // cfg.page_size)
    pool = {name: jnp.full(a.shape, jnp.nan) for name, a in layout.pool(cfg, "float32", pages, pages, 1).items()}
    table = jnp.arange(pages, dtype=jnp.int32)[None, ::-1]
    where: dict[str, Any] = {"page_table": table, "window_table": table, "slots": jnp.zeros(1, jnp.int32)}
    step = jax.jit(lambda p, batch, pool: prefill(p, cfg, batch, pool).pages)
    for start in range(0, ASKED, CHUNK):
        count = min(CHUNK, ASKED - start)
        rows = np.zeros(CHUNK, np.int32)
        rows[:count] = tokens[start : start + count]
        lengths = jnp.array([0, count]), jnp.array([start])
        pool = step(params, PrefillBatch(jnp.asarray(rows), start + jnp.arange(CHUNK), *lengths, **where), pool)
    where["window_table"] = table.at[0, : first_window_page(cfg, ASKED)].set(-1)
    batch = DecodeBatch(jnp.asarray(tokens[None, ASKED : ASKED + 1]), jnp.array([ASKED + 1]), **where)
    out = jax.jit(lambda p, batch, pool: decode(p, cfg, batch, pool).hidden)(params, batch, pool)
    assert int(logits(params, cfg, out[0, 0]).argmax()) == NEEDLE


def on_output(change: Any) -> Wrong:
    """Changes heads and rotation before the output projection."""

    def other(right: Any) -> Any:
        return lambda heads, params, layer, by, numerics: right(*change(heads, params, layer, by), numerics)

    return patched(compressed_attention, "output", other)


not_turned_back = on_output(lambda h, p, layer, by: (h, p, layer, Rotation(0 * by.cos + 1, 0 * by.sin)))
regrouped = on_output(lambda h, *rest: (h.reshape(len(h), 2, 2, -1).swapaxes(1, 2).reshape(h.shape), *rest))

LOST: list[tuple[str, Wrong, int, Question]] = [
    *[(rule, WRONG[rule], ratio, question) for rule, ratio, question in (
        ("the compressed rotation in window-only layers", 0, "near"),
        ("the main theta in layers with entries", 4, "near"),
        ("the main theta in layers with entries", 128, "far"),
        ("no YaRN", 4, "far"),
        ("no YaRN", 128, "far"),
        ("pairs of halves", 4, "far"),
        ("entries that are not rotated", 128, "far"),
        ("entries rotated by their number", 4, "far"),
        ("entries rotated by a later token", 128, "far"),
        ("entries before they are complete", 128, "far"),
        ("series that change places", 4, "far"),
        ("no position in a window", 4, "far"),
        ("no sink", 4, "far"),
        ("queries without their norm", 0, "near"),
        ("an indexer that does not rotate", 4, "far"),
        ("an indexer without weights of heads", 4, "far"),
        ("C transposed", 0, "near"),
        ("post without its factor", 0, "near"),
        ("streams that are averaged", 0, "near"),
    )],
    ("a head of the plain mean", without("head_mixing.base"), 0, "near"),
    ("a window of one token less", attention_of(window=127), 0, "near"),
    ("a window of one token more", attention_of(window=129), 4, "near"),
    ("an output that is not turned back", not_turned_back, 4, "far"),
    ("groups of every other head", regrouped, 128, "far"),
]  # fmt: skip


@pytest.mark.usefixtures("parts_compiled")
@pytest.mark.parametrize(("rule", "wrong", "ratio", "question"), LOST)
def test_a_wrong_rule_loses_it(
    rule: str, wrong: Wrong, ratio: int, question: Question, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert answer(*wrong(*model(ratio), monkeypatch.setattr), prompt(ratio, question)) != NEEDLE
