"""The kinds of work a step may hold, in the order in which they are planned and launched.

A new kind is a file here and a line below (`docs/extending.md`).
"""

from dsv3.engine.job import JobKind
from dsv3.engine.jobs import decode, draft, experts, pages, prefill

JOB_KINDS: tuple[JobKind, ...] = (
    decode.KIND,
    pages.KIND,
    prefill.KIND,
    draft.KIND,
    experts.KIND,
)
