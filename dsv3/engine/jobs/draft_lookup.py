"""Drafts from the text itself: what followed when a request's last tokens stood in it before (prompt look-up).

It needs no weights, and is right where a model repeats what it has read: code, quotations, tables. The text of each
slot is kept on the device, since the host sees a token one step late.
"""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from dsv3.engine.device import ragged
from dsv3.engine.device.devices import Devices, Forward
from dsv3.engine.device.layout import Layout
from dsv3.engine.device.programs import Key, ProgramSpec
from dsv3.engine.device.state import NO_DRAFT, DecodeState, with_drafts
from dsv3.engine.jobs import decode, prefill
from dsv3.engine.jobs.draft_command import CachedText, DraftCommand
from dsv3.scheduler.codes import NOTHING
from pallas_kernels.search import search

_ENTER = Key("lookup enter")


def programs(layout: Layout) -> Iterator[ProgramSpec]:
    """Yields one program per bucket of prefill and of decode: texts grow in steps without drafts too."""
    cfg = layout.cfg
    given = (_texts(layout), layout.array(), layout.array(cfg.max_model_len))
    yield layout.per_rank(_ENTER, enter_body, given, donated=(0,), padding={1: layout.no_slot})
    for size in cfg.prefill_buckets:
        count = cfg.prefill_rows(size)
        chunks = layout.array(size), layout.array(count, ragged.HEADER + cfg.pages_per_seq)
        arguments = (_texts(layout), layout.state, *chunks, layout.array(count), layout.array(count, 1))
        body = functools.partial(prefill_body, layout, cfg.tokens_per_row - 1)
        padding = {3: layout.no_chunk, 4: layout.no_slot}
        yield layout.per_rank(Key(f"lookup {prefill.NAME}", size), body, arguments, donated=(0, 1), padding=padding)
    for size in cfg.decode_buckets:
        S = cfg.width(size)
        rows = (_texts(layout), layout.state, layout.array(size), layout.array(size, S))
        body = functools.partial(_propose, layout, S - 1)
        key, padding = Key(f"lookup {decode.NAME}", size, width=S), {2: layout.no_slot}
        yield layout.per_rank(key, body, rows, donated=(0, 1), padding=padding)


def _texts(layout: Layout) -> jax.ShapeDtypeStruct:
    """Returns the shape of the texts, one line per slot: 4 bytes per slot and token of max_model_len."""
    return layout.array(layout.cfg.max_num_seqs, layout.cfg.max_model_len)


class Drafter:
    """Keeps the texts of all slots, and looks them up."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._texts = devices.zeros(_texts(devices.layout))

    def launch(self, command: DraftCommand, forward: Forward) -> None:
        """Starts the look-up after the forward job `command.source`; leaves drafts in the state."""
        devices = self._devices
        for turn in range(command.text_launches):
            self._enter(command.texts, turn)
        program = devices.programs.get(Key(f"lookup {command.source}", command.size, width=command.width))
        given = (*forward.batch, forward.slots, forward.tokens)
        self._texts, devices.state = program(self._texts, devices.state, *given)

    def _enter(self, texts: list[CachedText], turn: int) -> None:
        """Enters the `turn`-th text of each rank."""
        devices, cfg = self._devices, self._devices.layout.cfg
        ranks = devices.layout.num_local_ranks
        slots, tokens = np.full(ranks, cfg.max_num_seqs, np.int32), np.zeros((ranks, cfg.max_model_len), np.int32)
        for rank in range(ranks):
            mine = [text for text in texts if text.rank == rank]
            if turn < len(mine):
                slots[rank], tokens[rank, : len(mine[turn].tokens)] = mine[turn].slot, mine[turn].tokens
        self._texts = devices.programs.get(_ENTER)(self._texts, devices.put(slots), devices.put(tokens))


def enter_body(texts: jax.Array, slot: jax.Array, tokens: jax.Array) -> jax.Array:
    """Sets the text of `slot` to `tokens` `[max_model_len]`, for one rank."""
    return texts.at[slot].set(tokens, mode="drop")


def prefill_body(
    layout: Layout,
    drafts: int,
    texts: jax.Array,
    state: DecodeState,
    tokens: jax.Array,
    rows: jax.Array,
    slots: jax.Array,
    sampled: jax.Array,
) -> tuple[jax.Array, DecodeState]:
    """Enters chunks of prompts into `texts` `[Ns, max_model_len]`, for one rank; requests in `slots` `[B]` get drafts.

    `tokens` and `rows` are those of `prefill.prefill_body`, `sampled` `[B, 1]` the first tokens.
    """
    batch = ragged.ragged_batch(tokens, rows)
    index = jnp.arange(tokens.shape[0])
    chunk = jnp.minimum(search(batch.cu_lengths[1:], index, side="right"), rows.shape[0] - 1)
    owner = jnp.where(index < batch.cu_lengths[-1], rows[chunk, 0], texts.shape[0])
    texts = texts.at[owner, batch.positions].set(tokens, mode="drop")
    return _propose(layout, drafts, texts, state, slots, sampled)


def _propose(
    layout: Layout, drafts: int, texts: jax.Array, state: DecodeState, slots: jax.Array, sampled: jax.Array
) -> tuple[jax.Array, DecodeState]:
    """Appends what was `sampled` `[B, S]` to the texts of `slots` `[B]`; enters what may follow into the state."""
    speculative = layout.cfg.speculative
    assert speculative is not None  # else there is no drafter
    held = jnp.minimum(slots, texts.shape[0] - 1)
    lengths, counts = state.lengths[held], jnp.sum(sampled > NOTHING, axis=1, dtype=jnp.int32)
    column = jnp.arange(sampled.shape[1])
    places = jnp.where(column < counts[:, None], lengths[:, None] - counts[:, None] + column, texts.shape[1])
    texts = texts.at[slots[:, None], places].set(sampled, mode="drop")
    bounds = speculative.lookup_min, speculative.lookup_max
    found = jax.vmap(lambda text, length: continuation(text, length, drafts, *bounds))(texts[held], lengths)
    return texts, with_drafts(state, slots, found)


def continuation(text: jax.Array, length: jax.Array, drafts: int, low: int, high: int) -> jax.Array:
    """Returns what followed the last tokens of `text[:length]` `[H]` when they stood there before, `[drafts]` int32.

    The longest match of `low` to `high` tokens wins; of equally long ones that which most tokens follow, then the
    latest. `NO_DRAFT` stands where nothing followed, or nothing matches.
    """
    end = jnp.arange(text.shape[0])  # a match ends before this place
    matched, goes_on = jnp.zeros(text.shape, jnp.int32), jnp.ones(text.shape, jnp.bool)
    for i in range(1, high + 1):
        same = jnp.roll(text, i) == text[jnp.maximum(length - i, 0)]
        goes_on &= same & (end >= i) & (length >= i)
        matched += goes_on
    matched = jnp.where((end < length) & (matched >= low), matched, 0)
    followed = jnp.minimum(length - end, drafts)
    score = jnp.where(matched > 0, (matched * (drafts + 1) + followed) * text.shape[0] + end, -1)
    start = jnp.where(jnp.any(matched > 0), jnp.argmax(score), length)
    places = start + jnp.arange(drafts)
    return jnp.where(places < length, text[jnp.minimum(places, text.shape[0] - 1)], NO_DRAFT)
