"""Which transport and schedule a bucket gets, and the bytes that the server reports for it."""

import dataclasses
import logging
import os

import jax
import jax.numpy as jnp
import pytest

from configs.deepseek_v3 import DEEPSEEK_V3
from configs.deepseek_v4 import DEEPSEEK_V4_FLASH
from dsv3.config.engine import EngineConfig, ForwardProgram
from dsv3.engine.communication import Communication
from dsv3.engine.device.layout import Reserve, reserve
from dsv3.engine.device.programs import Programs
from dsv3.model.schedules import HOOKED, OVERLAPPED, PLAIN, Schedule
from sharding.collectives import Overlap, compiler_options, launch_in_order, resolve_overlap
from sharding.experts.transport_kind import TransportKind
from sharding.mesh import Machine, rank_mesh

GPUS = Communication(DEEPSEEK_V3, Machine(18, 8), 288, 1, Overlap.HOOKS, None, True, 2)
LAYERS = DEEPSEEK_V3.num_moe_layers


@pytest.mark.parametrize(
    ("tokens", "is_prefill", "schedule", "at_once"),
    [
        (128, False, OVERLAPPED, 64),
        (64, False, HOOKED, 64),
        (129, False, HOOKED, 129),
        (512, True, HOOKED, 512),
        (4096, True, OVERLAPPED, 2048),
    ],
)
def test_large_steps_are_cut_in_two_and_small_ones_hide_the_combine(
    tokens: int, is_prefill: bool, schedule: Schedule, at_once: int
) -> None:
    assert GPUS.schedule(tokens, is_prefill) is schedule
    asked = dataclasses.replace(GPUS, kind=TransportKind.ALL_TO_ALL)
    whole = dataclasses.replace(asked, overlap=Overlap.NONE)  # takes `at_once` tokens as one batch
    assert asked.transport(tokens, is_prefill).hops[0].capacity == whole.transport(at_once, is_prefill).hops[0].capacity
    micro_batches = 2 if schedule is OVERLAPPED else 1
    assert asked.traffic(tokens, is_prefill) == whole.traffic(at_once, is_prefill) * micro_batches


def test_decode_is_cut_where_transfers_take_longer_than_weights() -> None:
    """A device of one node holds 32 of DeepSeek-V3's experts, which a second micro-batch would read again."""
    node = dataclasses.replace(GPUS, machine=Machine(1, 8), replicas=256)
    flash = dataclasses.replace(node, cfg=DEEPSEEK_V4_FLASH, machine=Machine(1, 4))
    unit = dataclasses.replace(flash, machine=Machine(4, 8), replicas=288)
    for each, tokens in ((node, 256), (flash, 512), (unit, 128)):
        assert each.schedule(tokens, False) is HOOKED
    assert unit.schedule(256, False) is OVERLAPPED
    assert node.schedule(4096, True) is flash.schedule(4096, True) is OVERLAPPED, "prefill is bound by its operations"


def test_where_nothing_can_overlap_steps_are_plain() -> None:
    assert dataclasses.replace(GPUS, overlap=Overlap.NONE).schedule(4096, True) is PLAIN
    ring = dataclasses.replace(GPUS, kind=TransportKind.RING)
    assert ring.schedule(4096, True) is HOOKED, "a ring has no hops to put under another micro-batch"


def test_steps_too_large_for_the_library_take_what_auto_selects() -> None:
    library = dataclasses.replace(GPUS, kind=TransportKind.NCCL_EP)
    assert library.transport(128, False).kind is TransportKind.NCCL_EP
    assert library.schedule(128, False) is OVERLAPPED
    assert library.transport(16384, True) == GPUS.transport(16384, True)
    overlapped = [library.overlaps(ForwardProgram(*each)) for each in (("decode", 128, 128), ("prefill", 4096, 4096))]
    assert overlapped == [0, 2], "its kernels run between ours, and need no multiprocessors beside them"
    prefill = dataclasses.replace(library, machine=Machine(4, 8))
    assert prefill.transport(16384, True).kind is TransportKind.NCCL_EP
    assert prefill.schedule(16384, True) is OVERLAPPED
    assert prefill.overlaps(ForwardProgram("prefill", 16384, 16384)) == 1, "high throughput runs beside kernels"


def test_one_collective_at_a_time_where_overlap_is_not_wanted() -> None:
    """XLA's own limit is one, and a step in two micro-batches would have nothing to run beside a transfer."""
    one = dataclasses.replace(GPUS, overlap=resolve_overlap("cuda", wanted=False))
    assert one.overlap is Overlap.ORDER
    assert one.schedule(4096, True) is one.schedule(128, False) is HOOKED
    with_limits = Programs("cuda", 24, overlaps=True).options or {}
    alone = Programs("cuda", 24, overlaps=False).options or {}
    if resolve_overlap("cuda") is Overlap.HOOKS:
        assert with_limits.keys() - alone.keys() > {"xla_gpu_experimental_parallel_collective_overlap_limit"}
    assert not any("collective" in name for name in alone)


def test_nccl_launches_in_order_on_gpus(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A user's setting stays, and is logged."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(os, "environ", {})
    launch_in_order("cpu")
    assert "NCCL_LAUNCH_ORDER_IMPLICIT" not in os.environ
    for given, found in ((None, "1"), ("0", "0")):
        if given is not None:
            os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] = given
        launch_in_order("cuda")
        assert os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] == found
        assert f"NCCL_LAUNCH_ORDER_IMPLICIT={found}" in caplog.text


def test_devices_of_a_rank_share_its_tokens() -> None:
    pair = dataclasses.replace(GPUS, shards=2, kind=TransportKind.RING)
    alone = dataclasses.replace(pair, shards=1)
    assert pair.traffic(63, False) == alone.traffic(32, False)
    several = dataclasses.replace(GPUS, shards=2)
    assert several.schedule(128, False) is HOOKED
    assert several.schedule(256, False) is OVERLAPPED
    assert several.transport(256, False) == GPUS.transport(128, False)


def test_rows_take_the_bytes_of_their_type() -> None:
    mesh = rank_mesh(jax.devices()[:4], 2)
    fp8, bf16, f32 = (
        Communication.from_mesh(mesh, DEEPSEEK_V3, 256, transport="ring", **options).traffic(8, False).device_bytes
        for options in (dict(), dict(fp8=False), dict(fp8=False, dtype=jnp.float32))
    )
    hidden, sent = DEEPSEEK_V3.hidden_size, 3 * 8 * LAYERS  # to three others, eight rows in each layer
    assert (bf16 - fp8) / sent == hidden - hidden / 32  # 2 bytes a channel against 1 and a scale for 128
    assert (f32 - bf16) / sent == 4 * hidden


def test_an_unknown_or_impossible_transport_is_refused() -> None:
    mesh = rank_mesh(jax.devices()[:2])
    with pytest.raises(ValueError, match="'nccl' is not one of auto, ring"):
        Communication.from_mesh(mesh, DEEPSEEK_V3, 256, transport="nccl")
    with pytest.raises(ValueError, match="XLA does not support on cpu"):
        Communication.from_mesh(mesh, DEEPSEEK_V3, 256, transport="ragged")


def test_overlapped_steps_leave_multiprocessors_to_transfers() -> None:
    """One number for an instance: NCCL's communicators belong to all its programs."""

    def reserve_of(prefill: int, decode: int, wanted: int | None = None, count: int = 132) -> Reserve:
        sizes = {"max_num_batched_tokens": prefill, "max_num_seqs": decode, "reserved_multiprocessors": wanted}
        return reserve(EngineConfig(max_model_len=64, num_pages=9, **sizes), GPUS.overlaps, count)  # type: ignore[arg-type]

    both = reserve_of(4096, 128)
    programs = (("prefill", 4096), ("decode", 128), ("decode", 16), ("sample", 128))
    assert [both.of(*program).reserved for program in programs] == [24, 24, 0, 0]
    assert [
        reserve_of(*of).beside_transfers.reserved for of in ((64, 128), (64, 16), (4096, 128, 0), (4096, 128, 20))
    ] == [8, 0, 0, 20]
    assert [reserve_of(*of).channels for of in ((64, 128), (64, 16), (4096, 128, 0), (4096, 128, 1))] == [8, 0, 0, 1]
    assert reserve_of(4096, 128, count=78).of("prefill", 4096).taken == 54
    with pytest.raises(ValueError, match="78 multiprocessors shall be left to transfers"):
        reserve_of(4096, 128, 78, count=78)


@pytest.mark.parametrize(
    ("kind", "shards", "prefill", "channels"),
    [
        (TransportKind.HIERARCHICAL, 1, 4096, 12),
        (TransportKind.ALL_TO_ALL, 1, 4096, 24),
        (TransportKind.HIERARCHICAL, 2, 4096, 8),
        (TransportKind.HIERARCHICAL, 1, 64, 8),
        (TransportKind.HIERARCHICAL, 2, 64, 4),
    ],
)
def test_communicators_under_way_at_once_divide_the_channels(kind, shards, prefill, channels) -> None:
    """Each channel is a thread block, of which 24 may run beside our kernels, or 8 where decode alone overlaps."""
    cfg = EngineConfig(max_model_len=64, num_pages=9, max_num_batched_tokens=prefill, max_num_seqs=256)
    assert reserve(cfg, dataclasses.replace(GPUS, kind=kind, shards=shards).overlaps, 132).channels == channels


def test_nccl_gets_as_many_channels() -> None:
    channels = {name: value for name, value in (compiler_options("cuda", 24) or {}).items() if "channels" in name}
    assert set(channels.values()) == ({24} if resolve_overlap("cuda") is Overlap.HOOKS else set())
    assert not any("channels" in name for name in compiler_options("cuda") or {})
