"""Turns what a trace says of a prompt into tokens and prefix keys, as a front prepares them."""

import numpy as np

from dsv3.cache.keys import Key, extend_keys, root_key
from dsv3.prepare import PreparedRequest
from dsv3.sampling_params import SamplingParams
from dsv3.simulate.traffic import Ask

VOCAB = 2**17
_SAMPLING = SamplingParams(temperature=0, ignore_eos=True)
_ROOT = root_key("", "")


def prepared(ask: Ask, number: int, max_model_len: int) -> PreparedRequest | None:
    """Returns a request with tokens that are equal where its runs are; None where its prompt leaves no room.

    A run's tokens are one number but the first, so that nothing is drawn per token: keys chain what is before.
    """
    count = ask.prompt
    if count >= max_model_len:
        return None
    tokens, at = np.empty(count, np.int32), 0
    for run in ask.content:
        tokens[at : at + run.tokens] = run.name % VOCAB
        tokens[at] = run.name // VOCAB % VOCAB
        at += run.tokens
    keys: list[Key] = []
    extend_keys(_ROOT, keys, tokens)
    return PreparedRequest(
        request_id=number,
        sampling=_SAMPLING,
        tokens=tokens.tobytes(),
        root=_ROOT,
        keys=b"".join(keys),
        max_length=min(count + ask.answer, max_model_len),
        stop_ids=(),
    )
