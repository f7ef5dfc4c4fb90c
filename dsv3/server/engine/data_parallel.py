"""One API server's client of several independent engines: balances requests, and moves those of an engine that dies.

Each engine has its own process, devices and restarts (`--data_parallel_backend mp`). When one dies, the others resume
its sequences at once, behind the tokens received, as the next engine would.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from dsv3.engine.operations import Operation, OperationRefused
from dsv3.processes.gpus import visible_gpus
from dsv3.scheduler.cost import Loads, costs, prefill_cost
from dsv3.scheduler.listing import MAX_LISTED, RequestList
from dsv3.scheduler.request import PreparedRequest
from dsv3.scheduler.sent_pages import SentPages
from dsv3.server.engine.client import EngineBusy, EngineClient, EngineUnavailable
from dsv3.server.engine.in_flight import RequestStream
from dsv3.server.engine.messages import EngineInfo, Inspection, StartProgress, Stats, number_in


class DataParallelClient(EngineClient):
    """The engines of `members` as one: it is ready while any of them is, and restarting while none is.

    A request goes where it costs least: by what an engine has, and by the pages of the prompt that were sent there. All
    its sequences go to one engine, so `capacity` is that of the largest. It fails once all engines have failed, and
    with one that cannot start.
    """

    def __init__(self, members: Sequence[EngineClient], sender: int):
        super().__init__(max_num_queued_reqs=0, max_restarts=members[0].max_restarts, sender=sender)
        self._members = members
        self._sent = [SentPages() for _ in members]
        for i, member in enumerate(members):
            member.on_change = partial(self._on_change, i)
            member.on_stats = lambda _: self._on_stats()
            member.on_progress = partial(self._on_progress, i)
            member.on_dropped = lambda dropped: self.on_dropped(dropped)
            member.on_resumed = lambda: self.on_resumed()

    @property
    def members(self) -> Sequence[EngineClient]:
        return self._members

    @property
    def num_in_flight(self) -> int:
        return sum(member.num_in_flight for member in self._members)

    @property
    def capacity(self) -> int:
        """How many sequences of one request an engine accepts; 0 before any is ready."""
        return max(member.capacity for member in self._members)

    @property
    def has_capacity(self) -> bool:
        """Whether an engine would accept one more sequence, by the last statistics."""
        return any(member.has_capacity for member in self._accepting())

    def stream_of(self, request_id: int) -> RequestStream | None:
        found = (member.stream_of(request_id) for member in self._members)
        return next((stream for stream in found if stream is not None), None)

    def require_capacity(self, count: int) -> None:
        """Raises EngineBusy if the sequences of this API server alone leave no engine with capacity for `count`."""
        if not self._with_capacity(count):
            raise EngineBusy("the queue is full")

    def submit(self, requests: Sequence[PreparedRequest], streams: Sequence[RequestStream]) -> None:
        """Sends requests that belong together to one engine; the `rank` of the first names it, if it is ready."""
        if self.state not in ("ready", "restarting"):
            raise EngineUnavailable(self.reason)
        self.require_capacity(len(streams))
        chosen = self._choose(requests[0], self._with_capacity(len(streams)))
        self._sent[chosen].record(requests[0].prefix_keys)
        requests = [msgspec.structs.replace(request, rank=None) for request in requests]
        self._members[chosen].submit(requests, streams)

    def abort(self, request_ids: Sequence[int]) -> None:
        for member in self._members:
            member.abort(request_ids)

    def abort_all(self, error: Exception) -> None:
        super().abort_all(error)
        for member in self._members:
            member.abort_all(error)

    def flush(self) -> None:
        """Resets the prefix caches of all engines."""
        for member in self._members:
            member.flush()

    async def inspect(self, what: Inspection) -> Any:
        """Lists the requests of all engines that are ready, or else inspects the first of them.

        Raises EngineUnavailable without one, and where one ends before it replies.
        """
        ready = [member for member in self._members if member.state == "ready"] or self._members[:1]
        if what != "requests":
            return await ready[0].inspect(what)
        found: list[RequestList] = await asyncio.gather(*(member.inspect(what) for member in ready))
        oldest = sorted((request for each in found for request in each.requests), key=lambda request: -request.age_s)
        return RequestList(oldest[:MAX_LISTED], sum(each.total for each in found))

    async def operate(self, operation: Operation) -> None:
        """Raises OperationRefused: an engine that restarts would not have what the operation changed."""
        raise OperationRefused("independent engines take no operations: use --data_parallel_backend program")

    def fail(self, reason: str) -> None:
        """Marks all engines as failed and fails every request."""
        if self.state in ("failed", "closed"):
            return
        self.reason, self.state = reason, "failed"
        for member in self._members:
            member.fail(reason)
        self.on_failure(reason)
        self._end()

    def close(self) -> None:
        """Aborts every request and disconnects from all engines."""
        if self.state not in ("failed", "closed"):
            self.state, self.reason = "closed", "the server is shutting down"
        for member in self._members:
            member.close()
        self._end()

    def _accepting(self) -> list[EngineClient]:
        """Returns the members whose engines are ready, without any those that are restarted."""
        ready = [member for member in self._members if member.state == "ready"]
        return ready or [member for member in self._members if member.state == "restarting"]

    def _with_capacity(self, count: int) -> list[int]:
        accepting = self._accepting()
        return [
            i
            for i, member in enumerate(self._members)
            if member in accepting and member.num_in_flight + count <= member.capacity
        ]

    def _choose(self, request: PreparedRequest, candidates: list[int]) -> int:
        """Returns the candidate where a request costs least (`dsv3.scheduler.cost`), or its rank if that is one."""
        if request.rank in candidates:
            return request.rank
        members, keys = [self._members[i] for i in candidates], request.prefix_keys
        assert self.info is not None
        page_size, tokens = self.info.rules.page_size, len(request.tokens) // 4
        found = [min(self._sent[i].overlap(keys) * page_size, tokens - 1) for i in candidates]
        own = np.array([prefill_cost(start, tokens) for start in found])
        cached = np.array([number_in(member.stats, "pages_in_use") * page_size for member in members])
        requests = np.array([member.num_in_engine for member in members])
        return candidates[int(np.argmin(costs(Loads(np.zeros(len(own)), cached, requests), own, tokens)))]

    def _on_change(self, index: int) -> None:
        """Moves requests of dead engines to those that are ready, and updates the state of all together."""
        if self.state in ("failed", "closed"):
            return
        member, states = self._members[index], [member.state for member in self._members]
        if member.state != "ready":
            self._sent[index].clear()
        if member.state == "failed" and (member.info is None or states.count("failed") == len(states)):
            self.fail(member.reason)
            return
        if any(each.info is not None for each in self._members):
            self.info = _joint_info([each.info for each in self._members if each.info is not None], len(states))
        ready = sorted((each for each in self._members if each.state == "ready"), key=lambda each: each.num_in_engine)
        for each in self._members if ready else ():
            if each.state in ("restarting", "failed"):
                each.move_waiting_to(ready)
        self.state = "ready" if ready else "restarting" if "restarting" in states else self.state
        self.reason = "" if ready else member.reason
        if "starting" not in states:
            self.settled.set()

    def _on_stats(self) -> None:
        self.stats = _total([member.stats for member in self._members])
        self.on_stats(self.stats)

    def _on_progress(self, index: int, progress: StartProgress) -> None:
        self.on_progress(msgspec.structs.replace(progress, text=f"engine {index}: {progress.text}"))


def _joint_info(infos: Sequence[EngineInfo], count: int) -> EngineInfo:
    """Returns the properties of `count` engines together; a request's rank names one of them."""
    replace = msgspec.structs.replace
    return replace(
        infos[0],
        rules=replace(infos[0].rules, num_ranks=count),
        max_num_seqs=sum(info.max_num_seqs for info in infos),
        num_pages=sum(info.num_pages for info in infos),
        num_ranks=count,
        kernel_fallbacks={name: kernel for info in infos for name, kernel in info.kernel_fallbacks.items()},
    )


def _total(parts: Sequence[Stats]) -> Stats:
    """Returns the sums of engines' statistics; of shares the means over the engines that report."""
    total: Stats = {}
    reporting = [part for part in parts if part]
    for name in dict.fromkeys(name for part in reporting for name in part):
        values = [part[name] for part in reporting if name in part]
        if isinstance(values[0], list):
            total[name] = np.sum(values, 0).tolist()
        else:
            total[name] = sum(values) / (len(values) if name in _SHARES else 1)  # type: ignore[arg-type]
    return total


_SHARES = frozenset({"cache_usage"})


def device_environments(engines: int, per_engine: int) -> list[Mapping[str, str] | None]:
    """Returns each engine's environment variables, which show it its own GPUs; None on a host without GPUs.

    Raises ValueError where the GPUs of the host, or those in CUDA_VISIBLE_DEVICES, are fewer than all engines need.
    """
    given, needed = os.environ.get("CUDA_VISIBLE_DEVICES"), engines * per_engine
    if not (count := visible_gpus()):
        return [None] * engines
    ids = (given.split(",") if given else [str(i) for i in range(count)])[:count]
    if len(ids) < needed:
        where = f"CUDA_VISIBLE_DEVICES={given}" if given else "this host"
        raise ValueError(f"data_parallel_size: {engines} engines need {needed} GPUs, {where} has {len(ids)}")
    return [
        {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(ids[i * per_engine : (i + 1) * per_engine])}
        for i in range(engines)
    ]
