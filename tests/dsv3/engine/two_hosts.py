"""An engine over two hosts in one process: commands reach the second one's tiers as over the wire, news come back."""

import dataclasses
from typing import Any

import msgspec
import numpy as np

from dsv3.engine.cluster import messages
from dsv3.engine.components import EngineComponents
from dsv3.engine.engine import Engine
from dsv3.engine.executor import LocalExecutor, Results
from dsv3.engine.job import StepCommand, WorkEvents
from dsv3.engine.jobs.pages import PagesCommand, PagesFollower
from dsv3.engine.jobs.registry import JOB_KINDS

FAR = range(1, 2)


class TwoHosts(LocalExecutor):
    """The devices of both; rank 1 is the follower's, whose half of the pages is `follower_handler`."""

    def __init__(self, parts: EngineComponents, work_events: WorkEvents) -> None:
        super().__init__(parts, JOB_KINDS)
        addresses = parts.cfg.transfer_addresses[::-1]  # the aside takes this process for the first
        theirs = dataclasses.replace(parts, cfg=dataclasses.replace(parts.cfg, transfer_addresses=addresses))
        self.follower_handler = PagesFollower(theirs, lambda body: work_events.put("pages", 1, body))
        self._sent: dict[int, PagesCommand] = {}

    def launch(self, command: StepCommand) -> list[Any]:
        jobs = [self._with_far(command.number, *job) if job[0] == "pages" else job for job in command.jobs]
        return super().launch(StepCommand(command.number, tuple(jobs)))

    def fetch(self, command: StepCommand, launched: list[Any]) -> Results:
        results = super().fetch(command, launched)
        for index, (kind, each) in enumerate(command.jobs):
            if kind == "pages":
                results[index] = self._hand_over(command.number, each, results[index])
        return results

    def _with_far(self, number: int, kind: str, command: PagesCommand) -> tuple[str, PagesCommand]:
        part = StepCommand(number, ((kind, command),)).part(FAR)
        body = messages.encode(messages.step_of(part))
        [[_, sent]] = messages.command_of(messages.decode_for_follower(body), JOB_KINDS).jobs
        self._sent[number] = sent = self.follower_handler.prepared(sent)
        assert all(copy.values.keys() == copy.loads.keys() for copy in sent.into)
        into = [
            msgspec.structs.replace(mine, values=mine.values | {FAR[rank]: rows for rank, rows in far.values.items()})
            for mine, far in zip(command.into, sent.into, strict=True)
        ]
        return kind, msgspec.structs.replace(command, into=into)

    def _hand_over(self, number: int, command: PagesCommand, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """Hands the follower what has left rank 1; returns the rest."""
        ranks = [rank for copy in command.out for rank in copy.keys]
        theirs = [array for rank, array in zip(ranks, arrays, strict=False) if rank in FAR]
        self.follower_handler.take(self._sent.pop(number), theirs)
        return [array for rank, array in zip(ranks, arrays, strict=False) if rank not in FAR]


def over_two_hosts(parts: EngineComponents) -> Engine:
    """The engine; `parts` lie on one host, so that programs compiled for these suit."""
    parts = dataclasses.replace(parts, cfg=dataclasses.replace(parts.cfg, num_processes=2))
    work_events = WorkEvents()
    return Engine(parts, TwoHosts(parts, work_events), work_events=work_events)
