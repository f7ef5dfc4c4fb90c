"""Which forward programs an engine has by the form of their attention, and which one a step takes.

The table of forms is `dsv3.model.forms`. A GPU's host would wait in every layer to hear whether a step has cached
tokens, or whether any query chooses. So a program is compiled for each form that may suit a step, and the host, which
knows how long requests are, takes one.
"""

from dsv3.config.engine import ForwardProgram
from dsv3.engine.device.layout import Layout
from dsv3.model.batch import AttentionForm
from dsv3.model.forms import FORMS, KEY_BLOCK, suits

ANY_LENGTH = 2**31 - 1
"""Stands for a step of which nobody says how many tokens its queries see: any number."""


def decode_forms(layout: Layout) -> list[AttentionForm]:
    """Returns the forms of the programs of decode, and of all of an MTP module."""
    return [form for form in layout.forms if FORMS[form].decodes]


def decode_form(layout: Layout, longest: int) -> AttentionForm:
    """Returns that of `decode_forms` for a step whose queries see `longest` tokens at most."""
    model, longest = layout.model_cfg, min(longest, layout.longest)
    return next(form for form in layout.forms if FORMS[form].decodes and suits(form, model, longest, True))


def prefill_forms(layout: Layout, size: int) -> list[AttentionForm]:
    """Returns the forms of the programs of prefill's bucket `size`: a form that needs room is there where it has some.

    A CPU has one program, since each takes seconds to compile.
    """
    return [form for form in layout.forms if FORMS[form].room is None or room(layout, size, form)]


def prefill_form(
    layout: Layout, size: int, has_context: bool, longest: int, keys: int, pairs: int = 0
) -> AttentionForm:
    """Returns that of `prefill_forms` for a step of bucket `size` that `has_context`, or not.

    Its queries see `longest` tokens at most, and the requests of a rank have `keys` together, in whole pages. There are
    `pairs` of a new token and one before its chunk.
    """
    model, longest = layout.model_cfg, min(longest, layout.longest)
    return next(
        form
        for form in layout.forms
        if suits(form, model, longest, has_context)
        and (FORMS[form].room is None or _takes_room(layout, size, form, keys, pairs))
    )


def room(layout: Layout, size: int, form: AttentionForm) -> int:
    """Returns the `room` of the batches of bucket `size` in a form; 0 where it needs none, or has none."""
    row, cfg, tokens = FORMS[form], layout.cfg, size // _micro_batches(layout, size)
    if row.room is None:
        return 0
    found = row.room(layout.model_cfg, layout.peaks, cfg.cache_dtype, tokens, cfg.tensor_parallel_size)
    most = cfg.prefill_rows(size) * layout.longest  # of a batch, in whole blocks of keys
    return min(found, -(-most // KEY_BLOCK) * KEY_BLOCK)


def _takes_room(layout: Layout, size: int, form: AttentionForm, keys: int, pairs: int) -> bool:
    """Returns whether a step whose requests have `keys` tokens fits in the room of a form, and gains by it."""
    most, pays = room(layout, size, form), FORMS[form].pays
    if not 0 < keys <= most:
        return False
    given = size, pairs, keys, most, layout.cfg.tensor_parallel_size, _micro_batches(layout, size)
    return pays is None or pays(layout.model_cfg, layout.peaks, *given)


def _micro_batches(layout: Layout, size: int) -> int:
    overlaps = layout.functions.overlaps
    return 2 if overlaps is not None and overlaps(ForwardProgram("prefill", size, size)) else 1
