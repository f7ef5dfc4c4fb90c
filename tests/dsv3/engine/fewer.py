"""Engines that compile fewer programs than a server: the toy's tests have all buckets and samplers."""

import contextlib
from collections.abc import Iterator

import pytest

from dsv3.config import engine as config
from dsv3.engine.device.programs import Key, Programs
from dsv3.scheduler.sequence import GREEDY


@contextlib.contextmanager
def one_bucket() -> Iterator[None]:
    """Gives engines that are built inside one size of decode steps, and one of prefill: the largest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "_sizes", lambda start, stop, **_: (stop,))
        yield


@contextlib.contextmanager
def greedy_samplers() -> Iterator[None]:
    """Makes `warm_up` inside leave out what greedy requests without log-probabilities do not need."""

    def is_needed(key: Key) -> bool:
        if key.kind == "sample":
            return key.variant == GREEDY
        return not any(name in key.kind for name in ("sample", "logprobs", "adjust"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Programs, "keys", lambda self: [key for key in self._specs if is_needed(key)])
        yield
