"""Pipeline schedules: equal to the published ones operation by operation, and correct for all other sizes."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.pipeline.schedules import ALGORITHMS, PipelineSchedule, build, text
from training.pipeline.simulator import UNITS, Durations, simulate

GOLDEN = Path(__file__).parents[2] / "golden" / "pipeline_orders.json"
PUBLISHED = json.loads(GOLDEN.read_text())["schedules"]


def bubble(schedule: PipelineSchedule, durations: Durations = UNITS) -> float:
    """Returns the idle time of a rank in one step, by the published formulas (deepseek-ai/DualPipe)."""
    one = durations.forward + durations.backward
    if schedule.algorithm == "1F1B":
        return (schedule.stages - 1) * one
    if schedule.algorithm == "ZB1P":
        return (schedule.stages - 1) * (one - 2 * durations.weight)
    return (schedule.stages / 2 - 1) * (durations.pair + durations.backward - 3 * durations.weight)


def activations(schedule: PipelineSchedule) -> int:
    """Returns the most micro-batches whose activations a rank keeps at once, by the published table."""
    return schedule.stages + (schedule.directions - 1)


def order(algorithm: str, ranks: int, micro_batches: int) -> list[list[str]]:
    """Returns for each rank its operations as text."""
    return [[text(operation) for operation in rank] for rank in build(algorithm, ranks, micro_batches).orders]


@st.composite
def schedules(draw: st.DrawFn) -> PipelineSchedule:
    algorithm = draw(st.sampled_from(list(ALGORITHMS)))
    ranks = draw(st.integers(1, 5))
    more = draw(st.integers(0, 8))
    if algorithm == "DualPipe":
        return build(algorithm, 2 * ranks, 4 * ranks + 2 * more)
    return build(algorithm, ranks, (2 if algorithm == "DualPipeV" else 1) * ranks + more)


durations = st.builds(
    lambda forward, inputs, weight: Durations(forward, inputs + weight, weight, forward + inputs + weight),
    *[st.integers(1, 8)] * 3,
)


@pytest.mark.parametrize("case", PUBLISHED, ids=lambda case: f"{case['algorithm']}-{case['ranks']}")
def test_orders_equal_the_published_ones(case: dict) -> None:
    written = order(case["algorithm"], case["ranks"], case["micro_batches"])
    assert [" ".join(rank) for rank in written] == case["orders"]
    timeline = simulate(build(case["algorithm"], case["ranks"], case["micro_batches"]))
    assert timeline.makespan == case["makespan"]
    assert timeline.bubbles() == [case["bubble"]] * case["ranks"]
    assert timeline.in_flight() == case["in_flight"]


@settings(deadline=None, max_examples=50)
@given(schedules())
def test_bubble_and_activations_follow_the_formulas_for_every_size(schedule: PipelineSchedule) -> None:
    timeline = simulate(schedule)
    assert timeline.bubbles() == [bubble(schedule)] * schedule.ranks
    assert max(timeline.in_flight()) == activations(schedule) <= schedule.stages + 1


@settings(deadline=None, max_examples=50)
@given(schedules(), durations)
def test_operations_start_after_their_inputs(schedule: PipelineSchedule, durations: Durations) -> None:
    """Checks the times of the events, without the simulator's bookkeeping."""
    ended: dict[tuple[str, int, int], float] = {}
    last: dict[int, float] = {}
    for event in simulate(schedule, durations).events:
        assert event.start >= last.get(event.rank, 0)
        last[event.rank] = event.end
        for part in event.operation:
            stage, batch = schedule.stage(event.rank, part.direction), schedule.batch(part)
            assert schedule.rank(stage, batch) == event.rank
            kind = part.kind.value[0]
            before = {"F": ("F", stage - 1), "B": ("B", stage + 1), "W": ("B", stage)}[kind]
            if 0 <= before[1] < schedule.stages:
                assert event.start >= ended[*before, batch]
            if kind == "B":
                assert event.start >= ended["F", stage, batch]
            ended[kind, stage, batch] = event.end


@settings(deadline=None, max_examples=50)
@given(schedules().filter(lambda s: s.algorithm == "1F1B"), durations)
def test_formula_of_1f1b_holds_for_all_durations(schedule: PipelineSchedule, durations: Durations) -> None:
    assert simulate(schedule, durations).bubbles() == [bubble(schedule, durations)] * schedule.ranks


def test_orders_of_the_two_simple_schedules() -> None:
    assert order("1F1B", 2, 3) == [
        ["F0.0", "F0.1", "B0.0", "F0.2", "B0.1", "B0.2"],
        ["F0.0", "B0.0", "F0.1", "B0.1", "F0.2", "B0.2"],
    ]
    assert order("ZB1P", 2, 2) == [
        ["F0.0", "F0.1", "Bi0.0", "W0.0", "Bi0.1", "W0.1"],
        ["F0.0", "Bi0.0", "F0.1", "Bi0.1", "W0.0", "W0.1"],
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("GPipe", 2, 4), "unknown pipeline schedule 'GPipe'; known are 1F1B, ZB1P, DualPipe, DualPipeV"),
        (("1F1B", 0, 4), "at least one rank, got 0"),
        (("ZB1P", 4, 3), "ZB1P over 4 ranks needs at least 4 micro-batches, got 3"),
        (("DualPipe", 3, 12), "even number of ranks, got 3"),
        (("DualPipe", 4, 9), "even number of micro-batches, at least 8; got 9"),
        (("DualPipeV", 4, 7), "DualPipeV over 4 ranks needs at least 8 micro-batches, got 7"),
    ],
)
def test_unsupported_sizes_are_refused(arguments: tuple[str, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(*arguments)


def test_a_deadlock_is_found() -> None:
    schedule = build("1F1B", 2, 2)
    (first, *others), last = schedule.orders
    turned = dataclasses.replace(schedule, orders=((others[1], others[0], first, *others[2:]), last))
    with pytest.raises(ValueError, match=r"every rank waits: rank 0 for B0.0, rank 1 for F0.0"):
        simulate(turned)


def test_missing_and_repeated_operations_are_found() -> None:
    schedule = build("ZB1P", 2, 2)
    first, last = schedule.orders
    with pytest.raises(ValueError, match="ZB1P: W of micro-batch 1 in stage 1 appears 0 times, not once"):
        simulate(dataclasses.replace(schedule, orders=(first, last[:-1])))
    with pytest.raises(ValueError, match="F of micro-batch 0 in stage 0 appears 2 times, not once"):
        simulate(dataclasses.replace(schedule, orders=((first[0], *first), last)))
