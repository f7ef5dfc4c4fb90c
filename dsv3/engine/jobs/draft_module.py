"""Drafts by the model's own MTP module.

After each forward job the module runs over the rows that this has computed, now that the token after each of them is
known. So its own cache layer has the same tokens as the main model's. The row of a request's last token gives its first
draft. Further drafts are chained: the module takes its own hidden state and its own draft, one position further.

The module runs after a decode step without drafts too, but proposes none. Otherwise its cache would have holes when
drafts are wanted again, and few of them would be accepted until the request ends (NVIDIA/TensorRT-LLM 16888).

Nothing is ever rolled back. A cache position behind a request's length has what a rejected draft wrote; it is
overwritten before a length covers it. Drafts are in `DecodeState.tokens` behind the last token, one row per slot, so
none outlives its request's slot.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from dsv3.engine.device.devices import Devices, Forward
from dsv3.engine.device.form_selection import decode_form, decode_forms
from dsv3.engine.device.layout import Layout
from dsv3.engine.device.programs import Key, ProgramSpec
from dsv3.engine.device.sampling import best_tokens
from dsv3.engine.device.state import (
    DecodeState,
    decode_batch,
    existing,
    last_rows,
    next_tokens,
    ragged_batch,
    with_drafts,
)
from dsv3.engine.functions import DraftFunctions
from dsv3.engine.jobs import decode, prefill
from dsv3.engine.jobs.draft import DraftCommand, draft_kind, forward_program, verified_batch
from dsv3.model.batch import AttentionForm
from dsv3.model.steps import StepOutput

PREFILL, DECODE, CHAIN = f"mtp {prefill.NAME}", f"mtp {decode.NAME}", "mtp chain"
"""Kinds of programs, as `EngineConfig.forward_programs` numbers them."""


def programs(layout: Layout) -> Iterator[ProgramSpec]:
    """Yields one program per bucket of prefill and of decode, and those that chain drafts.

    Each exists twice with sparse attention on a GPU.
    """
    cfg, width, dtype = layout.cfg, layout.model_cfg.draft_input_width, _module(layout).dtype
    forms = decode_forms(layout)
    chained: dict[int, int] = {}  # drafts by rows
    for size in cfg.prefill_buckets:
        rows = cfg.prefill_rows(size)
        given = layout.array(size, width, dtype=dtype), *layout.chunks(size), layout.array(rows), layout.array(rows, 1)
        for form in forms:
            key, prefills = Key(PREFILL, size, form), functools.partial(prefill_body, form=form)
            yield forward_program(layout, key, prefills, given, {5: layout.padding_chunk, 6: layout.padding_slot})
        chained[rows] = cfg.tokens_per_row - 1
    for size in cfg.decode_buckets:
        S = cfg.width(size)
        rows_given = layout.array(size, S, width, dtype=dtype), layout.array(size), layout.array(size, S)
        for form in forms:
            key, body = Key(DECODE, size, form, S), functools.partial(decode_body, form=form)
            yield forward_program(layout, key, body, rows_given, {4: layout.padding_slot})
        chained[size] = max(chained.get(size, 0), S - 1)
    for size, drafts in chained.items():
        for i, form in itertools.product(range(1, drafts), forms):
            key, chained_body = chain_key(size, i, form), functools.partial(chain_body, number=i, form=form)
            one_each = layout.array(size, width, dtype=dtype), layout.array(size)
            yield forward_program(layout, key, chained_body, one_each, {4: layout.padding_slot})


def chain_key(size: int, number: int, form: AttentionForm) -> Key:
    """Returns the key of the program that makes the next draft from draft `number`, the last token of `size` rows."""
    return Key(CHAIN, size, form, 1 + number)


def run_module(devices: Devices, command: DraftCommand, forward: Forward) -> None:
    """Starts the module; each further draft has a program of its own.

    In one program with the first, XLA copies the page pool between them.
    """
    layout, form = devices.layout, decode_form(devices.layout, command.longest)
    program = devices.programs.get(Key(f"mtp {command.source}", command.size, form, command.width))
    given = (forward.draft_input, *forward.batch, forward.slots, forward.tokens)
    devices.pages, devices.state, following = program(devices.params, devices.pages, devices.state, *given)
    drafts = command.width - 1 if command.source == decode.NAME else layout.cfg.tokens_per_row - 1
    for i in range(1, drafts):
        form = decode_form(layout, command.longest + i)
        chain = devices.programs.get(chain_key(forward.slots.shape[1], i, form))
        arguments = (devices.params, devices.pages, devices.state, following, forward.slots)
        devices.pages, devices.state, following = chain(*arguments)


def prefill_body(
    layout: Layout,
    params: object,
    pages: jax.Array,
    state: DecodeState,
    draft_input: jax.Array,
    tokens: jax.Array,
    rows: jax.Array,
    slots: jax.Array,
    sampled: jax.Array,
    *,
    form: AttentionForm,
    program: int,
) -> tuple[jax.Array, DecodeState, jax.Array]:
    """Runs the module over chunks of prompts, for one rank; the requests in `slots` `[B]` get a first draft.

    `draft_input` `[T, n * D]`, `tokens` and `rows` are those of `prefill.prefill_body`, `sampled` `[B, 1]` the first
    tokens. Returns pages, state, and the module's own `draft_input` `[B, n * D]` at the last tokens. `form` is the
    batch's, `program` the number of its counters.
    """
    batch = ragged_batch(layout.cfg, tokens, rows, form)
    shifted = dataclasses.replace(batch, tokens=next_tokens(batch, rows, sampled[:, 0]))
    out = _module(layout).predict(params, layout.model_cfg, shifted, pages, draft_input)
    last = last_rows(batch)
    state = layout.update_counters(state, out, program)
    return out.pages, _with_draft(layout, params, state, out.hidden[last], slots, 1), _draft_input(layout, out)[last]


def decode_body(
    layout: Layout,
    params: object,
    pages: jax.Array,
    state: DecodeState,
    draft_input: jax.Array,
    slots: jax.Array,
    sampled: jax.Array,
    *,
    form: AttentionForm,
    program: int,
) -> tuple[jax.Array, DecodeState, jax.Array]:
    """Runs the module over a decode batch, for one rank; the requests in `slots` `[B]` get a first draft if S > 1.

    `draft_input` `[B, S, n * D]` belongs to the last token and the verified drafts, `sampled` `[B, S]` are the tokens
    that really follow them. Rows behind the accepted ones are undefined, and what they write is overwritten. Returns as
    `prefill_body` does.
    """
    batch, accepted = verified_batch(state, slots, sampled, form)
    out = _module(layout).predict(params, layout.model_cfg, batch, pages, draft_input)
    last = jnp.arange(slots.shape[0]), jnp.maximum(accepted - 1, 0)
    state, following = layout.update_counters(state, out, program), _draft_input(layout, out)[last]
    if sampled.shape[1] == 1:
        return out.pages, with_drafts(state, slots, jnp.zeros((slots.shape[0], 0), jnp.int32)), following
    return out.pages, _with_draft(layout, params, state, out.hidden[last], slots, 1), following


def chain_body(
    layout: Layout,
    params: object,
    pages: jax.Array,
    state: DecodeState,
    draft_input: jax.Array,
    slots: jax.Array,
    *,
    number: int,
    form: AttentionForm,
    program: int,
) -> tuple[jax.Array, DecodeState, jax.Array]:
    """Makes the next draft from draft `number` of `slots` `[B]` and the module's `draft_input` `[B, n * D]` there.

    It does so for one rank. Returns pages, state, and the module's `draft_input` one position further. `program` is the
    number of its counters.
    """
    token = state.tokens[existing(state, slots), number]
    batch = decode_batch(state, slots, token[:, None], number - 1, form)
    out = _module(layout).predict(params, layout.model_cfg, batch, pages, draft_input[:, None])
    state = layout.update_counters(state, out, program)
    state = _with_draft(layout, params, state, out.hidden[:, 0], slots, number + 1)
    return out.pages, state, _draft_input(layout, out)[:, 0]


def _draft_input(layout: Layout, result: StepOutput) -> jax.Array:
    found = layout.draft_input(result)
    assert found is not None  # the model has a module
    return found


def _with_draft(
    layout: Layout, params: object, state: DecodeState, hidden: jax.Array, slots: jax.Array, number: int
) -> DecodeState:
    """Returns the state with draft `number` of `slots`: the likeliest token by the module's hidden states `[B, D]`."""
    functions = layout.functions
    token = best_tokens(functions.vocabulary, functions.scores(params, layout.model_cfg, hidden)).tokens
    return with_drafts(state, slots, token[:, None], number)


def _module(layout: Layout) -> DraftFunctions:
    assert isinstance(layout.functions.draft, DraftFunctions)  # `build` makes it for this method
    return layout.functions.draft


KIND = draft_kind("mtp", programs, run_module)
