"""Masks: holds requests to a grammar, by taking from the sampler the tokens that may not come next.

A request's mask depends on its last token, which the host sees one step late. So the command of this job, and of those
behind it in the step, is made when the results of the step before are in. The forward job of the step has been launched
by then: the devices work while the host computes masks, and the look-ahead stays. Steps without such requests hold no
job of this kind.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dsv3.engine.device.devices import Devices
from dsv3.engine.device.layout import Layout
from dsv3.engine.device.programs import ProgramSpec
from dsv3.engine.job import Command, EngineView, JobKind, Later, Planned
from dsv3.engine.parts import Parts
from dsv3.scheduler.masks import ALL, Masks, MaskStats
from dsv3.scheduler.request import StepOutputs
from dsv3.scheduler.rows import BatchRows

NAME = "mask"
_WORD_BITS = 32


class MaskCommand(Command, frozen=True):
    """Masks for the sampler of the forward job `source`: row i is at `places[i]`, rank and row of the batch.

    Rows that are not here may take every token.
    """

    source: str
    places: np.ndarray  # [n, 2] int32
    masks: np.ndarray  # [n, S, words] uint32

    def part(self, ranks: range) -> "MaskCommand":
        """Returns the masks of `ranks`."""
        mine = (self.places[:, 0] >= ranks.start) & (self.places[:, 0] < ranks.stop)
        return MaskCommand(self.source, self.places[mine] - np.array([ranks.start, 0], np.int32), self.masks[mine])

    def whole(self, ranks: int, rows: int, width: int, words: int) -> np.ndarray:
        """Returns the masks of all rows of a batch, `[ranks, B, S, words]`."""
        masks = np.full((ranks, rows, width, words), ALL, np.uint32)
        masks[self.places[:, 0], self.places[:, 1]] = self.masks
        return masks


class Context(NamedTuple):
    """The forward job whose rows are held, and these rows."""

    source: str
    rows: BatchRows


def plan_mask(masks: Masks | None, source: str, rows: BatchRows, width: int) -> Planned:
    """Returns the job that masks `rows` of the forward job `source`, with `width` tokens each."""
    assert masks is not None  # else no request is held

    def make(outputs: StepOutputs) -> MaskCommand:
        return MaskCommand(source, *masks.of(rows, width, outputs))

    return Planned(NAME, Later(make), Context(source, rows))


class MaskPlanner:
    """Has only numbers: samplers plan their masks (`plan_mask`)."""

    def __init__(self, view: EngineView) -> None:
        self._masks = view.masks

    def plan(self, step: list[Planned]) -> list[Planned]:
        """Adds nothing by itself."""
        return []

    def collect(self, planned: Planned, results: list[np.ndarray], outputs: StepOutputs) -> None:
        """Has nothing to note."""

    def stats(self) -> MaskStats | None:
        """Returns how many masks there were, and what they took."""
        return None if self._masks is None else self._masks.stats()


class MaskWorker:
    """Hands masks to the sampler. A program of their own would cost a launch and one more pass over the logits."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices

    def launch(self, command: MaskCommand) -> tuple[jax.Array, ...]:
        """Leaves the masks beside what a forward job has left."""
        devices = self._devices
        forward = devices.handed[command.source]
        rows, width = forward.scores.shape[2:4]
        num_bits = devices.layout.model_cfg.vocab_size
        masks = command.whole(devices.layout.num_local_ranks, rows, width, num_words(num_bits))
        devices.handed[command.source] = forward._replace(masks=devices.put(masks))
        return ()


def masked(logits: jax.Array, masks: jax.Array) -> jax.Array:
    """Returns logits `[B, S, W]` that are -inf where `masks` `[B, S, words]` have no bit.

    What is not finite stays, for the sampler to find: it fails a request whose logits mean nothing.
    """
    bits = (masks[..., None] >> jnp.arange(_WORD_BITS, dtype=jnp.uint32)) & 1
    allowed = bits.reshape(*masks.shape[:-1], -1)[..., : logits.shape[-1]] > 0
    return jnp.where(allowed | ~(logits < jnp.inf), logits, -jnp.inf)


def num_words(vocab_size: int) -> int:
    """Returns how many words a mask has."""
    return -(-vocab_size // _WORD_BITS)


def _no_programs(layout: Layout) -> tuple[ProgramSpec, ...]:
    return ()


def _applies(parts: Parts) -> bool:
    return parts.takes_grammars


KIND = JobKind(NAME, MaskCommand, MaskPlanner, _no_programs, MaskWorker, _applies)
