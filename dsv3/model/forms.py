"""The table of the forms of attention: what suits a step, what room it needs, whether it pays, and how it attends.

What a program relies on, the host's choice of a program, the planner and the steps read it. Costs are estimates from
shapes and device rates, and nothing else decides which form a step takes.

Dense attention has two forms for cached tokens. The absorbed one multiplies cached latents; the expanded one makes keys
and values of them first, and then takes 0.29 of the operations per pair of tokens (DeepSeek-V3). Its program has room
for a number of tokens, and whether it pays depends on how many new tokens share the cached ones of a step.

In sparse attention a query that sees more tokens than an indexer chooses must choose; where none does, attention is
dense. A step that chooses has two forms, too. One copies the chosen rows of each query and attends to them in absorbed
form; its time does not depend on the context. The other expands the cached latents of all requests once and attends to
all of them, masked; its time grows with them. Scores and choice are the same in both. The masked form has room for the
number of tokens at which both take as long.

What counts is how many operations a GPU has per byte: an H200 206, an H100 295, an A100 153, an L40S 419. Where there
are more, copies cost more beside products, and the forms cross somewhat later.
"""

import dataclasses
import math
from collections.abc import Callable

import jax

from dsv3.config import device_rates
from dsv3.config.device_rates import MASKING, PREFILL_OVERHEAD, Peaks
from dsv3.config.model import ModelConfig, absorbed_operations, materialization_operations, materialized_operations
from dsv3.kv_cache.layout import row_bytes
from dsv3.model.batch import AttentionForm, DecodeBatch, PrefillBatch
from dsv3.model.layers.attention import (
    Attend,
    Core,
    decode_core,
    decode_places,
    prefill_core,
    prefill_places,
    writing,
)
from dsv3.model.layers.expanded import BYTES_AT_ONCE, heads_at_once, masked_form, materialized_core
from dsv3.model.layers.sparse import ChosenForm, Rows, copying_form, decode_rows, prefill_rows, sparse_attend
from pallas_kernels.backend import Backend

KEY_BLOCK = 128
"""What the room is a multiple of: whole blocks of keys of the kernels."""

LOOKING = ("cpu",)
"""Platforms whose steps look while they run. It costs them nothing, and a second program takes seconds to compile."""

_LEAST_GAIN = 2  # times the tokens that are chosen; a program with less room would seldom run
_LEAST_TOKENS = 2  # times the new tokens from which on the expanded form pays: those of a step may be several requests'
_MOST_CONTEXT = 2**18  # tokens; their latents take 302 MB
_QUERIES, _BLOCKS = 128, 128  # of a thread block of the prefill kernel; that fill the multiprocessors


@dataclasses.dataclass(frozen=True)
class FormRow:
    """A row of the table.

    `use_topk` says that queries choose; in ANY the device finds out. `decodes` says that decode steps, and those of an
    MTP module, have it too. In prefill it attends to all tokens by `core`, and to chosen ones by `chosen`.

    With a `room` there are keys and values of so many tokens at once: `room(model, peaks, cache_dtype, tokens, split)`
    gives that of a program of `tokens` queries of a micro-batch, 0 where there is none. A step whose tokens have room
    takes it where it `pays` (`context_pays`), or always.
    """

    use_topk: bool = False
    decodes: bool = False
    core: Callable[[ModelConfig, PrefillBatch, int, Backend | None], Core] = prefill_core
    chosen: Callable[[ModelConfig, PrefillBatch, Rows, int, Backend | None], ChosenForm] | None = None
    room: Callable[[ModelConfig, Peaks, str, int, int], int] | None = None
    pays: Callable[[ModelConfig, Peaks, int, int, int, int, int, int], bool] | None = None


def must_choose(model: ModelConfig, longest: float) -> bool:
    """Returns whether queries choose in a step where one sees `longest` tokens, and none sees more."""
    return longest > model.index_topk


def applies(form: AttentionForm, model: ModelConfig, platform: str, longest: int) -> bool:
    """Returns whether an engine whose requests have `longest` tokens at most needs programs of a form."""
    if platform in LOOKING or form is AttentionForm.ANY:
        return platform in LOOKING and form is AttentionForm.ANY
    return must_choose(model, longest) or not FORMS[form].use_topk


def suits(form: AttentionForm, model: ModelConfig, longest: int, has_context: bool) -> bool:
    """Returns whether a step may take a form: its queries see `longest` tokens at most, with cached ones or without."""
    if form is AttentionForm.ANY:
        return True
    if form is AttentionForm.NEW and has_context:
        return False
    return FORMS[form].use_topk == must_choose(model, longest)


def prefill_attend(
    cfg: ModelConfig, batch: PrefillBatch, pages_per_layer: int, backend: Backend | None, number: int = 0
) -> Attend:
    """Attends in prefill; `number` is that of the micro-batch. The state is that of `sparse.begin`.

    Raises ValueError for a batch in an expanded form that has no room, or in another one that has some.
    """
    if (FORMS[batch.form].room is None) == (batch.room > 0):
        raise ValueError(
            f"a batch in form {batch.form.name} with room for {batch.room} tokens: expanded forms need some"
        )
    form = _taken(cfg, batch)
    row = FORMS[form]
    core = row.core(cfg, batch, pages_per_layer, backend)
    if not cfg.index_layers:
        return writing(cfg, prefill_places(batch, cfg.page_size), pages_per_layer, backend, core)
    rows = prefill_rows(batch, cfg.page_size)
    if row.chosen is None:
        chosen = copying_form(cfg, rows, pages_per_layer, backend)
    else:
        chosen = row.chosen(cfg, batch, rows, pages_per_layer, backend)
        rows = rows._replace(page_table=rows.page_table[:, : batch.room // cfg.page_size])  # no request is longer
    return sparse_attend(cfg, rows, _chooses(cfg, form, rows), pages_per_layer, backend, core, chosen, number)


def decode_attend(
    cfg: ModelConfig, batch: DecodeBatch, pages_per_layer: int, backend: Backend | None, heads: int, number: int = 0
) -> Attend:
    """Attends in decode, as `prefill_attend` does in prefill; `heads` is the number of heads on this device."""
    core = decode_core(cfg, batch, pages_per_layer, backend, heads)
    if not cfg.index_layers:
        return writing(cfg, decode_places(batch, cfg.page_size), pages_per_layer, backend, core)
    rows = decode_rows(batch, cfg.page_size)
    chosen, chooses = copying_form(cfg, rows, pages_per_layer, backend), _chooses(cfg, _taken(cfg, batch), rows)
    return sparse_attend(cfg, rows, chooses, pages_per_layer, backend, core, chosen, number)


def _taken(cfg: ModelConfig, batch: PrefillBatch | DecodeBatch) -> AttentionForm:
    """Returns the form of a batch; absorbed instead of one that chooses, where page tables hold too few tokens."""
    most, form = batch.page_table.shape[1] * cfg.page_size, batch.form
    may_choose = form is AttentionForm.ANY or FORMS[form].use_topk
    return AttentionForm.ABSORBED if may_choose and not must_choose(cfg, most) else form


def _chooses(cfg: ModelConfig, form: AttentionForm, rows: Rows) -> bool | jax.Array:
    return (rows.visible > cfg.index_topk).any() if form is AttentionForm.ANY else FORMS[form].use_topk


def context_room(model: ModelConfig, peaks: Peaks, cache_dtype: str, tokens: int, split: int = 1) -> int:
    """Returns the tokens that the expanded program of `tokens` queries of a micro-batch has room for; 0: there is none.

    All tokens of the step's requests count, each request's in whole pages. `split` devices share the heads. Keys and
    values are made of as many heads at once as fill the multiprocessors with their queries, and fit in memory. Pages of
    any `cache_dtype` are read as one type.
    """
    absorbed, expanded, expansion = _dense_seconds(model, peaks, split)
    if model.index_layers or tokens * (absorbed - expanded) < _LEAST_TOKENS * expansion:
        return 0
    heads = model.num_attention_heads // split
    least = min(heads, -(-_QUERIES * _BLOCKS // tokens))
    together = next(n for n in range(least, heads + 1) if heads % n == 0)
    room = BYTES_AT_ONCE // (together * _head_bytes(model))
    return min(room, _MOST_CONTEXT) // KEY_BLOCK * KEY_BLOCK


def context_pays(
    model: ModelConfig,
    peaks: Peaks,
    tokens: int,
    pairs: int,
    keys: int,
    room: int,
    split: int = 1,
    micro_batches: int = 1,
) -> bool:
    """Returns whether a step of `tokens` queries in all takes less time in expanded form than in absorbed form.

    There are `pairs` of a new token and a cached one, and `keys` tokens of requests to expand, in each micro-batch. The
    absorbed form expands new tokens, and multiplies their queries and outputs by the same weights.
    """
    absorbed, expanded, expansion = _dense_seconds(model, peaks, split)
    heads = model.num_attention_heads // split
    groups = heads // heads_at_once(heads, room * _head_bytes(model))
    more = micro_batches * (keys * expansion + 3 * groups * device_rates.LAUNCH_S)
    return pairs * (absorbed - expanded) + 2 * tokens * expansion > more


def masked_room(model: ModelConfig, peaks: Peaks, cache_dtype: str, tokens: int, split: int = 1) -> int:
    """Returns the tokens up to which `tokens` queries of a micro-batch mask; 0 where copying always is faster.

    All tokens of the step's requests count, each request's in whole pages. `split` devices share the heads. Each query
    is taken to attend to a choice, and all to be the last of one prompt, which sees most.
    """
    if not model.index_layers:
        return 0
    topk = model.index_topk
    absorbed, expanded, expansion = _dense_seconds(model, peaks, split)
    copied, pair = 2 * row_bytes(model, cache_dtype) / peaks.hbm + absorbed, expanded * MASKING
    # tokens * (topk * copied + expansion) = tokens * (room - tokens / 2) * pair + room * expansion: the copying form
    # multiplies its queries and outputs by k_up and v_up.
    room = tokens * (topk * copied + expansion + pair * tokens / 2) / (tokens * pair + expansion)
    room = math.floor(room / KEY_BLOCK) * KEY_BLOCK
    return room if room >= _LEAST_GAIN * topk else 0


def _head_bytes(model: ModelConfig) -> int:
    """Returns the bytes of a token's key and value of one head, in 16 bits; the shared part of the key is no head's."""
    return 2 * (model.qk_nope_head_dim + model.v_head_dim)


def _dense_seconds(model: ModelConfig, peaks: Peaks, split: int) -> tuple[float, float, float]:
    """Returns the seconds of a pair of tokens, absorbed and expanded, and those of expanding one.

    Absorbed attention runs on the multiprocessors that prefill has; expanded attention, and products with k_up and v_up
    (bfloat16 in every model), with what else a prefill does per product.
    """
    latents = peaks.bf16 * device_rates.DECODE_CORE_FLOPS * device_rates.PREFILL_TAKEN
    keys = peaks.bf16 * device_rates.PREFILL_CORE_FLOPS / PREFILL_OVERHEAD
    products = peaks.bf16 * device_rates.PREFILL_FLOPS / PREFILL_OVERHEAD
    return (
        absorbed_operations(model) / split / latents,
        materialized_operations(model) / split / keys,
        materialization_operations(model) / split / products,
    )


FORMS: dict[AttentionForm, FormRow] = {
    AttentionForm.ANY: FormRow(decodes=True),
    AttentionForm.NEW: FormRow(),
    AttentionForm.MATERIALIZED: FormRow(core=materialized_core, room=context_room, pays=context_pays),
    AttentionForm.ABSORBED: FormRow(decodes=True),
    AttentionForm.TOPK_MATERIALIZED: FormRow(use_topk=True, chosen=masked_form, room=masked_room),
    AttentionForm.TOPK: FormRow(use_topk=True, decodes=True),
}
