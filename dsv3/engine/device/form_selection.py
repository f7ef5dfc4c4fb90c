"""Selects the attention form of a step's forward program, from the forms that programs are compiled for.

The table of forms is `dsv3.model.forms`. On a GPU, deciding inside the program whether a step has cached tokens, or
whether any query needs top-k selection, would make its host wait in every layer. So a program is compiled for each form
that may suit a step, and the host, which knows the lengths of requests, selects one.
"""

from dsv3.config.engine import ForwardProgram
from dsv3.engine.device.layout import Layout
from dsv3.model.batch import AttentionForm
from dsv3.model.forms import FORMS, key_block, suits

ANY_LENGTH = 2**31 - 1
"""Stands for an unknown length: any number of tokens."""


def decode_forms(layout: Layout) -> list[AttentionForm]:
    """Returns the forms of decode programs, and of all programs of an MTP module."""
    return [form for form in layout.forms if FORMS[form].decodes]


def decode_form(layout: Layout, longest: int) -> AttentionForm:
    """Returns the form of `decode_forms` for a step whose queries see at most `longest` tokens."""
    model, longest = layout.model_cfg, min(longest, layout.longest)
    return next(form for form in layout.forms if FORMS[form].decodes and suits(form, model, longest, True))


def prefill_forms(layout: Layout, size: int) -> list[AttentionForm]:
    """Returns the forms of the programs of prefill's bucket `size`: forms that need capacity only where they have some.

    A CPU has one program, since each takes seconds to compile.
    """
    return [form for form in layout.forms if FORMS[form].capacity is None or capacity(layout, size, form)]


def prefill_form(
    layout: Layout, size: int, has_context: bool, longest: int, keys: int, pairs: int = 0
) -> AttentionForm:
    """Returns the form of `prefill_forms` for a step of bucket `size`, `has_context` or not.

    Its queries see at most `longest` tokens, and the requests of a rank have `keys` together, in whole pages. `pairs`
    counts the pairs of a new token and one before its chunk.
    """
    model, longest = layout.model_cfg, min(longest, layout.longest)
    return next(
        form
        for form in layout.forms
        if suits(form, model, longest, has_context)
        and (FORMS[form].capacity is None or _fits_and_pays(layout, size, form, keys, pairs))
    )


def capacity(layout: Layout, size: int, form: AttentionForm) -> int:
    """Returns the tokens that a batch of bucket `size` may materialize in a form; 0 where it needs or has none."""
    capacity_of, cfg, tokens = FORMS[form].capacity, layout.cfg, size // _micro_batches(layout, size)
    if capacity_of is None:
        return 0
    found = capacity_of(layout.model_cfg, layout.peaks, cfg.cache_dtype, tokens, cfg.tensor_parallel_size)
    most = cfg.prefill_rows(size) * layout.longest
    block = key_block(layout.model_cfg)
    return min(found, -(-most // block) * block)


def _fits_and_pays(layout: Layout, size: int, form: AttentionForm, keys: int, pairs: int) -> bool:
    """Returns whether the `keys` tokens of a step fit the capacity of a form, and the form is faster."""
    most, pays = capacity(layout, size, form), FORMS[form].is_faster
    if not 0 < keys <= most:
        return False
    given = size, pairs, keys, most, layout.cfg.tensor_parallel_size, _micro_batches(layout, size)
    return pays is None or pays(layout.model_cfg, layout.peaks, *given)


def _micro_batches(layout: Layout, size: int) -> int:
    overlaps = layout.functions.overlaps
    return 2 if overlaps is not None and overlaps(ForwardProgram("prefill", size, size)) else 1
