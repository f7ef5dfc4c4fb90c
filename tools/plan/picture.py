"""A plan's timeline as a picture: one MoE layer, compute above the network, in the style of the published ones."""

from pathlib import Path
from typing import Any

from tools.plan.plan import Plan, StepPlan
from tools.plan.timeline import LANES, Block, name_of

_COLORS = ("#e9a23b", "#5b8fd1")  # of the micro-batches
_NEITHER = "#c4c4c4"
_NARROW, _NO_TEXT = 0.06, 0.012
"""Shares of the layer's time: below the first a bar's text is turned, below the second it is left out."""


def draw(plan: Plan, path: Path) -> None:
    """Writes a PNG with one panel per step. Raises ModuleNotFoundError without matplotlib (the `plots` extra)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 3.4 * len(plan.steps) + 0.3), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(plan.steps), 1, squeeze=False)[:, 0]
    for axes, step in zip(panels, plan.steps, strict=True):
        _panel(axes, plan, step)
    figure.savefig(path, dpi=100)


def _panel(axes: Any, plan: Plan, step: StepPlan) -> None:
    line, deployment = step.timeline, plan.deployment
    for block in line.blocks:
        _bar(axes, block, line.layer)
    axes.set_yticks(range(len(LANES)), LANES)
    axes.set_ylim(len(LANES) - 0.5, -0.5)
    axes.set_xlim(0, line.layer * 1e6)
    axes.set_xlabel("microseconds (estimated durations, compiled order)")
    batches = "two micro-batches" if line.micro_batches == 2 else "one batch"
    axes.set_title(
        f"{plan.model_name}, {deployment.name}: one MoE layer of a {step.phase} step, {step.tokens:,} tokens per rank "
        f"in {batches}, {deployment.devices} {deployment.device.name}",
        fontsize=10,
        loc="left",
    )


def _bar(axes: Any, block: Block, whole: float) -> None:
    start, width = block.start * 1e6, (block.end - block.start) * 1e6
    lane = LANES.index(block.lane)
    color = _NEITHER if block.micro_batch is None else _COLORS[block.micro_batch % len(_COLORS)]
    axes.barh(lane, width, left=start, height=0.86, color=color, edgecolor="white", linewidth=0.8)
    share = (block.end - block.start) / whole
    if share > _NO_TEXT:
        text = name_of(block).replace("_expert", "")
        turned = 90 if share < _NARROW else 0
        axes.text(start + width / 2, lane, text, rotation=turned, ha="center", va="center", fontsize=8, clip_on=True)
