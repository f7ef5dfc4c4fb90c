"""A stand-in for a model whose cache has a window and state of requests, beside entries of the whole context.

A hidden state is the toy's, from the entries, and NaN where the rows of the window or of the slot are not those of the
request's last tokens: another request's, old ones, or none. Rows of the window cover `WINDOW` tokens in a ring that has
`DRAFT_ROWS` more; rows of a slot cover the last tokens of a page.
"""

import dataclasses

import jax
import jax.numpy as jnp

from dsv3.config.engine import EngineConfig
from dsv3.config.model import DRAFT_ROWS, PAGE_SIZE, CacheGroup, ModelConfig
from dsv3.engine.components import EngineComponents
from dsv3.engine.functions import StepFunctions
from dsv3.kv_cache.layout import Pool
from dsv3.model.batch import DecodeBatch, PrefillBatch, StepRows
from tests.dsv3.engine import toy

WINDOW, STATE, EACH = 20, 12, 4
"""Tokens that a query reads from the window, from its slot, and that an entry stands for."""


@dataclasses.dataclass(frozen=True)
class Windowed(ModelConfig):
    """Layers 0 and 1 have a window; layer 1 has entries and state too."""

    def cache_groups(self, cache_dtype: str) -> tuple[CacheGroup, ...]:
        return (
            CacheGroup("entries", (1,), 1, "uint32", EACH),
            CacheGroup("last", (0, 1), 2, "uint32", lifetime="window", ring=WINDOW + DRAFT_ROWS),
            CacheGroup("state", (1,), 2, "uint32", lifetime="request", ring=STATE + DRAFT_ROWS),
        )


CFG = Windowed(**dataclasses.asdict(toy.toy_config()))


def _at(rows: StepRows, i: jax.Array, pages: Pool, at: jax.Array) -> tuple[jax.Array, ...]:
    """Indices of the rows of request `i` at positions `at`, in the groups with a ring."""
    per_layer, column = pages["last"].shape[0] // 2, at // PAGE_SIZE
    page = rows.window_table[i, jnp.clip(column, 0, rows.window_table.shape[1] - 1)]
    ring = pages["last"].shape[1]
    return jnp.where(page < 0, 2 * per_layer, page), at % PAGE_SIZE % ring, rows.slots[i], at % pages["state"].shape[1]


def _earlier(pages: Pool, rows: StepRows, amount: jax.Array, back: int) -> jax.Array:
    """What the tokens `back` places before those of a step add to the sum, `[T]`: from the step, or the window."""
    at = rows.positions - back
    own = at - rows.contexts[rows.requests]
    page, row, *_ = _at(rows, rows.requests, pages, jnp.maximum(at, 0))
    cached = pages["last"].at[page, row, 0].get(mode="fill", fill_value=7)
    return jnp.where(own < 0, cached, amount.at[rows.firsts[rows.requests] + own].get(mode="clip"))


def _write(pages: Pool, rows: StepRows, tokens: jax.Array) -> Pool:
    """Writes the rows of a step's tokens `[T]`: of rings only those that its last tokens leave."""
    position = rows.positions.astype(jnp.uint32)
    amount = toy.mixed(tokens.astype(jnp.uint32), position, position)
    page = rows.page_table[rows.requests, rows.positions // PAGE_SIZE]
    place = jnp.where(rows.valid & (rows.positions % EACH == EACH - 1), page, pages["entries"].shape[0])
    whole = sum(_earlier(pages, rows, amount, back) for back in range(EACH))
    entries = pages["entries"].at[place, rows.positions % PAGE_SIZE // EACH].set(whole[:, None], mode="drop")
    page, row, slot, number = _at(rows, rows.requests, pages, rows.positions)
    ring, end = pages["last"].shape[1], rows.ends[rows.requests]
    replaced = rows.positions + ring
    lasts = rows.valid & ((replaced // PAGE_SIZE > rows.positions // PAGE_SIZE) | (replaced >= end))
    values, per_layer, found = jnp.stack([amount, position], -1), pages["last"].shape[0] // 2, pages["last"]
    for layer in (0, 1):
        where = jnp.where(lasts & (page < per_layer), page + layer * per_layer, 2 * per_layer)
        found = found.at[where, row].set(values + layer, mode="drop")
    lasts = rows.valid & (rows.positions + pages["state"].shape[1] >= end)
    state = pages["state"].at[jnp.where(lasts, slot, pages["state"].shape[0]), number].set(values, mode="drop")
    return {"entries": entries, "last": found, "state": state}


def _read(pages: Pool, rows: StepRows, i: jax.Array, length: jax.Array) -> jax.Array:
    """Hidden state `[2]` of the first `length` tokens of request `i`."""
    entries = pages["entries"][jnp.clip(rows.page_table[i], 0, pages["entries"].shape[0] - 1)].reshape(-1)
    total = jnp.sum(jnp.where(jnp.arange(len(entries)) < length // EACH, entries, 0))
    at = length - 1 - jnp.arange(WINDOW)
    page, row, slot, number = _at(rows, i, pages, jnp.maximum(at, 0))
    per_layer = pages["last"].shape[0] // 2
    last, again = (pages["last"].at[page + layer * per_layer, row].get(mode="fill", fill_value=7) for layer in (0, 1))
    fine = jnp.all((at < 0) | ((last[:, 1] == at) & (page < per_layer) & jnp.all(again == last + 1, axis=1)))
    total += jnp.sum(jnp.where(at >= length // EACH * EACH, last[:, 0], 0))
    first = at[0] + 1 - (at[0] + 1) % EACH - EACH  # of the last complete entry
    inside = (at >= first) & (at < first + EACH)
    sums = jnp.sum(jnp.where(inside, last[:, 0], 0))
    fine &= (first < 0) | (sums == entries[jnp.maximum(first, 0) // EACH])
    state = pages["state"].at[slot, number].get(mode="fill", fill_value=7)
    kept = (jnp.arange(WINDOW) < STATE) & (at >= at[0] // PAGE_SIZE * PAGE_SIZE)
    fine &= jnp.all(~kept | jnp.all(state == last, axis=1))
    return jnp.where(fine, toy.hidden_of(total), jnp.nan)


def prefill(params: jax.Array, cfg: ModelConfig, batch: PrefillBatch, pages: Pool) -> toy.ToyOutput:
    """Only the last row of a chunk has a hidden state: rings have no earlier one."""
    T, B, rows = batch.tokens.shape[0], batch.page_table.shape[0], StepRows.of(batch)
    pages = _write(pages, rows, batch.tokens)
    hidden = jax.vmap(lambda i: _read(pages, rows, i, rows.ends[i]))(jnp.arange(B))
    last = jnp.where(rows.ends > rows.contexts, batch.cu_lengths[1:] - 1, T)
    poisoned = (batch.tokens == toy.POISON)[jnp.minimum(last, T - 1)][:, None]
    hidden = jnp.where(poisoned, jnp.nan, hidden)
    return toy.ToyOutput(jnp.zeros((T, 2)).at[last].set(hidden + params, mode="drop"), pages)


def decode(params: jax.Array, cfg: ModelConfig, batch: DecodeBatch, pages: Pool) -> toy.ToyOutput:
    """Each token of a row reads what stands before it."""
    (B, S), hidden = batch.tokens.shape, []
    for i in range(S):
        lengths = jnp.where(batch.lengths > 0, batch.lengths - (S - 1 - i), 0)
        one = dataclasses.replace(batch, tokens=batch.tokens[:, i : i + 1], lengths=lengths)
        rows = StepRows.of(one)
        pages = _write(pages, rows, one.tokens[:, 0])
        hidden.append(jax.vmap(lambda b, rows=rows, pages=pages: _read(pages, rows, b, rows.ends[b]))(jnp.arange(B)))
    return toy.ToyOutput(jnp.stack(hidden, axis=1) + params, pages)


FUNCTIONS = StepFunctions(prefill, decode, toy.logits)


def parts(functions: StepFunctions = FUNCTIONS, **limits: object) -> EngineComponents:
    """The toy in an engine with these limits, and as few window pages as it can have."""
    shape: dict = {"window_size": WINDOW - 1, "num_window_pages": 10**6, **limits}
    cfg = EngineConfig(**shape)
    least = {"num_window_pages": limits.get("num_window_pages", cfg.least_window_pages)}
    return EngineComponents.on_devices(functions, toy.PARAMS, CFG, EngineConfig(**(shape | least)))
