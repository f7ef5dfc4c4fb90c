"""How each bucket's step carries tokens to their experts: the transport, the form of the step, and its bytes."""

import dataclasses
import enum

import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from dsv3.config import ModelConfig
from dsv3.model.overlap import worth_overlapping
from sharding.collectives import Overlap, check_ragged, resolve_overlap
from sharding.rules import machine_of, rank_size
from sharding.transport import (
    Kind,
    Load,
    Machine,
    StepTraffic,
    Transport,
    build,
    choose,
    kind_of,
    load_of,
    step_traffic,
)


class Form(enum.Enum):
    """How a step is written."""

    PLAIN = "one batch, in the order XLA finds"
    HOOKED = "one batch, the shared expert under the combine"
    OVERLAPPED = "two micro-batches, each under the other's communication"


@dataclasses.dataclass(frozen=True)
class Communication:
    """The choices of one deployment; all of its methods are pure functions of a bucket.

    `slots` physical experts live on the devices of `machine`; the `shards` devices of a rank send a part of its tokens
    each. `kind` is what a user asked for, None to let `choose` decide by the load.
    `fp8_dispatch` says whether rows travel as FP8; otherwise, and on the way back, a channel takes `itemsize` bytes.
    """

    cfg: ModelConfig
    machine: Machine
    slots: int
    shards: int
    overlap: Overlap
    kind: Kind | None
    fp8_dispatch: bool
    itemsize: int

    @classmethod
    def over(
        cls,
        mesh: Mesh,
        cfg: ModelConfig,
        slots: int,
        *,
        transport: str = "auto",
        dtype: DTypeLike = jnp.bfloat16,
        fp8: bool | None = None,
    ) -> "Communication":
        """For the devices of `mesh`; `transport` as of `kind_of`, `fp8` None: as the model's configuration says.

        Raises ValueError for a transport that there is not, or not on these devices, and where they do not divide the
        slots. A bucket too large for a ragged transport is refused when its transport is asked for.
        """
        platform, kind = mesh.devices.flat[0].platform, kind_of(transport)
        if kind is Kind.RAGGED:
            check_ragged(platform)
        fp8 = cfg.fp8 is not None if fp8 is None else fp8
        overlap, itemsize = resolve_overlap(platform), jnp.dtype(dtype).itemsize
        result = cls(cfg, machine_of(mesh), slots, rank_size(mesh), overlap, kind, fp8, itemsize)
        result.transport(1, is_prefill=False)  # refuses now what no bucket can have
        return result

    def form(self, tokens: int, is_prefill: bool) -> Form:
        """Of a step of `tokens` tokens on each rank."""
        if self.overlap is Overlap.NONE:
            return Form.PLAIN
        if tokens % 2 == 0 and worth_overlapping(self._sent(tokens), self.machine.ranks, is_prefill):
            return Form.OVERLAPPED if self._transport(self._sent(tokens // 2)).hops else Form.HOOKED
        return Form.HOOKED

    def transport(self, tokens: int, is_prefill: bool) -> Transport:
        """Of the step, or of each of its two micro-batches."""
        return self._transport(self._tokens_at_once(tokens, is_prefill))

    def traffic(self, tokens: int, is_prefill: bool) -> StepTraffic:
        """What a device sends to experts and back in all MoE layers of a step of `tokens` tokens on each rank."""
        at_once = self._tokens_at_once(tokens, is_prefill)
        micro_batches = 2 if self.form(tokens, is_prefill) is Form.OVERLAPPED else 1
        return step_traffic(self._transport(at_once), self._load(at_once), micro_batches * self.cfg.num_moe_layers)

    def _tokens_at_once(self, tokens: int, is_prefill: bool) -> int:
        return self._sent(tokens // 2 if self.form(tokens, is_prefill) is Form.OVERLAPPED else tokens)

    def _sent(self, tokens: int) -> int:
        """By each device, of a rank's."""
        return -(-tokens // self.shards)

    def _load(self, tokens: int) -> Load:
        cfg = self.cfg
        k, hidden = cfg.num_experts_per_tok, cfg.hidden_size
        return load_of(tokens, k, hidden, fp8_dispatch=self.fp8_dispatch, itemsize=self.itemsize)

    def _transport(self, tokens: int) -> Transport:
        load = self._load(tokens)
        if self.kind is None:
            return choose(self.machine, self.slots, load, self.overlap)
        return build(self.kind, self.machine, self.slots, load, self.overlap)
