"""Plans with NVIDIA's library: its published figures, bytes without padding, and the transfers of a schedule."""

import dataclasses
import re

import pytest

from benchmarks.plan_published import five_stage_layer
from configs.deepseek_v3 import DEEPSEEK_V3
from configs.deployments import DECODE_EP144, H200, H800, NODE_8XH200, PREFILL_EP32
from sharding.collectives import Overlap
from sharding.experts.library_hop import LibraryHop
from sharding.experts.ragged import Ragged
from sharding.experts.traffic import LayerRows
from sharding.experts.transport import build
from sharding.experts.transport_kind import TransportKind
from sharding.mesh import Machine
from tests.tools.plan.test_timeline import EXPERTS, program
from tools.plan import nccl_ep, roofline
from tools.plan.deployment import Deployment, DeploymentError, PlannedBatch, kernel_rates
from tools.plan.hlo import collectives
from tools.plan.memory import judge, memory_of
from tools.plan.programs import lay_out
from tools.plan.timeline import CROSS_LINK, ScheduleSimulator

RATES = kernel_rates(H800, DEEPSEEK_V3)


def by_library(deployment: Deployment, **changes) -> Deployment:
    return dataclasses.replace(deployment, expert_transport="nccl_ep", **changes)


def exchange(deployment: Deployment, tokens: int) -> nccl_ep.LibraryExchange:
    found = nccl_ep.exchange(DEEPSEEK_V3, by_library(deployment), tokens)
    assert found is not None
    return found


@pytest.mark.parametrize("role", [0, 1])
def test_lines_are_as_close_to_the_figures_as_is_stated(role: int) -> None:
    inside, outside = nccl_ep.low_latency_lines(role)
    rows = nccl_ep.TOKENS * nccl_ep.EXPERTS_PER_TOKEN
    for gpus, rates in nccl_ep.LOW_LATENCY.items():
        line, share = (inside, 7 / 8) if gpus == 8 else (outside, 1 - 8 / gpus)
        published = rows * nccl_ep.SUM_BYTES / (1e9 * rates[role])
        assert line.seconds(share * rows * nccl_ep.SUM_BYTES) == pytest.approx(published, rel=0.025)
    row = (nccl_ep.DEEPEP_ROW, nccl_ep.SUM_BYTES)[role]
    stated = re.search(r"within (\d+) % of DeepEP", nccl_ep.KNOWN_ERRORS[0])
    assert stated is not None
    for gpus, figures in nccl_ep.DEEPEP_LOW_LATENCY.items():
        ours = 1e6 * outside.seconds((1 - 8 / gpus) * rows * row)
        assert ours == pytest.approx(figures[role], rel=int(stated[1]) / 100)


@pytest.mark.parametrize(
    ("unit", "tokens"), [(DECODE_EP144, 64), (NODE_8XH200, 48)], ids=lambda x: getattr(x, "name", x)
)
def test_low_latency_kernels_send_each_row_once_to_each_device(unit: Deployment, tokens: int) -> None:
    """These are the bytes of exact sizes, less ids and weights."""
    rows = LayerRows.from_widths(tokens, 8, DEEPSEEK_V3.hidden_size, fp8_dispatch=True)
    machine = Machine(unit.nodes, unit.gpus_per_node)
    exact = Ragged.from_layer(machine, 2, rows, Overlap.NONE).traffic(rows)
    found = exchange(unit, tokens)
    assert found.mode == "low latency"
    assert found.node_bytes + found.cross_bytes == pytest.approx(exact.device_bytes, rel=0.004)
    assert found.cross_bytes == pytest.approx(exact.node_bytes, rel=0.004)


def test_the_decode_unit_plans_above_the_published_fleet() -> None:
    """64 tokens a micro-batch and kernels on all multiprocessors, in the published five stages."""
    stages = roofline.decode_stages(DEEPSEEK_V3, RATES, PlannedBatch(64, 4989, experts=2))
    found = exchange(DECODE_EP144, 64)
    for slower, rate in ((1.0, 17_000), (1.15, 16_500), (1.5, 14_800)):
        layer = five_stage_layer(stages, slower * found.dispatch.seconds, slower * found.combine.seconds)
        dense = 2 * 3 * (stages["project"] + stages["attention"] + stages["mlp"])
        step = 58 * layer + dense + stages["head"] + roofline.HOST_S
        assert 128 * 8 / step > rate


def test_high_throughput_rows_cross_to_a_node_once() -> None:
    found = exchange(PREFILL_EP32, 8192)
    assert found.mode == "high throughput"
    dispatch, combine = roofline.wire_rows(DEEPSEEK_V3)
    nodes = 4 * (1 - (3 / 4) ** 8)
    assert found.cross_bytes == pytest.approx(8192 * 3 / 4 * nodes * (dispatch + combine), rel=1e-6)
    assert found.dispatch.seconds == pytest.approx(8192 * nodes * dispatch / 58e9 + roofline.TRANSFER_S)


def test_a_plan_takes_the_mode_that_a_server_takes() -> None:
    """Calls of 2,048 tokens and more have high throughput; where its buffers are too large, neither is planned."""
    machine = Machine(NODE_8XH200.nodes, NODE_8XH200.gpus_per_node)
    for tokens, mode, chunk in ((1024, "low latency", 0), (2048, "high throughput", 2048)):
        rows = LayerRows.from_widths(tokens, 8, DEEPSEEK_V3.hidden_size, fp8_dispatch=True)
        (hop,) = build(TransportKind.NCCL_EP, machine, DEEPSEEK_V3.n_routed_experts, rows).hops
        assert isinstance(hop, LibraryHop)
        assert (exchange(NODE_8XH200, tokens).mode, hop.chunk) == (mode, chunk)
        part = nccl_ep.exchange(DEEPSEEK_V3, by_library(NODE_8XH200), 48, tokens)
        assert part is not None and part.mode == mode and part.node_bytes == exchange(NODE_8XH200, 48).node_bytes
    assert nccl_ep.exchange(DEEPSEEK_V3, by_library(DECODE_EP144), 512) is None


@pytest.mark.aot
def test_buffers_have_place_beside_the_engines_memory() -> None:
    """The default share leaves enough; a larger one is cut by what is missing."""
    units = PREFILL_EP32, by_library(PREFILL_EP32), by_library(PREFILL_EP32, memory_utilization=0.95)
    plans = [memory_of(lay_out(DEEPSEEK_V3, unit)) for unit in units]
    plain, default, large = (plan.account.pool for plan in plans)
    assert plain == default < large == int(0.97 * H800.memory_bytes - plans[2].beside)
    assert [plan.beside for plan in plans] == [0, plans[1].beside, plans[1].beside]
    assert 2.5e9 < plans[1].beside < 5e9
    assert "beside NCCL EP's buffers of 4." in judge(plans[1], PREFILL_EP32, 256).why


def test_links_scale_with_the_device() -> None:
    halved = dataclasses.replace(H200, cross_link=25e9)
    slow = exchange(dataclasses.replace(DECODE_EP144, device=halved), 64).combine.seconds
    start = nccl_ep.low_latency_lines(1)[1].start
    assert slow - start == pytest.approx(2 * (exchange(DECODE_EP144, 64).combine.seconds - start))


def test_another_transport_is_compiled_in_its_place() -> None:
    decode = nccl_ep.stand_in(by_library(DECODE_EP144))
    assert (decode.expert_transport, decode.reserved_multiprocessors) == ("all_to_all", 0)
    assert nccl_ep.stand_in(by_library(DECODE_EP144, reserved_multiprocessors=4)).reserved_multiprocessors == 4
    assert nccl_ep.stand_in(by_library(PREFILL_EP32)).reserved_multiprocessors is None
    assert nccl_ep.stand_in(DECODE_EP144) is DECODE_EP144
    assert nccl_ep.exchange(DEEPSEEK_V3, DECODE_EP144, 64) is None
    with pytest.raises(DeploymentError, match="expert_combine 'int8'"):
        by_library(DECODE_EP144, expert_combine="int8")


def test_a_given_transfer_takes_its_time_whatever_its_bytes() -> None:
    module = program(*EXPERTS)
    found = collectives(module, 8)
    times = {"dispatch": 5e-3}
    line = ScheduleSimulator(module, found, {"experts": 1e-3}, RATES, times).simulate()
    [block] = [block for block in line.blocks if block.lane == CROSS_LINK]
    assert block.end - block.start == pytest.approx(5e-3)
    assert line.exposed["dispatch"] == pytest.approx(line.layers * 4e-3, rel=0.01)
    sent = exchange(DECODE_EP144, 64).without_padding(found)
    assert [each.cross_bytes for each in sent] == [exchange(DECODE_EP144, 64).dispatch.cross_bytes]
