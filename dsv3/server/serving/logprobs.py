"""Log-probabilities as JSON, in the two shapes of OpenAI's API; objects for msgspec would take ten times as long."""

from collections.abc import Callable, Sequence

import msgspec

from dsv3.scheduler.request import PromptLogprobs, TokenLogprobs
from dsv3.text.tokenizer import Tokenizer

# JSON has no infinity; vLLM's stand-in for a probability of 0.
_LEAST = b"-9999.0"

_to_json: Callable[[object], bytes] = msgspec.json.Encoder().encode


class _Token(msgspec.Struct, frozen=True, gc=False):
    """A token's text as JSON, its characters, and what stands around the number in a record of the chat shape."""

    name: bytes
    num_chars: int
    head: bytes
    tail: bytes


class LogprobEncoder:
    """Makes the JSON of log-probabilities; remembers that of each token it has met, so at most of the vocabulary."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._known: dict[int, _Token] = {}

    def chat(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> tuple[bytes]:
        """Returns records, commas between them: a record per token, with its bytes and its alternatives."""
        records = []
        for token_id, entry in zip(ids, logprobs, strict=True):
            own, *numbers = _numbers([entry.logprob, *entry.top_logprobs])
            tokens = [self._token(i) for i in entry.top_ids]
            top = b"},".join([t.head + number + t.tail for t, number in zip(tokens, numbers, strict=True)])
            token = self._token(token_id)
            records.append(
                b'%s%s%s,"top_logprobs":[%s%s]}' % (token.head, own, token.tail, top, b"}" if tokens else b"")
            )
        return (b",".join(records),)

    def completion(
        self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs], offset: int
    ) -> tuple[bytes, bytes, bytes, bytes]:
        """Returns the items of four parallel lists: tokens, their numbers, their alternatives, where they stand.

        `offset` is where in the text the first of these tokens stands.
        """
        tokens = [self._token(token_id) for token_id in ids]
        top, offsets = [], []
        for token, entry in zip(tokens, logprobs, strict=True):
            own, *numbers = _numbers([entry.logprob, *entry.top_logprobs])
            named = {self._token(i).name: number for i, number in zip(entry.top_ids, numbers, strict=True)}
            named[token.name] = own
            top.append(b"{%s}" % b",".join([b"%s:%s" % item for item in named.items()]))
            offsets.append(b"%d" % offset)
            offset += token.num_chars
        values = _numbers([entry.logprob for entry in logprobs]) if logprobs else []
        return b",".join([t.name for t in tokens]), b",".join(values), b",".join(top), b",".join(offsets)

    def echoed(
        self, prompt: Sequence[int], part: PromptLogprobs, count: int, offset: int
    ) -> tuple[tuple[bytes, bytes, bytes, bytes], int]:
        """Returns the lists of `completion` for a part of the prompt, and the offset behind it.

        The first token, of which nothing can be told, comes with the first part. Each has `count` alternatives at most.
        """
        ids = prompt[part.start : part.start + len(part)]
        before = self.num_chars(prompt[:1]) if part.start == 1 else 0
        scores = [TokenLogprobs(e.logprob, e.top_ids[:count], e.top_logprobs[:count]) for e in part.tokens()]
        columns = self.completion(ids, scores, offset + before)
        end = offset + before + self.num_chars(ids)
        if part.start > 1:
            return columns, end
        first = self._token(prompt[0]).name, b"null", b"null", b"%d" % offset
        names, values, top, offsets = (a + b"," + b if b else a for a, b in zip(first, columns, strict=True))
        return (names, values, top, offsets), end

    def prompt_records(self, prompt: Sequence[int], part: PromptLogprobs, count: int) -> bytes:
        """Returns vLLM's records for a part of the prompt: by token id its number, its rank and its text."""
        ids = prompt[part.start : part.start + len(part)]
        records = [b"null"] if part.start == 1 else []
        for token_id, rank, entry in zip(ids, part.token_ranks(), part.tokens(), strict=True):
            found = {i: (x, at) for at, (i, x) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), 1)}
            found = dict(list(found.items())[:count])
            found.setdefault(token_id, (entry.logprob, rank))
            numbers = _numbers([logprob for logprob, _ in found.values()])
            each = zip(found, numbers, (rank for _, rank in found.values()), strict=True)
            records.append(b"{%s}" % b",".join([self._record(*fields) for fields in each]))
        return b",".join(records)

    def _record(self, token_id: int, number: bytes, rank: int) -> bytes:
        name = self._token(token_id).name
        return b'"%d":{"logprob":%s,"rank":%d,"decoded_token":%s}' % (token_id, number, rank, name)

    def num_chars(self, ids: Sequence[int]) -> int:
        """Returns how far tokens move the offset of the next one."""
        return sum(self._token(token_id).num_chars for token_id in ids)

    def _token(self, token_id: int) -> _Token:
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._make(token_id)
        return known

    def _make(self, token_id: int) -> _Token:
        text, data = f"token_id:{token_id}", b""
        if self._tokenizer is not None:
            data = self._tokenizer.token_bytes(token_id)
            text = data.decode("utf-8", "replace")
        name = _to_json(text)
        return _Token(name, len(text), b'{"token":%s,"logprob":' % name, b',"bytes":' + _to_json(list(data)))


def _numbers(values: list[float]) -> list[bytes]:
    """Returns the JSON of numbers; msgspec writes null for those that JSON does not have."""
    return [_LEAST if text == b"null" else text for text in _to_json(values)[1:-1].split(b",")]
