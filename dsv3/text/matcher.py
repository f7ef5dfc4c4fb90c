"""Runs grammars: computes the bitmask of the tokens that may come next in an answer.

llguidance does the work. It never raises: a grammar that is invalid or needs too much work leaves a matcher with an
error. Masks are computed without the interpreter lock.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import llguidance
import numpy as np
from llguidance.numpy import fill_next_token_bitmask_par, fill_next_token_bitmask_par_with_draft_tokens

_WORD_BITS = 32
# Limits on the work of one grammar. llguidance's own allow 250,000 lexer states (2 kB each) and 50,000 parser items per
# mask, 2,000 of them in a row: with these an ambiguous rule (s: s s | /[a-z]/) took 1.5 s per mask, with ours 50 ms. A
# lexer takes 14 ms per mask while it makes new states.
_MAX_LEXER_STATES, _MAX_GRAMMAR_SIZE = 20_000, 200_000
_MAX_ITEMS, _MAX_ROW_ITEMS = 10_000, 1_000
_MAX_ERROR_CHARS = 300
# Rows whose masks one thread computes: they take 14 us each; waking other threads takes longer.
_MAX_ALONE = 16


class GrammarError(ValueError):
    """An invalid grammar; the text quotes no more of it than a keyword."""


class VocabularyError(ValueError):
    """A tokenizer that llguidance cannot use."""


class GrammarVocabulary:
    """The tokens of a model, as llguidance needs them.

    A mask has `words` words of 32 bits, for `vocab_size` tokens; `everything` is the one of all tokens. The tokens
    `end_ids` end an answer. Raises VocabularyError for a `tokenizer.json` that llguidance does not support.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, end_ids: Sequence[int]):
        self.words = -(-vocab_size // _WORD_BITS)
        bits = np.arange(self.words * _WORD_BITS) < vocab_size
        self.everything = np.packbits(bits, bitorder="little").view(np.uint32)
        self.end_ids = tuple(i for i in end_ids if i < vocab_size)
        known = _num_tokens(tokenizer_json)
        try:
            self._tokens = llguidance.LLTokenizer(tokenizer_json, max(vocab_size, known), list(self.end_ids) or None)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic inside the library is not an Exception
            raise VocabularyError(f"tokenizer.json: llguidance does not support it ({error})") from None
        self.own_words = -(-self._tokens.vocab_size // _WORD_BITS)
        self._executor = llguidance.LLExecutor()

    @classmethod
    def from_file(cls, path: Path, vocab_size: int, end_ids: Sequence[int]) -> "GrammarVocabulary":
        """Reads a `tokenizer.json`; raises VocabularyError as the constructor does, OSError."""
        return cls(path.read_text("utf-8"), vocab_size, end_ids)

    def compile(self, grammar: str) -> "Matcher":
        """Compiles a grammar; returns a matcher at the beginning of an answer. Raises GrammarError.

        The first mask has been computed, so that the matcher's copies share its states.
        """
        limits = llguidance.LLParserLimits(
            max_lexer_states=_MAX_LEXER_STATES,
            max_grammar_size=_MAX_GRAMMAR_SIZE,
            step_max_items=_MAX_ITEMS,
            max_items_in_row=_MAX_ROW_ITEMS,
            verbose_errors=False,
        )
        matcher = Matcher(llguidance.LLMatcher(self._tokens, grammar, log_level=0, limits=limits))
        mask = np.zeros((1, 1, self.words), np.uint32)
        if matcher.error is None:
            self.fill([(matcher, [])], mask)
        if matcher.error is not None:
            raise GrammarError(matcher.error)
        return matcher

    def fill(self, rows: list[tuple["Matcher", list[int]]], masks: np.ndarray) -> None:
        """Computes the masks `[n, S, words]` uint32 of `rows`, each a matcher and up to S - 1 drafts.

        Mask i of a row is for the token after its first i drafts. Masks after a refused draft stay as they are: that
        draft cannot be accepted, so they are not used. A matcher that needs too much work has an `error`, and its mask
        is undefined.
        """
        shape, width = (len(rows) * masks.shape[1], self.own_words), masks.shape[1]
        own = masks.view(np.int32).reshape(shape) if self.own_words == self.words else np.full(shape, -1, np.int32)
        plain = [(m.inner, i * width) for i, (m, drafts) in enumerate(rows) if not drafts]
        if len(plain) > _MAX_ALONE:
            fill_next_token_bitmask_par(self._executor, plain, own)
        else:
            start, nbytes = own.ctypes.data, 4 * self.own_words
            for matcher, row in plain:
                matcher.unsafe_compute_mask_ptr(start + row * nbytes, nbytes)
        ahead = [(m.inner, i * width, drafts) for i, (m, drafts) in enumerate(rows) if drafts]
        for part in [ahead] if len(ahead) > _MAX_ALONE else [[row] for row in ahead]:
            fill_next_token_bitmask_par_with_draft_tokens(self._executor, part, own)
        if self.own_words != self.words:
            masks[:] = own.view(np.uint32)[:, : self.words].reshape(masks.shape)


class Matcher:
    """The state of an answer in its grammar: a function of the answer's tokens."""

    def __init__(self, inner: llguidance.LLMatcher):
        self.inner = inner
        self.seen = 0

    def copy(self) -> "Matcher":
        copy = Matcher(self.inner.deep_copy())
        copy.seen = self.seen
        return copy

    def advance(self, answer: np.ndarray) -> None:
        """Consumes the new tokens of an answer `[n]`, which has all its tokens."""
        if len(answer) > self.seen:
            self.inner.consume_tokens(answer[self.seen :].tolist())
            self.seen = len(answer)

    @property
    def error(self) -> str | None:
        """The error that has stopped the matcher; None without one."""
        if not self.inner.is_error():
            return None
        return self.inner.get_error().partition("\n")[0][:_MAX_ERROR_CHARS]  # further lines show the grammar

    @property
    def is_over(self) -> bool:
        """Whether the answer must end; also true after an `error`."""
        return bool(self.inner.is_stopped())


def without_tokens(mask: np.ndarray, ids: Iterable[int]) -> np.ndarray:
    """Returns a mask `[words]` without some tokens; unchanged where it allows no others."""
    allowed = [i for i in ids if int(mask[i // _WORD_BITS]) >> i % _WORD_BITS & 1]
    if not allowed:  # nearly always: an end is seldom allowed
        return mask
    left = mask.copy()
    for i in allowed:
        left[i // _WORD_BITS] &= ~np.uint32(1 << i % _WORD_BITS)
    return left if left.any() else mask


def _num_tokens(tokenizer_json: str) -> int:
    """Returns how many ids a tokenizer.json has; raises VocabularyError for another file."""
    try:
        parts = json.loads(tokenizer_json)
        ids = [*parts["model"]["vocab"].values(), *(token["id"] for token in parts["added_tokens"])]
        return max(ids, default=-1) + 1
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise VocabularyError(f"tokenizer.json: {error!r}") from None
