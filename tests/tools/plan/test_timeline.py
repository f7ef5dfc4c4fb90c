"""Simulated timelines: hidden transfers cost nothing, exposed ones cost their time."""

import pytest

from configs.deepseek_v3 import DEEPSEEK_V3
from configs.deployments import H800
from tools.plan import hlo
from tools.plan.deployment import kernel_rates
from tools.plan.hlo import collectives
from tools.plan.roofline import HOOK_S, TRANSFER_S
from tools.plan.timeline import COMPUTE, CROSS_LINK, Block, ScheduleSimulator, Timeline, merge_blocks

RATES = kernel_rates(H800, DEEPSEEK_V3)
BYTES = 1 << 20
WIRE_S = TRANSFER_S + BYTES / 2 / RATES.dispatch_link
TRIPS = 10


def kernel(name: str, stage: str) -> str:
    attributes = f'custom_call_target="mosaic_gpu_v2", metadata={{op_name="jit(f)/micro_batch_0/{stage}/k"}}'
    return f"  %{name} = s8[{BYTES}] custom-call(%x), {attributes}"


def program(*between: str, after: tuple[str, ...] = ()) -> hlo.Module:
    """Ten layers with one dispatch between two nodes, `between` its start and done, and `after` it."""
    return hlo.parse(program_text(*between, after=after))


def program_text(*between: str, after: tuple[str, ...] = ()) -> str:
    groups = "replica_groups=mesh['node'=2,'gpu'=8] {'node'}"
    start = f'((s8[{BYTES}]), s8[{BYTES}]) all-to-all-start(%x), {groups}, metadata={{op_name="jit(f)/dispatch/a"}}'
    lines = [
        "HloModule m, is_scheduled=true, num_partitions=16",
        "%body (p: s8[1]) -> s8[1] {",
        f"  %x = s8[{BYTES}] parameter(0)",
        f"  %s = {start}",
        *between,
        f"  %d = s8[{BYTES}] all-to-all-done(%s)",
        *after,
        "}",
        "ENTRY %main (p: s8[1]) -> s8[1] {",
        f"  %x = s8[{BYTES}] parameter(0)",
        f'  %w = s8[1] while(%x), body=%body, backend_config={{"known_trip_count":{{"n":"{TRIPS}"}}}}',
        "}",
    ]
    return "\n".join(lines)


def simulate(module: hlo.Module, stages: dict[str, float]) -> Timeline:
    return ScheduleSimulator(module, collectives(module, 8), stages, RATES).simulate()


EXPERTS = (kernel("gate_up", "experts"), kernel("down", "experts"))


def test_a_transfer_behind_longer_work_costs_nothing() -> None:
    line = simulate(program(*EXPERTS), {"experts": 10 * WIRE_S})
    assert line.layer == pytest.approx(10 * WIRE_S + HOOK_S)
    assert line.exposed["dispatch"] == 0
    assert (line.layers, line.micro_batches) == (TRIPS, 1)
    assert line.step == pytest.approx(TRIPS * line.layer)


def test_a_transfer_behind_shorter_work_costs_the_rest() -> None:
    line = simulate(program(*EXPERTS), {"experts": WIRE_S / 4})
    assert line.layer == pytest.approx(WIRE_S + HOOK_S)
    assert line.exposed["dispatch"] == pytest.approx(TRIPS * WIRE_S * 3 / 4)


def test_a_transfer_with_nothing_behind_it_is_paid_in_full() -> None:
    line = simulate(program(after=EXPERTS), {"experts": 10 * WIRE_S})
    assert line.layer == pytest.approx(11 * WIRE_S + HOOK_S)
    assert line.exposed["dispatch"] == pytest.approx(TRIPS * WIRE_S)


def test_a_stage_with_a_loop_takes_its_time_once() -> None:
    """Attention has a kernel in front of a loop of 4 passes with two kernels, in each of ten layers.

    Its body was made for the other micro-batch, and the loop itself says whose it is.
    """
    loop = (
        '  %h = s8[1] while(%x), body=%heads, metadata={op_name="micro_batch_0/attention/while"}, '
        'backend_config={"known_trip_count":{"n":"4"}}'
    )
    text = program_text(kernel("first", "attention"), loop, *EXPERTS)
    inside = (kernel(name, "attention").replace("micro_batch_0", "micro_batch_1") for name in ("keys", "scores"))
    heads = ("%heads (p: s8[1]) -> s8[1] {", *inside, "}")
    module = hlo.parse(text.replace("%body (p", "\n".join((*heads, "%body (p")), 1))
    line = simulate(module, {"attention": 9e-6, "experts": 10 * WIRE_S})
    assert line.layer == pytest.approx(9e-6 + 10 * WIRE_S + HOOK_S)
    block = next(block for block in line.blocks if block.label == "attention")
    assert (block.start, block.end, block.micro_batch) == (0, pytest.approx(9e-6), 0)
    assert line.step == pytest.approx(TRIPS * line.layer)


def test_a_stages_time_is_divided_over_its_products_and_micro_batches() -> None:
    twice = (*EXPERTS, kernel("gate_up_1", "experts"), kernel("down_1", "experts"))
    line = simulate(program(*twice), {"experts": 10 * WIRE_S})
    assert line.micro_batches == 2
    assert line.layer == pytest.approx(20 * WIRE_S + HOOK_S)


def test_blocks_have_lane_stage_and_micro_batch() -> None:
    line = simulate(program(*EXPERTS), {"experts": 10 * WIRE_S})
    by_lane = {block.lane: block for block in reversed(line.blocks)}
    assert by_lane[COMPUTE].label == "experts"
    assert by_lane[COMPUTE].micro_batch == 0
    assert by_lane[CROSS_LINK].label == "dispatch"


def test_adjacent_blocks_of_one_stage_are_merged() -> None:
    blocks = [Block(COMPUTE, "experts", 0, 1), Block(COMPUTE, "experts", 1, 2), Block(COMPUTE, "experts", 3, 4)]
    assert merge_blocks(blocks) == (Block(COMPUTE, "experts", 0, 2), Block(COMPUTE, "experts", 3, 4))
