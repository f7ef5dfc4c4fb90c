"""Tokenises the texts of all requests of a front, within bounds."""

import array
import asyncio
import dataclasses
import sys
from concurrent.futures import ThreadPoolExecutor

from dsv3.server.workers import BOUNDS, SMALL_BYTES, WAIT_S, Workers
from dsv3.text.tokenizer import Tokenizer

# Shorter texts are encoded on the event loop: the hand-over to a thread would cost more.
_INLINE_CHARS = 1024
# A text with more characters per token of the limit is most likely too long, and is counted before it is encoded.
_LIKELY_CHARS_PER_TOKEN = 8


class Encoder:
    """A thread for small texts and one for large ones: encoding never takes more than two cores from the engine.

    Large texts are not cut into pieces, because no cut is exact for every tokenizer. So one is encoded at a time.
    """

    def __init__(self, wait_s: float | None = WAIT_S):
        self._threads = [ThreadPoolExecutor(1, name) for name in ("encode-small", "encode-large")]
        bounds = dataclasses.replace(BOUNDS, wait_s=wait_s)
        self._small, self._large = Workers(self._threads[:1], bounds), Workers(self._threads[1:], bounds)

    async def encode(
        self, tokenizer: Tokenizer, text: str, add_special_tokens: bool, limit: int
    ) -> array.array[int] | None:
        """Returns the token ids of a text, None where they are surely more than `limit`.

        Raises TokenizerError for a text that cannot be encoded, WorkersBusy.
        """
        if len(text) <= _INLINE_CHARS:
            return _encode(tokenizer, text, add_special_tokens, limit)
        nbytes, loop = sys.getsizeof(text), asyncio.get_running_loop()
        workers = self._small if nbytes <= SMALL_BYTES else self._large
        return await workers.run(
            nbytes, lambda thread: loop.run_in_executor(thread, _encode, tokenizer, text, add_special_tokens, limit)
        )

    async def close(self) -> None:
        """Gives up what waits; texts that are being encoded are still encoded."""
        await asyncio.gather(self._small.close(), self._large.close())
        for thread in self._threads:
            thread.shutdown(wait=False, cancel_futures=True)


def _encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool, limit: int) -> array.array[int] | None:
    if len(text) > _LIKELY_CHARS_PER_TOKEN * limit and tokenizer.surely_exceeds(text, limit):
        return None
    return array.array("i", tokenizer.encode(text, add_special_tokens))
