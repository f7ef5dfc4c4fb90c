"""Turns sampled token ids into what a user sees: the pipeline that every front end uses.

token ids -> text (`detokenizer`) -> stop strings (`stop`) -> reasoning and tool calls (`parser`) -> pieces
"""

import codecs
from collections.abc import Sequence
from typing import Literal

import msgspec

from dsv3.sampling_params import SamplingParams
from dsv3.text.parser import AnswerParser
from dsv3.text.pieces import Marker, Piece, Raw, Reasoning, Text, joined
from dsv3.text.stop import StopStrings
from dsv3.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns the tokens of one answer into text, token by token, in linear time.

    The bytes of an unfinished character are held back. Special tokens are no text unless `skip_special_tokens` is
    false. Without a tokenizer every text is empty.
    """

    def __init__(self, tokenizer: Tokenizer | None, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if tokenizer and skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._inside_character = False

    def push(self, token_id: int) -> str:
        """Returns the text that one more token completes."""
        if self._tokenizer is None or token_id in self._skipped:
            return ""
        if not self._inside_character:
            text = self._tokenizer.token_text(token_id)
            if text is not None:
                return text
        text = self._utf8.decode(self._tokenizer.token_bytes(token_id))
        self._inside_character = bool(self._utf8.getstate()[0])
        return text

    def finish(self) -> str:
        """Returns U+FFFD for what is left of an unfinished character."""
        self._inside_character = False
        return self._utf8.decode(b"", True)


EngineEndReason = Literal["stop", "length", "abort", "error"]
EndReason = Literal[EngineEndReason, "tool_calls"]


class OutputDelta(msgspec.Struct, frozen=True, gc=False):
    """New pieces, and the number of the pushed tokens that count (those after a stop string do not).

    No two texts of one kind follow each other. `num_reasoning_tokens` of the tokens were written while the model was
    thinking, the markers included. `finish_reason` is set on the last delta: what the caller gave, "stop" after a stop
    string, or "tool_calls" instead of "stop" where there is a complete call. `stop_reason` names the stop string, or
    the stop token other than the tokenizer's end-of-sequence, that ended the output. `num_dropped_calls` comes with the
    last delta too.
    """

    pieces: list[Piece]
    num_tokens: int
    finish_reason: EndReason | None = None
    stop_reason: str | int | None = None
    num_reasoning_tokens: int = 0
    num_dropped_calls: int = 0

    @property
    def text(self) -> str:
        """The answer's text and reasoning."""
        return "".join(piece.text for piece in self.pieces if isinstance(piece, Text | Reasoning))


class OutputStream:
    """Turns the tokens of one sequence into pieces as they come; linear in the tokens.

    A stop string ends the output even if the engine goes on: the caller then aborts the engine's request. The stop
    string, and the stop token that ended the sequence, are left out unless `include_stop_str_in_output`. The parser
    sees the text after its stop strings. Raises ValueError for stop strings without a tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer | None, sampling: SamplingParams, parser: AnswerParser | None = None):
        if tokenizer is None and sampling.stop:
            raise ValueError("stop strings need a tokenizer, and this model has none; use stop_token_ids")
        self._tokenizer = tokenizer
        self._eos = tokenizer.eos_token_id if tokenizer else None
        self._detokenizer = Detokenizer(tokenizer, sampling.skip_special_tokens)
        self._shows_stop = sampling.include_stop_str_in_output
        self._min_tokens = sampling.min_tokens
        self._stop = StopStrings(sampling.stop, self._shows_stop) if sampling.stop else None
        self._parser = parser
        self._marker_ids = parser.marker_ids if parser is not None else {}
        self._is_plain = self._stop is None and parser is None
        self._count = 0

    def push(
        self, token_ids: Sequence[int], finish_reason: EngineEndReason | None = None, stop_token_id: int | None = None
    ) -> OutputDelta:
        """Takes the engine's next tokens; `stop_token_id`, if any, is the last of them."""
        if self._is_plain and finish_reason is None:  # nearly always, where nothing is parsed
            return self._push_plain(token_ids)
        hidden = stop_token_id is not None and not self._shows_stop and stop_token_id not in self._marker_ids
        pieces, reasoning = [], 0
        was_reasoning = self._is_reasoning
        for i, token_id in enumerate(token_ids[:-1] if hidden else token_ids):
            pieces += self._through(self._read(token_id), self._count + i + 1)
            is_reasoning = self._is_reasoning
            reasoning += was_reasoning or is_reasoning
            was_reasoning = is_reasoning
            if self._has_stopped:
                return self._ended(pieces, i + 1, reasoning, "stop", self._found)
        self._count += len(token_ids)
        if finish_reason is None:
            return OutputDelta(joined(pieces), len(token_ids), num_reasoning_tokens=reasoning)
        reasoning += hidden and self._is_reasoning
        text = self._detokenizer.finish()
        pieces += self._through([Text(text)] if text else [], self._count)
        if self._has_stopped:
            return self._ended(pieces, len(token_ids), reasoning, "stop", self._found)
        stop_reason = None if stop_token_id == self._eos else stop_token_id
        return self._ended(pieces, len(token_ids), reasoning, finish_reason, stop_reason)

    def _push_plain(self, token_ids: Sequence[int]) -> OutputDelta:
        self._count += len(token_ids)
        push = self._detokenizer.push
        text = push(token_ids[0]) if len(token_ids) == 1 else "".join(map(push, token_ids))
        return OutputDelta([Text(text)] if text else [], len(token_ids))

    @property
    def _is_reasoning(self) -> bool:
        return self._parser is not None and self._parser.is_reasoning

    @property
    def _found(self) -> str | None:
        return None if self._stop is None else self._stop.found

    @property
    def _has_stopped(self) -> bool:
        return self._stop is not None and self._stop.found is not None

    def _read(self, token_id: int) -> list[Raw]:
        """Returns what one more token stands for; a marker ends a character that is not complete."""
        if token_id not in self._marker_ids:
            text = self._detokenizer.push(token_id)
            return [Text(text)] if text else []
        assert self._tokenizer is not None
        rest = self._detokenizer.finish()
        marker = Marker(token_id, self._tokenizer.token_bytes(token_id).decode("utf-8", "replace"))
        return [Text(rest), marker] if rest else [marker]

    def _through(self, raw: list[Raw], count: int) -> list[Piece]:
        """Passes on what token number `count` stands for; a stop string counts from `min_tokens` on."""
        if self._stop is not None:
            self._stop.is_armed = count >= self._min_tokens
            raw = self._until_stop(raw)
        return self._parsed(raw)

    def _until_stop(self, raw: list[Raw]) -> list[Raw]:
        assert self._stop is not None
        shown = []
        for piece in raw:
            shown += self._stop.push(piece)
            if self._stop.found is not None:
                break
        return shown

    def _parsed(self, raw: list[Raw]) -> list[Piece]:
        if self._parser is None:
            return [piece for piece in raw if isinstance(piece, Text)]
        if len(raw) == 1:
            return self._parser.push(raw[0])
        return [piece for each in raw for piece in self._parser.push(each)]

    def _ended(
        self,
        pieces: list[Piece],
        num_tokens: int,
        num_reasoning_tokens: int,
        finish_reason: EndReason,
        stop_reason: str | int | None,
    ) -> OutputDelta:
        """Returns the last delta, with what was held back."""
        if self._stop is not None:
            pieces += self._parsed(self._stop.finish())
        if self._parser is not None:
            pieces += self._parser.finish()
            if finish_reason == "stop" and self._parser.num_calls:
                finish_reason = "tool_calls"
        dropped = 0 if self._parser is None else self._parser.num_dropped
        return OutputDelta(joined(pieces), num_tokens, finish_reason, stop_reason, num_reasoning_tokens, dropped)
