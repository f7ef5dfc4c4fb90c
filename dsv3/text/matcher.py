"""Runs grammars: says which tokens may come next in an answer, a bit for each token of the vocabulary.

llguidance does the work. It never raises: a grammar that it cannot read, or that needs too much work, is an error that
stays. Masks are computed without the interpreter's lock.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import llguidance
import numpy as np
from llguidance.numpy import fill_next_token_bitmask_par, fill_next_token_bitmask_par_with_draft_tokens

_WORD_BITS = 32
# Work that one grammar may cause. llguidance's own bounds allow 250,000 states of a lexer (2 kB each) and 50,000 items
# of a parser per mask, 2,000 of them in a row: with these an ambiguous rule (s: s s | /[a-z]/) took 1.5 s per mask, and
# takes 50 ms with ours. A lexer takes 14 ms per mask, as long as it makes new states.
_MAX_LEXER_STATES, _MAX_GRAMMAR_SIZE = 20_000, 200_000
_MAX_ITEMS, _MAX_ROW_ITEMS = 10_000, 1_000
_MAX_ERROR_CHARS = 300
# Rows whose masks one thread computes: they take 14 us each, and waking others takes longer, on a busy machine by far.
_MAX_ALONE = 16


class GrammarError(ValueError):
    """A grammar that cannot be used; the text says why, and quotes no more of it than a keyword."""


class VocabularyError(ValueError):
    """A tokenizer that grammars cannot be run over."""


class GrammarVocabulary:
    """The tokens of a model, as grammars see them.

    A mask has `words` words of 32 bits, for `vocab_size` tokens. The tokens `end_ids` end an answer. Raises
    VocabularyError for a `tokenizer.json` that llguidance does not take.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, end_ids: Sequence[int]):
        self.words = -(-vocab_size // _WORD_BITS)
        self.end_ids = tuple(i for i in end_ids if i < vocab_size)
        known = _num_tokens(tokenizer_json)
        try:
            self._tokens = llguidance.LLTokenizer(tokenizer_json, max(vocab_size, known), list(self.end_ids) or None)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic inside of the library is no Exception
            raise VocabularyError(f"tokenizer.json: grammars cannot be run over it ({error})") from None
        self.own_words = -(-self._tokens.vocab_size // _WORD_BITS)
        self._executor = llguidance.LLExecutor()

    @classmethod
    def from_file(cls, path: Path, vocab_size: int, end_ids: Sequence[int]) -> "GrammarVocabulary":
        """Reads a `tokenizer.json`; raises VocabularyError as the constructor does, OSError."""
        return cls(path.read_text("utf-8"), vocab_size, end_ids)

    def compile(self, grammar: str) -> "Matcher":
        """Returns a matcher at the beginning of an answer; raises GrammarError.

        It has computed its first mask, so that its copies need not build the same states again.
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

        Mask i of a row is for the token behind its first i drafts. Masks behind a draft that is refused stay as they
        are: that draft cannot be drawn, so nothing behind it counts. A matcher whose work was too much has an `error`
        then, and its mask means nothing.
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
    """Where an answer stands in its grammar: a function of the tokens it has been told of."""

    def __init__(self, inner: llguidance.LLMatcher):
        self.inner = inner
        self.seen = 0

    def copy(self) -> "Matcher":
        """Returns another one at the same place; neither changes the other."""
        copy = Matcher(self.inner.deep_copy())
        copy.seen = self.seen
        return copy

    def advance(self, answer: np.ndarray) -> None:
        """Takes in what is new of an answer `[n]`, all of whose tokens are given."""
        if len(answer) > self.seen:
            self.inner.consume_tokens(answer[self.seen :].tolist())
            self.seen = len(answer)

    @property
    def error(self) -> str | None:
        """Why nothing can be said any more, None as long as all is well."""
        if not self.inner.is_error():
            return None
        return self.inner.get_error().partition("\n")[0][:_MAX_ERROR_CHARS]  # further lines show the grammar

    @property
    def is_over(self) -> bool:
        """Whether nothing may follow but the end; so it is where there is an `error`."""
        return bool(self.inner.is_stopped())

    @property
    def may_end(self) -> bool:
        """Whether the answer is complete as it is."""
        return bool(self.inner.is_accepting())


def without(mask: np.ndarray, ids: Iterable[int]) -> np.ndarray:
    """Returns a mask `[words]` without some tokens, or as it is where it allows no other."""
    held = [i for i in ids if int(mask[i // _WORD_BITS]) >> i % _WORD_BITS & 1]
    if not held:  # nearly always: an end is seldom allowed
        return mask
    left = mask.copy()
    for i in held:
        left[i // _WORD_BITS] &= ~np.uint32(1 << i % _WORD_BITS)
    return left if left.any() else mask


def _num_tokens(tokenizer_json: str) -> int:
    """Returns how many ids a tokenizer has; raises VocabularyError where it is none."""
    try:
        parts = json.loads(tokenizer_json)
        ids = [*parts["model"]["vocab"].values(), *(token["id"] for token in parts["added_tokens"])]
        return max(ids, default=-1) + 1
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise VocabularyError(f"tokenizer.json: {error!r}") from None
