"""Puts the grammar of an answer together: reasoning, which is free, then text under a constraint, or calls."""

from collections.abc import Callable

import msgspec

from dsv3.structured_outputs import StructuredOutputsParams
from dsv3.text.call_grammar import CallGrammar, CallRules
from dsv3.text.dialects import Dialect
from dsv3.text.grammar import Grammar, Reasoning, after_reasoning, assembled, body_of


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer is to be held to: a constraint, or rules for its calls, or both, behind reasoning if there is any.

    With both, and no call required, it may be either.
    """

    constraint: StructuredOutputsParams | None = None
    calls: CallRules | None = None
    reasoning: Reasoning | None = None


def answer_grammar(wanted: Wanted, dialect: Dialect | None, id_of: Callable[[str], int | None]) -> str:
    """Returns the grammar of an answer, "" where it is free; calls are in `dialect`, `id_of` has its markers.

    Raises ValueError for a constraint or for tools that no grammar can be made of. Its time is not linear in what is
    wanted: a server writes no grammar of what a client sends but in a process that can be killed.
    """
    constraint, calls = wanted.constraint, wanted.calls
    entries: list[Grammar] = [] if constraint is None else [body_of(constraint)]
    if calls is None:
        return assembled(after_reasoning(wanted.reasoning, "@answer"), entries) if entries else ""
    assert dialect is not None  # else tools are refused
    written = CallGrammar(dialect, calls, id_of)
    body = "calls"
    if not calls.required:
        body = "text_or_calls" if constraint is None else "@answer | calls"
    rules = [after_reasoning(wanted.reasoning, "body"), f"body: {body}", *written.rules]
    return assembled("\n".join(rules), [*entries, *written.entries])
