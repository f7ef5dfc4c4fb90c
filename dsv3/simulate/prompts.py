"""Turns what a trace says of a prompt into tokens and prefix keys, as a front prepares them."""

import functools

import numpy as np

from dsv3.cache.keys import Key, extend_keys, root_key
from dsv3.prepare import PreparedRequest
from dsv3.sampling_params import SamplingParams
from dsv3.simulate.traffic import Ask, Run

VOCAB = 2**17
_SAMPLING = SamplingParams(temperature=0, ignore_eos=True)
_ROOT = root_key("", "")


@functools.lru_cache(maxsize=2**12)
def _begun(run: Run) -> tuple[Key, ...]:
    """Returns the keys of the pages that a prompt's first run fills: many prompts begin alike."""
    keys: list[Key] = []
    extend_keys(_ROOT, keys, np.frombuffer(_tokens(run), "<i4"))
    return tuple(keys)


def _tokens(run: Run) -> bytes:
    """Returns a run's tokens: one number but the first, so that nothing is drawn per token. Keys chain the rest."""
    first, rest = (number.to_bytes(4, "little") for number in (run.name // VOCAB % VOCAB, run.name % VOCAB))
    return first + rest * (run.tokens - 1)


def prepared(ask: Ask, number: int, max_model_len: int) -> tuple[PreparedRequest, tuple[Key, ...]] | None:
    """Returns a request with tokens that are equal where its runs are; None where its prompt leaves no room.

    Its prefix keys come with it as objects of their own: all that remember them share these, which saves two thirds of
    the memory and a hash per look.
    """
    count = ask.prompt
    if count >= max_model_len:
        return None
    tokens = b"".join(map(_tokens, ask.content))
    keys = list(_begun(ask.content[0]))
    extend_keys(_ROOT, keys, np.frombuffer(tokens, "<i4"))
    request = PreparedRequest(
        request_id=number,
        sampling=_SAMPLING,
        tokens=tokens,
        root=_ROOT,
        keys=b"".join(keys),
        max_length=min(count + ask.answer, max_model_len),
        stop_ids=(),
    )
    return request, tuple(keys)
