"""Messages between a front and its process that makes grammars; see `dsv3.processes.frames`."""

import msgspec

from dsv3.text.answer_grammar import Wanted


class MakeSetup(msgspec.Struct, frozen=True, tag=True):
    """First message to the process: what a `Vocabulary` is made of, the tokenizer as a path.

    `dialect` names that of the model's calls, "" for none; `marker_ids` has its markers that are tokens.
    """

    tokenizer: str
    vocab_size: int
    end_ids: tuple[int, ...]
    dialect: str
    marker_ids: dict[str, int]


class Make(msgspec.Struct, frozen=True, tag=True):
    """An answer whose grammar is to be written and compiled."""

    wanted: Wanted


class Made(msgspec.Struct, frozen=True, tag=True):
    """The answer: the grammar, or an `error` that says why none, or no vocabulary, can be used."""

    grammar: str = ""
    error: str | None = None


ToWorker = MakeSetup | Make

to_worker = msgspec.msgpack.Decoder(ToWorker)
from_worker = msgspec.msgpack.Decoder(Made)
