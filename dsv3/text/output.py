"""Turns sampled token ids into what a user sees: the pipeline that every front end uses.

token ids -> text (`detokenizer`) -> stop strings (`stop`) -> the parsers of `parsers` -> pieces
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from dsv3.sampling_params import SamplingParams
from dsv3.text.detokenizer import Detokenizer
from dsv3.text.parsers import OutputParser
from dsv3.text.pieces import Piece, Text
from dsv3.text.stop import StopStrings
from dsv3.text.tokenizer import Tokenizer

EndReason = Literal["stop", "length", "abort", "error"]


class OutputDelta(msgspec.Struct, frozen=True, gc=False):
    """New pieces, and the number of the pushed tokens that count (those after a stop string do not).

    No two pieces of one kind follow each other. `finish_reason` is set on the last delta: what the caller gave, or
    "stop" after a stop string. `stop_reason` names the stop string, or the stop token other than the tokenizer's
    end-of-sequence, that ended the output.
    """

    pieces: list[Piece]
    num_tokens: int
    finish_reason: EndReason | None = None
    stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        """The text of all pieces, whatever their kind."""
        return "".join(piece.text for piece in self.pieces)


class OutputStream:
    """Turns the tokens of one sequence into pieces as they come; linear in the tokens.

    A stop string ends the output even if the engine goes on: the caller then aborts the engine's request. The stop
    string, and the stop token that ended the sequence, are left out unless `include_stop_str_in_output`. `parsers` see
    the text after its stop strings. Raises ValueError for stop strings without a tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer | None, sampling: SamplingParams, parsers: Sequence[OutputParser] = ()):
        if tokenizer is None and sampling.stop:
            raise ValueError("stop strings need a tokenizer, and this model has none; use stop_token_ids")
        self._eos = tokenizer.eos_token_id if tokenizer else None
        self._detokenizer = Detokenizer(tokenizer, sampling.skip_special_tokens)
        self._shows_stop = sampling.include_stop_str_in_output
        self._min_tokens = sampling.min_tokens
        self._stop = StopStrings(sampling.stop, self._shows_stop) if sampling.stop else None
        self._parsers: list[OutputParser] = [*([self._stop] if self._stop else []), *parsers]
        self._count = 0

    def push(
        self, token_ids: Sequence[int], finish_reason: EndReason | None = None, stop_token_id: int | None = None
    ) -> OutputDelta:
        """Takes the engine's next tokens; `stop_token_id`, if any, is the last of them."""
        if not self._parsers and finish_reason is None and len(token_ids) == 1:  # nearly always
            self._count += 1
            text = self._detokenizer.push(token_ids[0])
            return OutputDelta([Text(text)] if text else [], 1)
        hidden = stop_token_id is not None and not self._shows_stop
        shown = token_ids[:-1] if hidden else token_ids
        if self._stop is None:
            pieces = self._through("".join(map(self._detokenizer.push, shown)))
        else:
            pieces = []
            for i, token_id in enumerate(shown):
                pieces += self._until_stop(self._detokenizer.push(token_id), self._count + i + 1)
                if self._stop.found is not None:
                    return self._stopped(pieces, i + 1)
        self._count += len(token_ids)
        if finish_reason is None:
            return OutputDelta(_joined(pieces), len(token_ids))
        if self._stop is None:
            pieces += self._through(self._detokenizer.finish())
        else:
            pieces += self._until_stop(self._detokenizer.finish(), self._count)
            if self._stop.found is not None:
                return self._stopped(pieces, len(token_ids))
        pieces += self._finish()
        stop_reason = None if stop_token_id == self._eos else stop_token_id
        return OutputDelta(_joined(pieces), len(token_ids), finish_reason, stop_reason)

    def _until_stop(self, text: str, count: int) -> list[Piece]:
        """Passes on the text of token number `count`; a stop string counts from `min_tokens` on."""
        assert self._stop is not None
        self._stop.is_armed = count >= self._min_tokens
        return self._through(text)

    def _stopped(self, pieces: list[Piece], num_tokens: int) -> OutputDelta:
        assert self._stop is not None
        return OutputDelta(_joined(pieces + self._finish()), num_tokens, "stop", self._stop.found)

    def _through(self, text: str) -> list[Piece]:
        """Passes text through all parsers."""
        if not text:
            return []
        pieces: list[Piece] = [Text(text)]
        for parser in self._parsers:
            pieces = [after for before in pieces for after in parser.push(before)]
            if parser.is_done:
                self._parsers = [other for other in self._parsers if other is not parser]
        return pieces

    def _finish(self) -> list[Piece]:
        """Empties the parsers; what one of them held passes those after it."""
        pieces: list[Piece] = []
        for parser in self._parsers:
            pieces = [after for before in pieces for after in parser.push(before)] + parser.finish()
        self._parsers = []
        return pieces


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Returns pieces of which no two of one kind follow each other, where both are text."""
    if len(pieces) < 2:
        return pieces
    joined = [pieces[0]]
    for piece in pieces[1:]:
        if type(piece) is type(joined[-1]):
            joined[-1] = type(piece)(joined[-1].text + piece.text)
        else:
            joined.append(piece)
    return joined
