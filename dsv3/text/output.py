"""From sampled token ids to the text a user sees: incremental UTF-8, stop strings, special tokens."""

import codecs
import dataclasses
from collections.abc import Sequence

from dsv3.request import FinishReason
from dsv3.sampling_params import SamplingParams
from dsv3.text.stop import StopMatcher
from dsv3.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, slots=True)
class TextDelta:
    """New text, and the number of the pushed tokens that count (those after a stop string do not).

    `finish_reason` is set on the last one; `stop_reason` names the stop string, or the stop token other than the
    tokenizer's end-of-sequence, that ended the text.
    """

    text: str
    num_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class TextStream:
    """Turns the tokens of one sequence into text as they come; linear in the tokens.

    Text is held back while it may be part of a UTF-8 character or of a stop string. A stop string ends the text even
    if the engine goes on: the caller then aborts the engine's request. The stop string, and the stop token that ended
    the sequence, are left out unless `include_stop_str_in_output`. Without a tokenizer the text is empty.
    """

    def __init__(self, tokenizer: Tokenizer | None, sampling: SamplingParams):
        if tokenizer is None and sampling.stop:
            raise ValueError("stop strings need a tokenizer, and this model has none; use stop_token_ids")
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._matcher = StopMatcher(sampling.stop)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._skipped = tokenizer.special_token_ids if tokenizer and sampling.skip_special_tokens else frozenset()
        self._held = ""
        self._count = 0

    def push(
        self,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None = None,
        stop_token_id: int | None = None,
    ) -> TextDelta:
        """Takes the engine's next tokens; `stop_token_id`, if any, is the last of them."""
        hide_last = stop_token_id is not None and not self._sampling.include_stop_str_in_output
        pieces: list[str] = []
        for i, token_id in enumerate(token_ids):
            self._count += 1
            if hide_last and i == len(token_ids) - 1:
                break
            stop = self._take(self._text_of(token_id), pieces)
            if stop is not None:
                return TextDelta("".join(pieces), i + 1, "stop", stop)
        if finish_reason is not None:
            stop = self._take(self._utf8.decode(b"", True), pieces)
            if stop is not None:
                return TextDelta("".join(pieces), len(token_ids), "stop", stop)
            pieces.append(self._held)
            self._held = ""
        return TextDelta("".join(pieces), len(token_ids), finish_reason, self._stop_reason(stop_token_id))

    def _text_of(self, token_id: int) -> str:
        if self._tokenizer is None or token_id in self._skipped:
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def _take(self, text: str, pieces: list[str]) -> str | None:
        """Moves what may be shown into `pieces`; returns the stop string that ended the text."""
        position = 0
        while (match := self._matcher.find(text, position)) is not None:
            position, stop = match
            if self._count >= self._sampling.min_tokens:
                shown = self._held + text[:position]
                pieces.append(shown if self._sampling.include_stop_str_in_output else shown[: -len(stop)])
                self._held = ""
                return stop
        text = self._held + text
        cut = len(text) - self._matcher.held
        pieces.append(text[:cut])
        self._held = text[cut:]
        return None

    def _stop_reason(self, stop_token_id: int | None) -> int | None:
        is_eos = self._tokenizer is not None and stop_token_id == self._tokenizer.eos_token_id
        return None if is_eos else stop_token_id
