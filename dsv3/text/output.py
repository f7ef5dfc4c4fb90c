"""Detokenizer and output processor: sampled token ids to the deltas of an answer.

token ids -> text (`Detokenizer`) -> stop strings (`dsv3.text.stop`) -> reasoning and tool calls (`dsv3.text.parser`)
"""

import codecs
from collections.abc import Sequence
from typing import Literal

import msgspec

from dsv3.sampling_params import SamplingParams
from dsv3.text.deltas import AnswerDelta, RawDelta, ReasoningDelta, SpecialToken, TextDelta, merge_deltas
from dsv3.text.parser import AnswerParser
from dsv3.text.stop import StopStrings
from dsv3.text.tokenizer import Tokenizer


class Detokenizer:
    """Incremental detokenizer of one answer, in linear time.

    Bytes of an incomplete character wait for the rest. Special tokens other than `kept` are dropped unless
    `skip_special_tokens` is false. Without a tokenizer all text is empty.
    """

    def __init__(self, tokenizer: Tokenizer | None, skip_special_tokens: bool, kept: frozenset[int] = frozenset()):
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids - kept if tokenizer and skip_special_tokens else frozenset()
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
        """Returns U+FFFD for an incomplete character at the end."""
        self._inside_character = False
        return self._utf8.decode(b"", True)


EngineEndReason = Literal["stop", "length", "abort", "error"]
EndReason = Literal[EngineEndReason, "tool_calls"]


class OutputUpdate(msgspec.Struct, frozen=True, gc=False):
    """New deltas, and the number of the pushed tokens that count (those after a stop string do not).

    No two adjacent deltas have the same kind. `num_reasoning_tokens` of the tokens are reasoning, its markers included.
    The last update has `finish_reason`: what the caller gave, "stop" after a stop string, or "tool_calls" instead of
    "stop" where a call is complete; `stop_reason`, the stop string, or the stop token other than the tokenizer's
    end-of-sequence, that ended the output; and `num_dropped_calls`.
    """

    deltas: list[AnswerDelta]
    num_tokens: int
    finish_reason: EndReason | None = None
    stop_reason: str | int | None = None
    num_reasoning_tokens: int = 0
    num_dropped_calls: int = 0

    @property
    def text(self) -> str:
        """The text of content and reasoning."""
        return "".join(delta.text for delta in self.deltas if isinstance(delta, TextDelta | ReasoningDelta))


class OutputProcessor:
    """Turns the tokens of one sequence into deltas; linear in the tokens.

    A stop string ends the output even if the engine continues: the caller then aborts the engine's request. The stop
    string, and the stop token that ended the sequence, are dropped unless `include_stop_str_in_output`. The parser gets
    the text after the search for stop strings. Raises ValueError for stop strings without a tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer | None, sampling: SamplingParams, parser: AnswerParser | None = None):
        if tokenizer is None and sampling.stop:
            raise ValueError("stop strings need a tokenizer, and this model has none; use stop_token_ids")
        self._tokenizer = tokenizer
        self._eos = tokenizer.eos_token_id if tokenizer else None
        kept = frozenset() if parser is None else parser.text_ids
        self._detokenizer = Detokenizer(tokenizer, sampling.skip_special_tokens, kept)
        self._shows_stop = sampling.include_stop_str_in_output
        self._min_tokens = sampling.min_tokens
        self._stop = StopStrings(sampling.stop, self._shows_stop) if sampling.stop else None
        self._parser = parser
        self._marker_ids = parser.marker_ids if parser is not None else {}
        self._is_plain = self._stop is None and parser is None
        self._count = 0

    def push(
        self, token_ids: Sequence[int], finish_reason: EngineEndReason | None = None, stop_token_id: int | None = None
    ) -> OutputUpdate:
        """Processes the engine's next tokens; `stop_token_id`, if any, is the last of them."""
        if self._is_plain and finish_reason is None:  # the usual case without a parser
            return self._push_plain(token_ids)
        drops_last = stop_token_id is not None and not self._shows_stop and stop_token_id not in self._marker_ids
        deltas, reasoning = [], 0
        was_reasoning = self._is_reasoning
        for i, token_id in enumerate(token_ids[:-1] if drops_last else token_ids):
            deltas += self._process(self._detokenize(token_id), self._count + i + 1)
            is_reasoning = self._is_reasoning
            reasoning += was_reasoning or is_reasoning
            was_reasoning = is_reasoning
            if self._has_stopped:
                return self._finish(deltas, i + 1, reasoning, "stop", self._found)
        self._count += len(token_ids)
        if finish_reason is None:
            return OutputUpdate(merge_deltas(deltas), len(token_ids), num_reasoning_tokens=reasoning)
        reasoning += drops_last and self._is_reasoning
        text = self._detokenizer.finish()
        deltas += self._process([TextDelta(text)] if text else [], self._count)
        if self._has_stopped:
            return self._finish(deltas, len(token_ids), reasoning, "stop", self._found)
        stop_reason = None if stop_token_id == self._eos else stop_token_id
        return self._finish(deltas, len(token_ids), reasoning, finish_reason, stop_reason)

    def _push_plain(self, token_ids: Sequence[int]) -> OutputUpdate:
        self._count += len(token_ids)
        push = self._detokenizer.push
        text = push(token_ids[0]) if len(token_ids) == 1 else "".join(map(push, token_ids))
        return OutputUpdate([TextDelta(text)] if text else [], len(token_ids))

    @property
    def _is_reasoning(self) -> bool:
        return self._parser is not None and self._parser.is_reasoning

    @property
    def _found(self) -> str | None:
        return None if self._stop is None else self._stop.found

    @property
    def _has_stopped(self) -> bool:
        return self._stop is not None and self._stop.found is not None

    def _detokenize(self, token_id: int) -> list[RawDelta]:
        """Detokenizes one token; a dialect's marker ends an incomplete character."""
        if token_id not in self._marker_ids:
            text = self._detokenizer.push(token_id)
            return [TextDelta(text)] if text else []
        assert self._tokenizer is not None
        rest = self._detokenizer.finish()
        marker = SpecialToken(token_id, self._tokenizer.token_bytes(token_id).decode("utf-8", "replace"))
        return [TextDelta(rest), marker] if rest else [marker]

    def _process(self, raw: list[RawDelta], count: int) -> list[AnswerDelta]:
        """Passes token number `count` through stop strings, which are armed from `min_tokens` on, and parser."""
        if self._stop is not None:
            self._stop.is_armed = count >= self._min_tokens
            raw = self._apply_stop(raw)
        return self._parse(raw)

    def _apply_stop(self, raw: list[RawDelta]) -> list[RawDelta]:
        assert self._stop is not None
        shown = []
        for delta in raw:
            shown += self._stop.push(delta)
            if self._stop.found is not None:
                break
        return shown

    def _parse(self, raw: list[RawDelta]) -> list[AnswerDelta]:
        if self._parser is None:
            return [delta for delta in raw if isinstance(delta, TextDelta)]
        if len(raw) == 1:
            return self._parser.push(raw[0])
        return [delta for each in raw for delta in self._parser.push(each)]

    def _finish(
        self,
        deltas: list[AnswerDelta],
        num_tokens: int,
        num_reasoning_tokens: int,
        finish_reason: EndReason,
        stop_reason: str | int | None,
    ) -> OutputUpdate:
        """Returns the last update, with all pending text."""
        if self._stop is not None:
            deltas += self._parse(self._stop.finish())
        if self._parser is not None:
            deltas += self._parser.finish()
            if finish_reason == "stop" and self._parser.num_calls:
                finish_reason = "tool_calls"
        dropped = 0 if self._parser is None else self._parser.num_dropped
        return OutputUpdate(merge_deltas(deltas), num_tokens, finish_reason, stop_reason, num_reasoning_tokens, dropped)
