"""How the step of each bucket carries tokens to their experts: the transport, the schedule, and the bytes."""

import dataclasses
import logging
from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from dsv3.config.device_rates import COMBINE_NIC, GROUPED_BANDWIDTH, GROUPED_FLOPS, LINK, NIC, PEAKS, Peaks, peaks_of
from dsv3.config.engine import ForwardProgram
from dsv3.config.model import ModelConfig, itemsizes, sizes_of
from dsv3.model.schedules import HOOKED, OVERLAPPED, PLAIN, Schedule
from dsv3.model.schedules.overlapped import worth_overlapping
from sharding.collectives import Overlap, check_ragged, resolve_overlap
from sharding.experts.library_hop import LibraryHop, chunk_of
from sharding.experts.traffic import LayerRows, Traffic
from sharding.experts.transport import Transport, build, choose
from sharding.experts.transport_kind import TransportKind
from sharding.mesh import Machine, rank_size
from sharding.nccl_ep import library

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Communication:
    """The transports and schedules of one deployment, as pure functions of a bucket's `tokens` per rank and phase.

    `replicas` of experts are on the devices of `machine`. Each of the `shards` devices of a rank sends a part of its
    tokens. `kind` is the transport of the options, None to let `choose` decide. `fp8_dispatch`: rows travel as FP8;
    otherwise, and on the way back, a channel takes `itemsize` bytes. With `int8_sums` transports with hops send sums
    back as int8 and scales. `peaks` are a device's.
    """

    cfg: ModelConfig
    machine: Machine
    replicas: int
    shards: int
    overlap: Overlap
    kind: TransportKind | None
    fp8_dispatch: bool
    itemsize: int
    int8_sums: bool = False
    peaks: Peaks = PEAKS["H200"]

    @classmethod
    def from_mesh(
        cls,
        mesh: Mesh,
        cfg: ModelConfig,
        replicas: int,
        *,
        transport: str = "auto",
        combine: str = "auto",
        dtype: DTypeLike = jnp.bfloat16,
        fp8: bool | None = None,
        overlaps: bool = True,
    ) -> "Communication":
        """Returns the communication of the devices of `mesh`.

        `transport` is that of `TransportKind.from_name`; `fp8` None: as `cfg` says.

        `combine` "int8" packs sums, "auto" leaves them as they are. Unless it `overlaps`, one collective is in flight
        at a time.

        Raises ValueError for a transport that does not exist, or not on these devices, that cannot pack sums, and for
        replicas that the devices do not divide; `library.NcclEpError`, which is one, where NCCL EP's handlers cannot be
        built. A bucket too large for a ragged transport is refused when its transport is built; one too large for NCCL
        EP has the transport that `choose` selects.
        """
        platform, kind = mesh.devices.flat[0].platform, TransportKind.from_name(transport)
        if kind is TransportKind.RAGGED:
            check_ragged(platform)
        if kind is TransportKind.NCCL_EP:
            library.check_platform(platform)
            library.targets()  # stored programs are read before one is traced
        fp8 = cfg.fp8 is not None if fp8 is None else fp8
        if combine == "int8" and kind in (TransportKind.RING, TransportKind.RAGGED, TransportKind.NCCL_EP):
            raise ValueError(
                f"expert_combine: 'int8' needs expert_transport auto, all_to_all or hierarchical, not {transport!r}: "
                "its sums are added on their way"
            )
        overlap, itemsize, int8 = resolve_overlap(platform, overlaps), jnp.dtype(dtype).itemsize, combine == "int8"
        peaks = peaks_of(mesh.devices.flat[0].device_kind)
        result = cls(cfg, Machine.from_mesh(mesh), replicas, rank_size(mesh), overlap, kind, fp8, itemsize, int8, peaks)
        result.transport(1, is_prefill=False)  # raises for what no bucket can have
        return result

    def schedule(self, tokens: int, is_prefill: bool) -> Schedule:
        """Returns the schedule (plain, hooked, overlapped) of a step of this size."""
        if self.overlap is Overlap.NONE:
            return PLAIN
        if self.overlap is Overlap.ORDER:
            return HOOKED  # nothing runs beside a collective: a second micro-batch would only read weights again
        seconds = self._weights_seconds, self._product_seconds(tokens), self._transfer_seconds(tokens)
        if tokens % 2 == 0 and worth_overlapping(self._sent(tokens), self.machine.devices, is_prefill, *seconds):
            return OVERLAPPED if self._transport(self._sent(tokens // 2)).hops else HOOKED
        return HOOKED

    @property
    def _weights_seconds(self) -> float:
        """The seconds in which a device reads its weights of a layer."""
        sizes, (expert_item, item) = sizes_of(self.cfg), itemsizes(self.cfg)
        experts = self.replicas / self.machine.devices * sizes.expert * expert_item
        others = (sizes.attention + sizes.shared) * item / self.shards
        return (experts + others) / (GROUPED_BANDWIDTH * self.peaks.hbm)

    def _product_seconds(self, tokens: int) -> float:
        """Returns the seconds in which a device multiplies rows of `tokens` tokens with the weights of a layer."""
        cfg, sizes = self.cfg, sizes_of(self.cfg)
        fp8, bf16 = GROUPED_FLOPS * self.peaks.fp8, GROUPED_FLOPS * self.peaks.bf16
        experts = cfg.num_experts_per_tok * sizes.expert / (fp8 if itemsizes(cfg)[0] == 1 else bf16)
        return 2 * self._sent(tokens) * (experts + (sizes.attention + sizes.shared) / (fp8 if cfg.fp8 else bf16))

    def _transfer_seconds(self, tokens: int) -> float:
        """Returns the seconds in which a device sends rows of `tokens` tokens to the experts of a layer and back."""
        sent = self._sent(tokens)
        traffic = self._transport(sent).traffic(self._rows(sent))
        inside = traffic.device_bytes - traffic.node_bytes
        return inside / (LINK * self.peaks.link) + traffic.node_bytes / (COMBINE_NIC * NIC)

    def overlaps(self, program: ForwardProgram) -> int:
        """Returns how many NCCL communicators a program uses at once while it computes; 0: it does not overlap.

        Prefill has two hops in flight at once, one in the node and one between nodes; decode has one. Sums and
        exchanges between the devices of a rank, one at a time, are one more. NCCL EP's kernels with low latency run
        between others, not beside them.
        """
        is_prefill = program.kind == "prefill"
        if program.of_module or self.schedule(program.tokens, is_prefill) is not OVERLAPPED:
            return 0
        hops = self.transport(program.tokens, is_prefill).hops
        low_latency = isinstance(hops[0], LibraryHop) and not hops[0].chunk
        at_once = 0 if low_latency else len(hops) if is_prefill else 1
        return at_once + (self.shards > 1)

    def transport(self, tokens: int, is_prefill: bool) -> Transport[Any]:
        """Returns the transport of a step, or of each of its two micro-batches."""
        return self._transport(self._tokens_at_once(tokens, is_prefill))

    def draft_transport(self, tokens: int) -> Transport[Any]:
        """Returns the transport of layers that make drafts: one batch, whatever the main model's step is."""
        return self._transport(self._sent(tokens))

    def connect(self, mesh: Mesh, programs: Iterable[ForwardProgram]) -> Callable[[], None]:
        """Creates NCCL EP's groups for these programs, if the experts' rows travel by it.

        All processes must call it before a program runs; it waits for them. Returns a function that raises if results
        lack the experts of a rank that was late. Raises `library.NcclEpError`, as that function.
        """
        keys, sizes = self._groups(programs)
        if not keys:
            return lambda: None
        library.create_groups(mesh, sorted(keys))
        text = "NCCL EP: %d groups, with %.2f GB of buffers per device, beside jax's memory"
        _log.info(text, len(sizes), sum(sizes.values()) / 1e9)
        return library.check_ranks

    def library_bytes(self, programs: Iterable[ForwardProgram]) -> int:
        """Returns the bytes of NCCL EP's buffers on a device for these programs, which are beside jax's memory."""
        return sum(self._groups(programs)[1].values())

    def _groups(self, programs: Iterable[ForwardProgram]) -> tuple[set[library.GroupKey], dict[library.GroupKey, int]]:
        """Returns the keys of NCCL EP for these programs, and the bytes of each group on a device."""
        keys: set[library.GroupKey] = set()
        sizes: dict[library.GroupKey, int] = {}
        for program in programs:
            is_prefill, at_once = program.kind == "prefill", 1
            if program.of_module:
                tokens = self._sent(program.tokens)
            else:
                tokens = self._tokens_at_once(program.tokens, is_prefill)
                at_once = self.schedule(program.tokens, is_prefill).micro_batches
            for hop in self._transport(tokens).hops:
                if isinstance(hop, LibraryHop):
                    own = [hop.of_micro_batch(i).key(self.cfg.num_experts_per_tok) for i in range(at_once)]
                    keys.update(own)
                    size = hop.buffer_bytes(self.machine, self._rows(tokens))
                    sizes |= dict.fromkeys((key.shared for key in own), size)
        return keys, sizes

    def traffic(self, tokens: int, is_prefill: bool) -> Traffic:
        """Returns the bytes that a device sends to experts and back in all MoE layers of a step."""
        passes = self.schedule(tokens, is_prefill).micro_batches * self.cfg.num_moe_layers
        return self._traffic(self._tokens_at_once(tokens, is_prefill), passes)

    def draft_traffic(self, tokens: int) -> Traffic:
        """Returns the bytes that a device sends to experts and back in an MTP module's step, or in all stages."""
        return self._traffic(self._sent(tokens), 1 if self.cfg.dspark is None else self.cfg.dspark.stages)

    def _traffic(self, tokens: int, passes: int) -> Traffic:
        """Returns the bytes that a device sends in `passes` through an MoE layer, of `tokens` each."""
        return self._transport(tokens).traffic(self._rows(tokens)) * passes

    def _tokens_at_once(self, tokens: int, is_prefill: bool) -> int:
        """Returns the tokens that one device sends in one pass through a layer."""
        return self._sent(tokens // self.schedule(tokens, is_prefill).micro_batches)

    def _sent(self, tokens: int) -> int:
        """Returns the tokens that one device sends: the rank's tokens divided by its devices, rounded up."""
        return -(-tokens // self.shards)

    def _rows(self, tokens: int) -> LayerRows:
        cfg = self.cfg
        k, hidden = cfg.num_experts_per_tok, cfg.hidden_size
        return LayerRows.from_widths(
            tokens, k, hidden, fp8_dispatch=self.fp8_dispatch, itemsize=self.itemsize, int8_sums=self.int8_sums
        )

    def _transport(self, tokens: int) -> Transport[Any]:
        rows, each = self._rows(tokens), self.replicas // self.machine.devices
        too_many = self.kind is TransportKind.NCCL_EP and chunk_of(self.machine, each, rows) is None
        if self.kind is None or too_many:
            return choose(self.machine, self.replicas, rows, self.overlap)
        return build(self.kind, self.machine, self.replicas, rows, self.overlap)
