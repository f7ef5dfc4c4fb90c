"""The kinds of work that a step may hold, in the order in which they are planned and launched.

A new kind is a file here and a line below (`docs/extending.md`). An engine drafts in one way, so of the kinds that
draft one applies.
"""

from dsv3.engine.job import JobKind
from dsv3.engine.jobs import decode, draft, draft_block, draft_module, experts, pages, prefill

JOB_KINDS: tuple[JobKind, ...] = (
    decode.KIND,
    pages.KIND,
    prefill.KIND,
    draft.KIND,
    draft_module.KIND,
    draft_block.KIND,
    experts.KIND,
)
