"""NVIDIA's expert-parallel library (NCCL EP) in plans: the bytes that it sends, and its published times.

The library assembles its kernels when a group is made, so nothing of them is compiled here. The program of one hop,
`all_to_all`, stands in for it: like the library, it sends a row once to each device, in two halves with other work
between them. The schedule of a plan is that program's; bytes and seconds of dispatch and combine are from this file.

Low-latency kernels send rows without padding. Between their two halves they take no multiprocessor. High-throughput
kernels, for more tokens, keep multiprocessors until all rows have arrived.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from dsv3.config.device_rates import NIC, PEAKS
from dsv3.config.engine import ForwardProgram
from dsv3.config.model import ModelConfig
from dsv3.engine.communication import Communication
from sharding.collectives import Overlap
from sharding.experts.capacity import expected_rows
from sharding.experts.library_hop import LibraryHop
from sharding.experts.transport_kind import TransportKind
from sharding.mesh import Machine
from tools.plan.deployment import NCCL_EP, Deployment
from tools.plan.hlo import Collective
from tools.plan.roofline import TRANSFER_S, wire_rows

STAND_IN = "all_to_all"
Mode = Literal["low latency", "high throughput"]

GPUS_PER_NODE, TOKENS, EXPERTS_PER_TOKEN, SUM_BYTES = 8, 128, 8, 14_336
"""The shape of all low-latency figures: 7,168 channels; rows of 14,336 bytes in bfloat16."""

LOW_LATENCY = {8: (224.3, 185.2), 16: (76.7, 73.0), 32: (53.6, 50.0), 64: (48.8, 43.8)}
"""GB/s of dispatch and of combine, bfloat16 both ways, by the number of H100 GPUs (400 Gb/s for each between nodes).

A row for each chosen expert counts, wherever it is. Source: contrib/nccl_ep/README.md of NVIDIA/nccl, NCCL 2.29.
"""

DEEPEP_ROW = 7_408
DEEPEP_LOW_LATENCY = {16: (118, 195), 32: (155, 273), 64: (173, 314), 128: (192, 369), 256: (194, 360)}
"""Microseconds of DeepEP's low-latency kernels on H800, FP8 rows of 7,408 bytes there: a check, not part of estimates.

Source: DeepEP's README, release 1.
"""

HIGH_THROUGHPUT = {1: (153, 158), 2: (43, 43), 4: (58, 57), 8: (51, 50)}
"""GB/s of DeepEP's normal kernels by nodes of 8 H800, since none of the library's on Hopper is published.

In one node a row counts for each device that it goes to, by NVLink; otherwise for each node, its own included. They
take 24 multiprocessors (DeepEP's README, release 1); those of release 2 reach 61 GB/s on 4 nodes with 6.
"""
HIGH_THROUGHPUT_LINKS, LOW_LATENCY_LINKS = (PEAKS["H800"].link, NIC), (PEAKS["H100"].link, NIC)
"""Bytes per second of the links of these H800 and H100: in the node, and between nodes."""

KNOWN_ERRORS = (
    "NCCL EP, low latency: published for 128 tokens and at most 64 GPUs; the line through its figures is within 8 % of "
    "DeepEP's figures for 16 to 256; users report it as 1 to 15 % slower than DeepEP",
    "NCCL EP, high throughput: DeepEP's figures for 4,096 tokens and 24 multiprocessors, since none of the library's "
    "on Hopper is published; it takes 16, and fewer tokens in a call where its buffers would be too large",
)


def known_errors(deployment: Deployment) -> tuple[str, ...]:
    """Returns the errors of the library's times, none where the deployment does not use it."""
    return KNOWN_ERRORS if deployment.expert_transport == NCCL_EP else ()


class TransferLine(NamedTuple):
    """A transfer takes `start` seconds, and its bytes at `rate` bytes per second."""

    start: float
    rate: float

    def seconds(self, nbytes: float, link: float = 1.0) -> float:
        """Returns the seconds for `nbytes` over a link that is `link` times as fast as the measured one."""
        return self.start + nbytes / (self.rate * link)


@functools.cache
def low_latency_lines(role: int) -> tuple[TransferLine, TransferLine]:
    """Returns dispatch's (0) or combine's (1) line in a node, and between nodes.

    In a node there is one figure, so the start is that of other transfers. Between nodes it is the line of least
    squares through the figures of several nodes.
    """
    sent = TOKENS * EXPERTS_PER_TOKEN * SUM_BYTES
    seconds = {gpus: sent / (rates[role] * 1e9) for gpus, rates in LOW_LATENCY.items()}
    inside = sent * (1 - 1 / GPUS_PER_NODE) / (seconds[GPUS_PER_NODE] - TRANSFER_S)
    outside = {gpus: sent * (1 - GPUS_PER_NODE / gpus) for gpus in seconds if gpus > GPUS_PER_NODE}
    slope, start = np.polyfit([*outside.values()], [seconds[gpus] for gpus in outside], 1)
    return TransferLine(TRANSFER_S, inside), TransferLine(float(start), float(1 / slope))


@dataclasses.dataclass(frozen=True)
class LibraryTransfer:
    """What a device sends in a dispatch or a combine, and the seconds until all has arrived."""

    node_bytes: int
    cross_bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class LibraryExchange:
    """Dispatch and combine of one micro-batch in a layer, by the library."""

    mode: Mode
    dispatch: LibraryTransfer
    combine: LibraryTransfer

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds by the role of a collective."""
        return {"dispatch": self.dispatch.seconds, "combine": self.combine.seconds}

    @property
    def node_bytes(self) -> int:
        """Bytes that a device sends to others of its node."""
        return self.dispatch.node_bytes + self.combine.node_bytes

    @property
    def cross_bytes(self) -> int:
        """Bytes that a device sends to other nodes."""
        return self.dispatch.cross_bytes + self.combine.cross_bytes

    def without_padding(self, found: Iterable[Collective]) -> tuple[Collective, ...]:
        """Returns the stand-in's collectives with the bytes that the library sends."""
        return tuple(self._replaced(collective) for collective in found)

    def _replaced(self, collective: Collective) -> Collective:
        transfer = {"dispatch": self.dispatch, "combine": self.combine}.get(collective.role)
        if transfer is None:
            return collective
        return dataclasses.replace(collective, node_bytes=transfer.node_bytes, cross_bytes=transfer.cross_bytes)


def stand_in(deployment: Deployment) -> Deployment:
    """Returns the deployment whose programs are compiled: another transport in place of the library.

    A unit that only decodes then reserves no multiprocessors, unless the deployment says how many.
    """
    if deployment.expert_transport != NCCL_EP:
        return deployment
    reserved = deployment.reserved_multiprocessors
    if reserved is None and not deployment.prefill_tokens:
        reserved = 0
    return dataclasses.replace(deployment, expert_transport=STAND_IN, reserved_multiprocessors=reserved)


def buffer_bytes(model: ModelConfig, deployment: Deployment, programs: Sequence[ForwardProgram]) -> int:
    """Returns the bytes of the library's buffers on a device, 0 where the deployment does not use it."""
    communication = _communication(model, deployment)
    return 0 if communication is None else communication.library_bytes(programs)


def exchange(
    model: ModelConfig, deployment: Deployment, tokens: int, bucket: int | None = None
) -> LibraryExchange | None:
    """Returns the exchange of `tokens` of a rank, in the mode that a server takes for `bucket` tokens.

    The bucket is by default as many. Returns None where the deployment does not use the library, or the library takes
    the bucket in neither mode.
    """
    communication = _communication(model, deployment)
    if communication is None:
        return None
    hop = next((h for h in communication.draft_transport(bucket or tokens).hops if isinstance(h, LibraryHop)), None)
    if hop is None:
        return None
    mode: Mode = "high throughput" if hop.chunk else "low latency"
    mine = -(-tokens // deployment.tensor_parallel)
    return LibraryExchange(mode, *(_transfer(model, deployment, mine, role, mode) for role in (0, 1)))


def _communication(model: ModelConfig, deployment: Deployment) -> Communication | None:
    """Returns how a server of the deployment sends rows; None where that is not by the library."""
    if deployment.expert_transport != NCCL_EP or deployment.devices == 1 or not deployment.expert_parallel:
        return None
    machine = Machine(deployment.nodes, deployment.gpus_per_node)
    replicas, fp8 = model.n_routed_experts + deployment.redundant_experts, model.fp8 is not None
    kind, shards = TransportKind.NCCL_EP, deployment.tensor_parallel
    return Communication(model, machine, replicas, shards, Overlap.HOOKS, kind, fp8, 2)


def _transfer(model: ModelConfig, deployment: Deployment, tokens: int, role: int, mode: Mode) -> LibraryTransfer:
    device, per_node, nodes = deployment.device, deployment.gpus_per_node, deployment.nodes
    row, k = wire_rows(model)[role], model.num_experts_per_tok
    to_device = row * expected_rows(tokens, deployment.devices, k)
    inside, outside = (per_node - 1) * to_device, (deployment.devices - per_node) * to_device
    links = device.node_link, device.cross_link
    if mode == "low latency":
        measured = zip(low_latency_lines(role), (inside, outside), links, LOW_LATENCY_LINKS, strict=True)
        seconds = max(line.seconds(sent, link / at) for line, sent, link, at in measured if sent)
        return LibraryTransfer(round(inside), round(outside), seconds)
    rate = 1e9 * HIGH_THROUGHPUT[max(count for count in HIGH_THROUGHPUT if count <= nodes)][role]
    which = int(nodes > 1)
    reached = row * (nodes if nodes > 1 else per_node) * expected_rows(tokens, nodes if nodes > 1 else per_node, k)
    seconds = TRANSFER_S + reached / (rate * links[which] / HIGH_THROUGHPUT_LINKS[which])
    if nodes > 1:  # a row crosses to a node once
        outside = (nodes - 1) / nodes * reached
        inside = (per_node - 1) / per_node * deployment.devices * to_device
    return LibraryTransfer(round(inside), round(outside), seconds)
