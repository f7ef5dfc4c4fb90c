"""Drafts: proposes the tokens that the next decode step verifies.

A draft job follows each forward job and its sampler, also where the step takes no drafts, so that the drafter has seen
every token when drafts are wanted again. It leaves drafts in `DecodeState.tokens` behind each slot's last
token. What proposes them is a drafter: the model's own MTP module (`draft_module`), or the text itself
(`draft_lookup`). Verifying is the sampler's: a draft counts where it equals the token that is sampled anyway. The host
sees no draft, unless a request of the job is held to a grammar: its masks behind drafts depend on them.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv3.engine.device.devices import Devices, Forward
from dsv3.engine.device.layout import Layout
from dsv3.engine.device.programs import Key, ProgramSpec
from dsv3.engine.device.state import DecodeState
from dsv3.engine.job import EngineView, JobKind, Planned
from dsv3.engine.jobs import draft_lookup, draft_module
from dsv3.engine.jobs.decode import NAME as DECODE
from dsv3.engine.jobs.decode import DecodeCommand
from dsv3.engine.jobs.draft_command import NAME, CachedText, DraftCommand
from dsv3.engine.jobs.prefill import PrefillCommand
from dsv3.engine.parts import Parts
from dsv3.scheduler.request import StepOutputs
from dsv3.scheduler.sequence import Chunk

TELL = "tell drafts"
_DRAFTERS = {"mtp": draft_module, "ngram": draft_lookup}


@dataclasses.dataclass(frozen=True)
class DraftStats:
    """Totals since the start, under vLLM's names.

    `num_drafts` counts rows that brought drafts, `num_draft_tokens` the drafts, `num_accepted_tokens` those that were
    right, and `num_accepted_tokens_per_pos` the same by their place in the row.
    """

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: tuple[int, ...]


class DraftPlanner:
    """Adds a draft job for each forward job."""

    def __init__(self, view: EngineView) -> None:
        self._masks = view.masks
        self._counts, self._cfg = view.scheduler.drafts, view.scheduler.cfg
        self._reads_text = self._cfg.speculative is not None and self._cfg.speculative.method == "ngram"
        # By slot: the epoch whose prompt has begun.
        self._begun = np.full(len(view.scheduler.slots.epoch), -1, np.int64)

    def plan(self, step: list[Planned]) -> list[Planned]:
        """Plans one job per forward job of the step."""
        planned = []
        for job in step:
            tells = job.later is not None  # a request of the job is held to a grammar
            if isinstance(job.command, DecodeCommand):
                done = job.command
                command = DraftCommand(job.kind, done.rows.shape[1], done.width, [], 0, tells, done.longest)
            elif isinstance(job.command, PrefillCommand):
                texts = self._cached(job.context.chunks)
                command = DraftCommand.after_prefill(job.command.bucket, texts, tells, job.command.longest)
            else:
                continue
            planned.append(Planned(NAME, command, job.context.rows))
        return planned

    def _cached(self, chunks: list[list[Chunk]]) -> list[CachedText]:
        """Returns the texts that the chunks continue, found in the cache, for a drafter that reads them."""
        found = []
        for chunk in (c for mine in chunks for c in mine) if self._reads_text else ():
            sequence, slot = chunk.sequence, chunk.sequence.slot
            if chunk.start and self._begun[slot] != chunk.epoch:
                rank, place = divmod(slot, self._cfg.max_num_seqs)
                found.append(CachedText(rank, place, np.ascontiguousarray(sequence.tokens[: chunk.start], np.int32)))
            self._begun[slot] = chunk.epoch
        return found

    def collect(self, planned: Planned, results: tuple[np.ndarray, ...], outputs: StepOutputs) -> None:
        """Notes drafts that the host wants to see; the sampler of the next step says which were right."""
        if results and self._masks is not None:
            self._masks.note_drafts(planned.context, results[0])

    def stats(self) -> DraftStats:
        """Returns how many drafts there were, and how many were right."""
        accepted = self._counts.accepted.tolist()
        return DraftStats(self._counts.rows, self._counts.tokens, sum(accepted), tuple(accepted))


def programs(layout: Layout) -> Iterator[ProgramSpec]:
    """Yields the drafter's programs, one per bucket of prefill and of decode, and those that tell the host."""
    yield from _drafter(layout).programs(layout)
    for rows in sorted({rows for rows, _ in layout.sampled_shapes}):
        arguments = (layout.state, layout.array(rows))
        yield layout.per_rank(Key(TELL, rows), tell_body, arguments, gathered="all", padding={1: layout.no_slot})


def tell_body(state: DecodeState, slots: jax.Array) -> jax.Array:
    """Returns the drafts of `slots` `[B]`, `[B, S - 1]` of the widest row, for one rank."""
    return state.tokens[jnp.minimum(slots, state.tokens.shape[0] - 1), 1:]


class DraftWorker:
    """Launches the drafter after a forward job."""

    def __init__(self, devices: Devices) -> None:
        self._devices, self._drafter = devices, _drafter(devices.layout).Drafter(devices)

    def launch(self, command: DraftCommand) -> tuple[jax.Array, ...]:
        """Starts the drafter on what the forward job and the sampler have left."""
        devices = self._devices
        if command.source == DECODE:
            forward, devices.decoded = devices.decoded, None
        else:
            forward, devices.prefilled = devices.prefilled, None
        assert forward is not None  # a forward job of the step has left it
        if forward.tokens is None:
            forward = forward._replace(tokens=self._nothing_sampled(forward))
        self._drafter.launch(command, forward)
        if not command.tells:
            return ()
        told = devices.programs.get(Key(TELL, forward.slots.shape[1]))(devices.state, forward.slots)
        told.copy_to_host_async()
        return (told,)

    def _nothing_sampled(self, forward: Forward) -> jax.Array:
        """Returns zeros, which nobody reads, for a prefill in which no chunk was a prompt's last."""
        return self._devices.put(np.zeros((self._devices.layout.num_local_ranks, forward.slots.shape[1], 1), np.int32))


def _drafter(layout: Layout) -> Any:
    """Returns the module that drafts: it has `programs(layout)` and `Drafter(devices)`."""
    assert layout.cfg.speculative is not None  # `_applies`
    return _DRAFTERS[layout.cfg.speculative.method]


def _applies(parts: Parts) -> bool:
    return parts.cfg.speculative is not None


KIND = JobKind(NAME, DraftCommand, DraftPlanner, programs, DraftWorker, _applies)
