"""What the devices shall do in one step, as plain host arrays: all that the processes of an instance must agree on.

The scheduler's plan knows requests; a command knows programs and their arguments. Whoever executes the same commands in
the same order holds the same device state, so this is what a leader sends to the other hosts.
"""

import dataclasses

import numpy as np

from dsv3.engine.config import EngineConfig
from dsv3.engine.plan import DecodePlan, PrefillPlan, StepPlan
from dsv3.engine.sequence import FULL
from dsv3.engine.state import AdjustRequest, adjust_request, control_row
from dsv3.engine.step_bodies import PREFILL_HEADER


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillCommand:
    """Chunks of prompts. `variant` is the sampler's, None where no row samples.

    `adjustments` set the slots of requests that change their logits, before anything is sampled.
    """

    tokens: np.ndarray  # [ranks, T] int32
    rows: np.ndarray  # [ranks, G, PREFILL_HEADER + MP] int32
    variant: int | None
    logprobs: bool
    adjustments: list[AdjustRequest]


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeCommand:
    """One token for each row: slot within the rank (`max_num_seqs` in padding) and new page (-1: none)."""

    batch: np.ndarray  # [ranks, B, 2] int32
    variant: int
    logprobs: bool


@dataclasses.dataclass(frozen=True, slots=True)
class MoveCommand:
    """`sharding.experts.rebalance.LayerMove` as host arrays."""

    layer: np.ndarray  # [] int32
    source: np.ndarray  # [Er] int32
    replicas: np.ndarray  # [E, Ec] int32
    copies: np.ndarray  # [E] int32


@dataclasses.dataclass(frozen=True, slots=True)
class BalanceCommand:
    """Reads out the experts' load and starts counting anew, where `read_load` says so, then moves experts."""

    read_load: bool
    moves: list[MoveCommand]


@dataclasses.dataclass(frozen=True, slots=True)
class StepCommand:
    """One step: what is launched, balancing first, then prefill, then decode."""

    number: int
    prefill: PrefillCommand | None
    decode: DecodeCommand | None
    balance: BalanceCommand | None = None


def command_of(
    plan: StepPlan, cfg: EngineConfig, vocab_size: int, balance: BalanceCommand | None = None
) -> StepCommand:
    """The command that carries out a plan, and what balancing asks for before it."""
    prefill = None if plan.prefill is None else _prefill_command(plan.prefill, cfg, vocab_size)
    decode = None if plan.decode is None else _decode_command(plan.decode)
    return StepCommand(plan.number, prefill, decode, balance)


def _prefill_command(plan: PrefillPlan, cfg: EngineConfig, vocab_size: int) -> PrefillCommand:
    tokens, rows = _prefill_arrays(plan, cfg)
    variant = plan.variant if len(plan.sampled.slots) else None
    adjustments = _adjustments(plan, cfg, vocab_size) if variant == FULL else []
    return PrefillCommand(tokens, rows, variant, plan.logprobs, adjustments)


def _decode_command(plan: DecodePlan) -> DecodeCommand:
    return DecodeCommand(plan.batch, plan.variant, plan.logprobs)


def _adjustments(plan: PrefillPlan, cfg: EngineConfig, vocab_size: int) -> list[AdjustRequest]:
    return [
        adjust_request(chunk.sequence, cfg, vocab_size)
        for mine in plan.chunks
        for chunk in mine
        if chunk.is_last and chunk.sequence.variant == FULL
    ]


def _prefill_arrays(plan: PrefillPlan, cfg: EngineConfig) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.zeros((cfg.num_ranks, plan.tokens), np.int32)
    rows = np.zeros((cfg.num_ranks, cfg.prefill_rows(plan.tokens), PREFILL_HEADER + cfg.pages_per_seq), np.int32)
    rows[..., 0] = cfg.max_num_seqs
    for rank, chunks in enumerate(plan.chunks):
        at = 0
        for i, chunk in enumerate(chunks):
            sequence, count = chunk.sequence, chunk.stop - chunk.start
            tokens[rank, at : at + count] = sequence.tokens[chunk.start : chunk.stop]
            at += count
            rows[rank, i, :4] = (sequence.slot % cfg.max_num_seqs, count, chunk.start, chunk.is_last)
            rows[rank, i, 4:PREFILL_HEADER] = control_row(sequence)
            rows[rank, i, PREFILL_HEADER : PREFILL_HEADER + len(sequence.pages)] = sequence.pages
    return tokens, rows
