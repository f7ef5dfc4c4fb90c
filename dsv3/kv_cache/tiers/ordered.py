"""The tiers of a process that does not schedule: they do what they are ordered, and tell what comes of it."""

import itertools
import logging
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np

from dsv3.kv_cache.events.record import Note, Record, Removed, Stored
from dsv3.kv_cache.tiers.orders import Answer, Bring, Change, Clear, Count, Drop, Forget, Load, Order, Rest, Told
from dsv3.kv_cache.tiers.tiers import Batch, Tiers

# One message tells so many things, and each so many keys: at most 36 MB, of the 64 MiB that fit a frame. A memory that
# is found again at the start tells all of its keys.
_MOST_AT_ONCE, _MOST_KEYS = 256, 4096
_log = logging.getLogger(__name__)


class Happened(Record):
    """What has happened to the tiers, until a thread tells it; nothing is lost, as a mirror is kept of it."""

    def __init__(self) -> None:
        super().__init__(0)
        self.waiting: queue.SimpleQueue[Answer | Change] = queue.SimpleQueue()

    def note(self, note: Note) -> None:
        """Has a change told."""
        if isinstance(note, Stored | Removed):
            for keys in itertools.batched(note.keys, _MOST_KEYS):
                self.waiting.put(Change(note.medium, isinstance(note, Stored), list(keys)))

    def take_all(self) -> list[Answer | Change]:
        """Waits for something, and returns what there is."""
        taken = [self.waiting.get()]
        while len(taken) < _MOST_AT_ONCE and not self.waiting.empty():
            taken.append(self.waiting.get())
        return taken


class OrderedTiers:
    """Carries orders out on `tiers`, whose arena and store tell `happened`. `tell` sends a message and never waits.

    One thread calls `begin` and `taken`, one calls `end`.
    """

    def __init__(self, tiers: Tiers, happened: Happened, tell: Callable[[bytes], None]) -> None:
        self.tiers, self._happened, self._send = tiers, happened, tell
        self._loads: dict[int, Future[Batch]] = {}
        threading.Thread(target=self._tell, name="kv-tell", daemon=True).start()

    def begin(self, orders: Iterable[Order]) -> None:
        """Begins what is ordered before a step's launch; waits for nothing."""
        for order in orders:
            match order:
                case Load():
                    self._loads[order.number] = load = self.tiers.begin_load(order.keys, order.bucket)
                    self._answer(order.number, load, lambda batch: batch.num_pages)
                case Count():
                    self._answer(order.number, self.tiers.begin_count(order.keys), int)
                case Bring():
                    self._answer(order.number, self.tiers.begin_bring(order.address, order.keys), int)
                case Drop():
                    if (dropped := self._loads.pop(order.number, None)) is not None:
                        dropped.cancel()
                case Rest():
                    self.tiers.rest()

    def taken(self, number: int) -> np.ndarray:
        """Returns the values of a batch that has been told of, uint8 `[bucket, value_bytes]`, and lets go of it."""
        return self._loads.pop(number).result(0).values

    def end(self, orders: Iterable[Order]) -> None:
        """Does what is ordered behind a step's results."""
        for order in orders:
            match order:
                case Forget():
                    self.tiers.forget(order.keys)
                case Clear():
                    self.tiers.clear()

    def _answer(self, number: int, work: "Future[Any]", count: Callable[[Any], int]) -> None:
        """Tells how much has come of an order once it is done; nothing where it failed."""

        def done(future: "Future[Any]") -> None:
            if future.cancelled():
                return
            if (error := future.exception()) is not None:
                _log.error("pages could not be loaded; they are computed", exc_info=error)
            came = 0 if error is not None else count(future.result())
            if not came:
                self._loads.pop(number, None)  # nobody will ask for it
            self._happened.waiting.put(Answer(number, came))

        work.add_done_callback(done)

    def _tell(self) -> None:
        encoder = msgspec.msgpack.Encoder()
        while True:
            happened = self._happened.take_all()
            self._send(encoder.encode(Told(happened, self.tiers.counts(), self.tiers.rates)))
