"""Converts prompts of a trace to tokens and prefix keys, in place of an API server."""

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
_SUFFIX_BYTES = 4  # the end of a key


class SimulatedRequest(NamedTuple):
    """A request for an instance: the content of its prompt of `tokens`, and the length at which its answer ends."""

    number: int
    content: tuple[TokenRun, ...]
    tokens: int
    max_length: int


def page_keys(content: Sequence[TokenRun], page_size: int) -> list[Key]:
    """Returns the prefix keys of a prompt's full pages; keys are equal if and only if all tokens up to the page are.

    An API server hashes the tokens of each page. For speed, this hashes each run together with all before it, and
    appends the page's number.
    """
    chain, known = _first_run_keys(content[0], page_size)
    keys, start = list(known), content[0].tokens
    for run in content[1:]:
        chain = _append_keys(chain, run, start, keys, page_size)
        start += run.tokens
    return keys


@functools.lru_cache(maxsize=2**12)
def _first_run_keys(run: TokenRun, page_size: int) -> tuple[bytes, tuple[Key, ...]]:
    """Returns the hash of a first run, and the keys of the pages that it fills.

    Many prompts begin alike; the cache lets them share key objects, which saves memory and hashing.
    """
    keys: list[Key] = []
    return _append_keys(_ROOT, run, 0, keys, page_size), tuple(keys)


def _append_keys(before: bytes, run: TokenRun, start: int, keys: list[Key], page_size: int) -> bytes:
    """Appends the keys of the pages that end in a run; returns the hash of the run and all `before` it."""
    first, rest = _token_ids(run)
    begun = before + start.to_bytes(8, "little") + first
    if (start + 1) % page_size == 0:  # this page has only the run's first token, which other runs may share
        keys += _number_keys(hashlib.sha256(begun).digest(), len(keys), (start + 1) // page_size)
    chain = hashlib.sha256(begun + rest).digest()
    keys += _number_keys(chain, len(keys), (start + run.tokens) // page_size)
    return chain


def _number_keys(chain: bytes, first: int, stop: int) -> list[Key]:
    """Returns the keys of pages `first` to `stop`."""
    head = chain[: KEY_BYTES - _SUFFIX_BYTES]
    return [head + number for number in _suffixes(1 << stop.bit_length())[first:stop]]


@functools.cache
def _suffixes(count: int) -> tuple[bytes, ...]:
    """Returns the last bytes of the keys of `count` pages."""
    return tuple(number.to_bytes(_SUFFIX_BYTES, "little") for number in range(count))


def _token_ids(run: TokenRun) -> tuple[bytes, bytes]:
    """Returns a run's first token, and the token that all its others repeat."""
    return (run.name // VOCAB % VOCAB).to_bytes(4, "little"), (run.name % VOCAB).to_bytes(4, "little")


def _tokens(run: TokenRun) -> bytes:
    first, rest = _token_ids(run)
    return first + rest * (run.tokens - 1)


def prepare_request(request: SimulatedRequest) -> PreparedRequest:
    """Returns the engine's request, whose tokens follow from the runs; it has no keys (see `page_keys`)."""
    return PreparedRequest(
        request_id=request.number,
        sampling=_SAMPLING,
        tokens=b"".join(map(_tokens, request.content)),
        root=_ROOT,
        keys=b"",
        max_length=request.max_length,
        stop_ids=(),
    )
