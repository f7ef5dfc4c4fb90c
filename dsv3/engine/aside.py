"""What a follower does for a kind of job beside running programs, and how it tells the leader's planner of it."""

import threading
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

Tell = Callable[[bytes], None]
"""Sends the planner of a kind a message. It waits for nobody, and any thread may call it."""
Hear = Callable[[int, bytes], None]
"""Takes a message from the process of this id; the thread that receives from this process calls it."""


class Aside(Protocol):
    """A follower's half of a kind whose commands ask for more than programs."""

    def prepared(self, command: Any) -> Any:
        """Begins what a command asks for; returns the command to launch. The launching thread calls it."""

    def take(self, command: Any, results: list[np.ndarray]) -> None:
        """Takes in what came back of a job. The thread that reads results calls it, step after step."""


class News:
    """What followers tell planners, by kind. What comes before a planner listens is kept for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: dict[str, Hear] = {}
        self._kept: dict[str, list[tuple[int, bytes]]] = {}

    def put(self, kind: str, process_id: int, body: bytes) -> None:
        """Hands a message to the planner of `kind`."""
        with self._lock:
            if kind in self._listeners:
                self._listeners[kind](process_id, body)
            else:
                self._kept.setdefault(kind, []).append((process_id, body))

    def listen(self, kind: str, hear: Hear) -> None:
        """Has `hear` called with each message for the planner of `kind`, one at a time and in their order."""
        with self._lock:
            for process_id, body in self._kept.pop(kind, []):
                hear(process_id, body)
            self._listeners[kind] = hear
