"""Takes what fronts ask for between two steps, a slice at a time: no request keeps the others' steps waiting."""

import logging
import traceback
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any, Protocol

from dsv3.engine.look import Look, StepLog
from dsv3.scheduler.prepare import PreparedRequest, fan_out
from dsv3.scheduler.request import InvalidRequest, QueueFull, StepOutputs
from dsv3.server.engine import messages
from dsv3.server.engine.fronts import FrontConnection, FrontConnections

# Sequences taken between two steps: 30 us each, whatever their prompt's length. The rest waits in its frame.
SLICE = 128
_log = logging.getLogger("dsv3.engine")


class EngineLike(Protocol):
    """What the engine's process needs of an engine; `dsv3.engine.engine.Engine` is one."""

    failure: BaseException | None
    log: StepLog

    @property
    def has_work(self) -> bool: ...
    @property
    def room(self) -> int: ...
    def submit(self, request: PreparedRequest) -> None: ...
    def abort(self, request_id: int) -> None: ...
    def flush(self) -> None: ...
    def step(self) -> StepOutputs: ...
    def stats(self) -> Any: ...
    def look(self) -> Look: ...


class Intake:
    """Does what fronts ask for, in the order in which it has come."""

    def __init__(self, engine: EngineLike, fronts: FrontConnections):
        self._engine, self._fronts = engine, fronts
        self._adding: _Adding | None = None  # requests of which a part has been taken

    @property
    def has_work(self) -> bool:
        """Whether `take` has something to do."""
        return self._adding is not None or self._fronts.has_messages

    def take(self) -> bool:
        """Does what has come, up to `SLICE` new sequences; returns whether there was anything."""
        left, changed = SLICE, self._adding is not None
        left -= self._go_on(left)
        if left <= 0:
            return True
        for front, message in self._fronts.take():
            changed = True
            if isinstance(message, messages.Add):
                self._begin(front, message.requests)
                left -= self._go_on(left)
            elif isinstance(message, messages.Flush):
                self._engine.flush()
            elif isinstance(message, messages.Watch):
                front.send(show(self._engine, message))
            else:
                self._abort(front, message)
            if left <= 0:
                break
        return changed

    def _begin(self, front: FrontConnection, requests: list[PreparedRequest]) -> None:
        """Notes requests to take, all or none: nobody else is given the room that they find now."""
        ids = [request.request_id + i for request in requests for i in range(request.sampling.n)]
        if len(ids) > self._engine.room:
            front.send(messages.Rejected(ids, "queue_full", "the queue is full"))
            return
        front.live.update(ids)
        self._adding = _Adding(front, ids, chain.from_iterable(map(fan_out, requests)))

    def _go_on(self, count: int) -> int:
        """Takes up to `count` of the sequences begun with; returns how many it has looked at."""
        if self._adding is None:
            return 0
        done = 0
        for request in islice(self._adding.left, count):
            done += 1
            if (rejection := self._submit(request, self._adding.ids)) is not None:
                self._adding.front.live.difference_update(self._adding.ids)
                self._adding.front.send(rejection)
                self._adding = None
                return done
        if done < count:
            self._adding = None
        return done

    def _submit(self, request: PreparedRequest, ids: list[int]) -> messages.Rejected | None:
        """Hands one sequence to the engine; where it is refused, takes back the others of `ids`."""
        try:
            self._engine.submit(request)
            return None
        except QueueFull as error:
            kind, text = "queue_full", str(error)
        except InvalidRequest as error:
            kind, text = "invalid", str(error)
        except Exception:  # one request may fail only itself
            _log.error("request %d was not taken:\n%s", request.request_id, traceback.format_exc())
            kind, text = "internal", "the engine could not take the request"
        for taken in ids[: ids.index(request.request_id)]:
            self._engine.abort(taken)
        return messages.Rejected(ids, kind, text)

    def _abort(self, front: FrontConnection, message: messages.Abort | None) -> None:
        """Aborts what a front asks for; all of its requests if it has gone."""
        ended = list(front.live) if message is None else message.request_ids
        front.live.difference_update(ended)
        for request_id in ended:
            self._engine.abort(request_id)
        if message is None:
            self._fronts.remove(front)


def show(engine: EngineLike, message: messages.Watch) -> messages.Seen | messages.Profile:
    """Returns what a front has asked to see."""
    if message.what == "look":
        return messages.Seen(engine.look())
    if message.what == "start_profile":
        engine.log.start_profile()
        return messages.Profile([])
    return messages.Profile(engine.log.stop_profile())


class _Adding:
    """Requests that are taken together: the sequences that are left of them, and the ids of all."""

    def __init__(self, front: FrontConnection, ids: list[int], left: Iterator[PreparedRequest]):
        self.front, self.ids, self.left = front, ids, left
