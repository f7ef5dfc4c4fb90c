"""Bubbles and activations of the four pipeline schedules, simulated, and a picture of them.

    python -m benchmarks.pipeline [--picture docs/pipeline_schedules.svg]

A forward takes 1, each half of a backward 1, an overlapped pair 3. The picture shows the operations with four stages
at their simulated times. `tests/training/pipeline` runs the schedules on CPU devices and compares gradients.
"""

import argparse
import pathlib
from collections.abc import Iterator

from benchmarks.record import Cell, Report, run
from training.pipeline.schedules import ALGORITHMS, Pass, PassKind, build
from training.pipeline.simulator import activations, bubble, simulate

MICRO_BATCHES = 12


def main(report: Report) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=pathlib.Path, help="write an SVG of the schedules with four stages here")
    picture = parser.parse_args().picture
    columns = ["schedule", "ranks", "stages", "micro-batches", "idle of a rank", "by formula", "of the step (%)",
               "in flight", "by table"]  # fmt: skip
    report.table("Schedules", columns, simulated())
    if picture:
        picture.write_text(draw())


def simulated() -> Iterator[list[Cell]]:
    """Yields the bubble of every schedule from 2 to 16 ranks, simulated and by formula."""
    for algorithm in ALGORITHMS:
        for ranks in (2, 4, 8, 16):
            schedule = build(algorithm, ranks, 4 * ranks)
            timeline = simulate(schedule)
            idle = sorted(set(timeline.bubbles()))
            yield [algorithm, ranks, schedule.stages, schedule.micro_batches, " to ".join(f"{x:g}" for x in idle),
                   f"{bubble(schedule):g}", 100 * idle[-1] / timeline.makespan, max(timeline.in_flight()),
                   activations(schedule)]  # fmt: skip


UNIT, ROW, LEFT, GAP = 18, 20, 60, 34
COLOURS = {
    PassKind.FORWARD: "#f2c75c",
    PassKind.BACKWARD: "#6fa8dc",
    PassKind.INPUT: "#a4d3a2",
    PassKind.WEIGHT: "#c9a0dc",
}
NAMES = {
    PassKind.FORWARD: "forward",
    PassKind.BACKWARD: "backward",
    PassKind.INPUT: "input gradient",
    PassKind.WEIGHT: "weight gradient",
}


def draw() -> str:
    """Returns an SVG: per schedule a block of rows, one per rank, with a box per operation."""
    parts, top = legend(), 50
    width = LEFT + 20
    for algorithm in ALGORITHMS:
        ranks = 2 if algorithm == "DualPipeV" else 4
        events = simulate(build(algorithm, ranks, MICRO_BATCHES)).events
        title = f"{algorithm}: {ranks} ranks, 4 stages, {MICRO_BATCHES} micro-batches"
        parts.append(f'<text x="4" y="{top - 6}" font-weight="bold">{title}</text>')
        for rank in range(ranks):
            parts.append(f'<text x="4" y="{top + rank * ROW + 14}">rank {rank}</text>')
        for event in events:
            share = (event.end - event.start) / len(event.operation)
            for i, part in enumerate(event.operation):
                left = LEFT + (event.start + i * share) * UNIT
                parts.append(box(part, left, top + event.rank * ROW, share * UNIT))
            if len(event.operation) == 2:
                size = f'x="{LEFT + event.start * UNIT:g}" y="{top + event.rank * ROW}" width="{2 * share * UNIT:g}"'
                parts.append(f'<rect {size} height="{ROW - 2}" fill="none" stroke="#000" stroke-width="1.5"/>')
        width = max(width, LEFT + max(event.end for event in events) * UNIT + 10)
        top += ranks * ROW + GAP
    size = f'width="{width:g}" height="{top - 10}" font-family="sans-serif" font-size="11"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>", ""])


def legend() -> list[str]:
    """Returns one box per kind with its name."""
    parts = []
    for i, (kind, colour) in enumerate(COLOURS.items()):
        parts.append(f'<rect x="{4 + i * 130}" y="6" width="14" height="14" fill="{colour}" stroke="#555"/>')
        parts.append(f'<text x="{22 + i * 130}" y="17">{NAMES[kind]}</text>')
    parts.append('<text x="524" y="17">thick frame: an overlapped pair; white numbers: direction 1</text>')
    return parts


def box(part: Pass, left: float, top: int, width: float) -> str:
    """Returns a box with the number of its micro-batch, which is white in direction 1."""
    ink = "#fff" if part.direction else "#000"
    place = f'x="{left:g}" y="{top}" width="{width:g}" height="{ROW - 2}"'
    text = f'<text x="{left + width / 2:g}" y="{top + 13}" text-anchor="middle" fill="{ink}">{part.micro_batch}</text>'
    return f'<rect {place} fill="{COLOURS[part.kind]}" stroke="#555" stroke-width="0.5"/>{text}'


if __name__ == "__main__":
    run(main)
