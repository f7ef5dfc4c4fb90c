"""Turns what a trace says of a prompt into tokens and prefix keys, such as a front prepares."""

import functools
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from dsv3.kv_cache.page_keys import KEY_BYTES, Key, root_key
from dsv3.sampling_params import SamplingParams
from dsv3.scheduler.request import PreparedRequest
from tools.simulate.traffic import TokenRun

VOCAB = 2**17
_SAMPLING = SamplingParams(temperature=0, ignore_eos=True)
_ROOT = root_key("", "")
_PLACE_BYTES = 4  # the end of a key


class SimulatedRequest(NamedTuple):
    """A request on its way to an instance: what its prompt of `tokens` is made of, and where its answer ends."""

    number: int
    content: tuple[TokenRun, ...]
    tokens: int
    max_length: int


def keys_of(content: Sequence[TokenRun], page_size: int) -> list[Key]:
    """Returns the prefix keys of a prompt's full pages: equal ones where a page's tokens, and all before, are equal.

    They are not made of the tokens, as a front's are: that took 40 us per prompt. One hash per run covers what lies
    before, and the page's place follows.
    """
    chain, known = _begun(content[0], page_size)
    keys, start = list(known), content[0].tokens
    for run in content[1:]:
        chain = _spell(chain, run, start, keys, page_size)
        start += run.tokens
    return keys


@functools.lru_cache(maxsize=2**12)
def _begun(run: TokenRun, page_size: int) -> tuple[bytes, tuple[Key, ...]]:
    """Returns what stands for a first run, and the keys of the pages that it fills.

    Many prompts begin alike. All that remember keys share the objects, which saves two thirds of the memory and a hash
    per look.
    """
    keys: list[Key] = []
    return _spell(_ROOT, run, 0, keys, page_size), tuple(keys)


def _spell(before: bytes, run: TokenRun, start: int, keys: list[Key], page_size: int) -> bytes:
    """Appends the keys of the pages that end in a run; returns what stands for it and all `before` it."""
    first, rest = _numbers(run)
    begun = before + start.to_bytes(8, "little") + first
    if (start + 1) % page_size == 0:  # this page has only the first token, which other runs may have, too
        keys += _numbered(hashlib.sha256(begun).digest(), len(keys), (start + 1) // page_size)
    chain = hashlib.sha256(begun + rest).digest()
    keys += _numbered(chain, len(keys), (start + run.tokens) // page_size)
    return chain


def _numbered(chain: bytes, first: int, stop: int) -> list[Key]:
    """Returns the keys of the pages from number `first` on, up to `stop`."""
    head = chain[: KEY_BYTES - _PLACE_BYTES]
    return [head + place for place in _places(1 << stop.bit_length())[first:stop]]


@functools.cache
def _places(count: int) -> tuple[bytes, ...]:
    """Returns the ends of the keys of `count` pages."""
    return tuple(place.to_bytes(_PLACE_BYTES, "little") for place in range(count))


def _numbers(run: TokenRun) -> tuple[bytes, bytes]:
    """Returns a run's first token, and that of which all others are: nothing is drawn per token."""
    return (run.name // VOCAB % VOCAB).to_bytes(4, "little"), (run.name % VOCAB).to_bytes(4, "little")


def _tokens(run: TokenRun) -> bytes:
    first, rest = _numbers(run)
    return first + rest * (run.tokens - 1)


def request_of(asked: SimulatedRequest) -> PreparedRequest:
    """Returns a request with tokens that are equal where its runs are; its keys are not in it (`keys_of`)."""
    return PreparedRequest(
        request_id=asked.number,
        sampling=_SAMPLING,
        tokens=b"".join(map(_tokens, asked.content)),
        root=_ROOT,
        keys=b"",
        max_length=asked.max_length,
        stop_ids=(),
    )
