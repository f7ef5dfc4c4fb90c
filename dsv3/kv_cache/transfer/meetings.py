"""Meetings: requests that a router hands to two instances at once, under a number (SGLang's `bootstrap_room`).

The prefill instance notes how far the request of a meeting is, and the decode instance asks (`client.py`).
Pages are named by their content and not by meetings, so a number that is wrong costs time and no answer.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal

Stage = Literal["unknown", "queued", "begun", "gone"]
"""No request has come; it waits; its pages are there or come step by step; it has left without having begun."""

MAX_MEETING = 2**63 - 1
_MOST_MEETINGS = 2**16


class Meetings:
    """The meetings of an instance whose processes give pages at `addresses`; any thread may ask.

    The oldest are forgotten where there are too many. Requests without a meeting have None, which changes nothing.
    """

    def __init__(self, addresses: Sequence[str] = ()) -> None:
        self.addresses = list(addresses)
        self._lock = threading.Lock()
        self._stages: OrderedDict[int, Stage] = OrderedDict()

    def open(self, meeting: int | None) -> None:
        """Notes that a request waits; a meeting that has begun stays so, as several prompts may share it."""
        if meeting is None:
            return
        with self._lock:
            if self._stages.get(meeting) != "begun":
                self._note(meeting, "queued")

    def begin(self, meeting: int | None) -> None:
        """Notes that a request has a slot."""
        if meeting is None:
            return
        with self._lock:
            self._note(meeting, "begun")

    def leave(self, meeting: int | None) -> None:
        """Notes that a request has ended, wherever it was."""
        if meeting is None:
            return
        with self._lock:
            if self._stages.get(meeting) == "queued":
                self._note(meeting, "gone")

    def stages(self, meetings: Sequence[int]) -> list[Stage]:
        """Returns how far each of `meetings` is."""
        with self._lock:
            return [self._stages.get(meeting, "unknown") for meeting in meetings]

    def _note(self, meeting: int, stage: Stage) -> None:
        self._stages[meeting] = stage
        if len(self._stages) > _MOST_MEETINGS:
            self._stages.popitem(last=False)
