"""The table of attention forms: when a form applies, its capacity, its cost, and its implementation.

The steps, the host that selects a program, and the planner all read this table. The selection is by estimated cost,
from shapes and device rates.

Dense attention has two forms for cached tokens. The absorbed form multiplies cached latents. The materialized form
first computes keys and values from them, and then needs 0.29 of the operations per pair of tokens (DeepSeek-V3). Its
program has a fixed token capacity. It is faster if enough new tokens share the cached tokens of a step.

In sparse attention, a query that sees more than `index_topk` tokens attends to its top-k tokens. If no query of a step
does, attention is dense. A top-k step has two forms. The copying form gathers the top-k rows of each query and attends
to them in absorbed form; its time does not depend on the context. The masked form materializes keys and values of all
cached tokens once and attends to all of them under a mask; its time grows with the context. Both use the same scores
and the same top-k tokens. The capacity of the masked form is the number of tokens at which both take the same time.

The crossover depends on a GPU's operations per byte: 206 on an H200, 295 on an H100, 153 on an A100, 419 on an L40S.
The higher it is, the more copies cost relative to products, and the later the forms cross.
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
from dsv3.model.layers.attention import Attend, Core, LatentStep, attend_after_write, decode_core, prefill_core
from dsv3.model.layers.materialized import BYTES_AT_ONCE, heads_at_once, masked_form, materialized_core
from dsv3.model.layers.sparse import TopkForm, copying_form, sparse_attend

_KEY_BLOCK = 128  # the kernels read keys in such blocks

DYNAMIC_PLATFORMS = ("cpu",)
"""Platforms that run `AttentionForm.ANY`: conditions on the device are free there, and a program less to compile."""

_MIN_GAIN = 2  # minimum capacity of the masked form, in multiples of top-k: a smaller program would seldom run
_MIN_TOKENS = 2  # minimum bucket, in multiples of the break-even: a step's new tokens may belong to several requests
_MAX_CONTEXT = 2**18  # tokens; their latents take 302 MB
_QUERIES, _BLOCKS = 128, 128  # query tokens of a thread block of the prefill kernel; blocks that fill the GPU


@dataclasses.dataclass(frozen=True)
class FormRow:
    """A row of the table.

    `use_topk`: queries attend to their top-k tokens (in ANY the device decides). `decodes`: decode steps and the steps
    of an MTP module have this form too. In prefill, `core` attends to all tokens and `topk_form` to top-k tokens.

    A form with a `capacity` materializes keys and values: `capacity(model, peaks, cache_dtype, tokens, split)` returns
    the token capacity of the program for `tokens` queries of a micro-batch, 0 if there is no such program. A step whose
    tokens fit uses the form if `is_faster` returns True, or always if that is None.
    """

    use_topk: bool = False
    decodes: bool = False
    core: Callable[[LatentStep, PrefillBatch], Core] = prefill_core
    topk_form: Callable[[LatentStep, PrefillBatch], TopkForm] | None = None
    capacity: Callable[[ModelConfig, Peaks, str, int, int], int] | None = None
    is_faster: Callable[[ModelConfig, Peaks, int, int, int, int, int, int], bool] | None = None


def needs_topk(model: ModelConfig, longest: float) -> bool:
    """Returns whether queries need top-k selection in a step whose longest query sees `longest` tokens."""
    return longest > model.index_topk


def applies(
    form: AttentionForm, model: ModelConfig, platform: str, longest: int, *, batch_invariant: bool = False
) -> bool:
    """Returns whether an engine for requests of at most `longest` tokens compiles programs of a form.

    Compressed attention (DeepSeek-V4) has one form on a GPU: latents are its keys, so there is nothing to materialize.
    Batch-invariant programs have those of decode alone.
    """
    if platform in DYNAMIC_PLATFORMS or form is AttentionForm.ANY:
        return platform in DYNAMIC_PLATFORMS and form is AttentionForm.ANY
    if batch_invariant and not FORMS[form].decodes:
        return False
    if model.compressed is not None:
        return form is AttentionForm.ABSORBED
    return needs_topk(model, longest) or not FORMS[form].use_topk


def key_block(model: ModelConfig) -> int:
    """Returns the number of tokens that capacities are multiples of: whole blocks of keys, and whole pages."""
    return max(_KEY_BLOCK, model.page_size)


def suits(form: AttentionForm, model: ModelConfig, longest: int, has_context: bool) -> bool:
    """Returns whether a form is correct for a step whose queries see at most `longest` tokens."""
    if form is AttentionForm.ANY:
        return True
    if form is AttentionForm.NEW and has_context:
        return False
    return FORMS[form].use_topk == needs_topk(model, longest)


def paged_attend(step: LatentStep, batch: PrefillBatch | DecodeBatch, heads: int, number: int) -> Attend:
    """Attends in a step, to the new tokens and those in pages. The state is that of `sparse.initial_state`.

    `heads` is the number of heads on this device, `number` that of the micro-batch.

    Raises ValueError if a batch in a materialized form has no `kv_capacity`, or one in another form has one.
    """
    form = _effective_form(step.cfg, batch)
    row, topk_form = FORMS[form], None
    if isinstance(batch, DecodeBatch):
        core = decode_core(step, batch, heads)
    elif (FORMS[batch.form].capacity is None) == (batch.kv_capacity > 0):
        raise ValueError(
            f"kv_capacity is {batch.kv_capacity} in form {batch.form.name}; it must be above 0 in materialized forms, "
            "and 0 in all others"
        )
    else:
        core = row.core(step, batch)
        if row.topk_form is not None:
            topk_form = row.topk_form(step, batch)
            most = batch.kv_capacity // step.cfg.page_size  # no request is longer
            rows = dataclasses.replace(step.rows, page_table=step.rows.page_table[:, :most])
            step = dataclasses.replace(step, rows=rows)
    if not step.cfg.index_layers:
        return attend_after_write(step, core)
    return sparse_attend(step, _use_topk(step, form), core, topk_form or copying_form(step), number)


def _effective_form(cfg: ModelConfig, batch: PrefillBatch | DecodeBatch) -> AttentionForm:
    """Returns the form of a batch; ABSORBED instead of a top-k form if its page tables hold too few tokens."""
    most, form = batch.page_table.shape[1] * cfg.page_size, batch.form
    may_use_topk = form is AttentionForm.ANY or FORMS[form].use_topk
    return AttentionForm.ABSORBED if may_use_topk and not needs_topk(cfg, most) else form


def _use_topk(step: LatentStep, form: AttentionForm) -> bool | jax.Array:
    return (step.rows.visible > step.cfg.index_topk).any() if form is AttentionForm.ANY else FORMS[form].use_topk


def context_capacity(model: ModelConfig, peaks: Peaks, cache_dtype: str, tokens: int, split: int = 1) -> int:
    """Returns the token capacity of the materialized program for `tokens` queries of a micro-batch; 0: no such program.

    All tokens of the step's requests count, each request's in whole pages. `split` devices share the heads. Keys and
    values are materialized for several heads at a time: enough to fill the multiprocessors with queries, few enough to
    fit in memory. Pages of any `cache_dtype` are read as one type.
    """
    absorbed, materialized, materialization = _dense_seconds(model, peaks, split)
    if model.index_layers or tokens * (absorbed - materialized) < _MIN_TOKENS * materialization:
        return 0
    heads = model.num_attention_heads // split
    least = min(heads, -(-_QUERIES * _BLOCKS // tokens))
    together = next(n for n in range(least, heads + 1) if heads % n == 0)
    capacity = BYTES_AT_ONCE // (together * _head_bytes(model))
    return min(capacity, _MAX_CONTEXT) // key_block(model) * key_block(model)


def context_is_faster(
    model: ModelConfig,
    peaks: Peaks,
    tokens: int,
    pairs: int,
    keys: int,
    capacity: int,
    split: int = 1,
    micro_batches: int = 1,
) -> bool:
    """Returns whether a step of `tokens` queries in all takes less time in materialized form than in absorbed form.

    Each micro-batch has `pairs` of a new and a cached token, and `keys` tokens to materialize. The absorbed form
    materializes new tokens too, and multiplies their queries and outputs by the same weights.
    """
    absorbed, materialized, materialization = _dense_seconds(model, peaks, split)
    heads = model.num_attention_heads // split
    groups = heads // heads_at_once(heads, capacity * _head_bytes(model))
    more = micro_batches * (keys * materialization + 3 * groups * device_rates.LAUNCH_S)
    return pairs * (absorbed - materialized) + 2 * tokens * materialization > more


def masked_capacity(model: ModelConfig, peaks: Peaks, cache_dtype: str, tokens: int, split: int = 1) -> int:
    """Returns the token capacity of the masked program for `tokens` queries of a micro-batch; 0: copying is faster.

    All tokens of the step's requests count, each request's in whole pages. `split` devices share the heads. The
    estimate assumes that all queries use top-k, and are the last ones of one prompt, which see most.
    """
    if not model.index_layers:
        return 0
    topk = model.index_topk
    absorbed, materialized, materialization = _dense_seconds(model, peaks, split)
    copied, pair = 2 * row_bytes(model, cache_dtype) / peaks.hbm + absorbed, materialized * MASKING
    # tokens * (topk * copied + materialization) = tokens * (capacity - tokens / 2) * pair + capacity * materialization:
    # the copying form multiplies its queries and outputs by k_up and v_up.
    capacity = tokens * (topk * copied + materialization + pair * tokens / 2) / (tokens * pair + materialization)
    capacity = math.floor(capacity / key_block(model)) * key_block(model)
    return capacity if capacity >= _MIN_GAIN * topk else 0


def _head_bytes(model: ModelConfig) -> int:
    """Returns the bytes of a token's key and value of one head, in 16 bits, without the part that all heads share."""
    return 2 * (model.qk_nope_head_dim + model.v_head_dim)


def _dense_seconds(model: ModelConfig, peaks: Peaks, split: int) -> tuple[float, float, float]:
    """Returns the seconds per pair of tokens, absorbed and materialized, and those of materializing one token.

    Absorbed attention gets the multiprocessors that prefill has (`PREFILL_MULTIPROCESSORS`). Materialized attention and
    products with k_up and v_up (bfloat16 in every model) carry a prefill's overhead per product.
    """
    latents = peaks.bf16 * device_rates.DECODE_CORE_FLOPS * device_rates.PREFILL_MULTIPROCESSORS
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
    AttentionForm.MATERIALIZED: FormRow(core=materialized_core, capacity=context_capacity, is_faster=context_is_faster),
    AttentionForm.ABSORBED: FormRow(decodes=True),
    AttentionForm.TOPK_MATERIALIZED: FormRow(use_topk=True, topk_form=masked_form, capacity=masked_capacity),
    AttentionForm.TOPK: FormRow(use_topk=True, decodes=True),
}
