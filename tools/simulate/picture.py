"""A fleet's day as a picture: nodes over what is asked for, tokens, times to the first token, use."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tools.simulate.record import Record
from tools.simulate.series import Look

_COLORS = {"prefill": "#e9a23b", "decode": "#5b8fd1", "both": "#5b8fd1"}


def draw(looks: Sequence[Look], record: Record, path: Path) -> None:
    """Writes SVG or PNG, as the path ends. Raises ModuleNotFoundError without matplotlib (the `plots` extra)."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 9), layout="constrained")
    FigureCanvasAgg(figure)
    nodes, rates, waits, use = figure.subplots(4, 1, sharex=True)
    _nodes(nodes, looks)
    _rates(rates, looks)
    _waits(waits, looks, record)
    _use(use, looks)
    use.set_xlabel("minutes of virtual time")
    with matplotlib.rc_context({"svg.hashsalt": "dsv3"}):  # the same file for the same day
        figure.savefig(path, dpi=100, metadata={"Date": None} if path.suffix == ".svg" else None)


def _nodes(axes: Any, looks: Sequence[Look]) -> None:
    minutes, roles = _minutes(looks), list(looks[0].nodes)
    columns = [[look.nodes[role] for look in looks] for role in roles]
    axes.stackplot(minutes, columns, labels=roles, colors=[_COLORS[role] for role in roles], step="post")
    axes.set_ylabel("nodes")
    axes.legend(loc="upper right", fontsize=8)


def _rates(axes: Any, looks: Sequence[Look]) -> None:
    pairs = list(itertools.pairwise(looks))
    asked = [(b.arrived - a.arrived) / (b.at - a.at) for a, b in pairs]
    given = [(b.output_tokens - a.output_tokens) / (b.at - a.at) / 1e3 for a, b in pairs]
    axes.plot(_minutes(looks)[1:], given, color="#444444", label="thousand answer tokens/s")
    axes.plot(_minutes(looks)[1:], asked, color="#b04a4a", label="requests/s", linewidth=0.8)
    axes.set_ylabel("per second")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right", fontsize=8)


def _waits(axes: Any, looks: Sequence[Look], record: Record) -> None:
    spans = [record.ttft(a.at, b.at) for a, b in itertools.pairwise(looks)]
    for rank, color in ((50, "#5b8fd1"), (99, "#b04a4a")):
        values = [float(np.percentile(span, rank)) if len(span) else np.nan for span in spans]
        axes.plot(_minutes(looks)[1:], values, color=color, label=f"p{rank}")
    axes.set_yscale("log")
    axes.set_ylabel("s to the first token")
    axes.legend(loc="upper right", fontsize=8)


def _use(axes: Any, looks: Sequence[Look]) -> None:
    for role in looks[0].use:
        axes.plot(_minutes(looks), [100 * look.use[role] for look in looks], color=_COLORS[role], label=role)
    axes.set_ylabel("cache or slots, %")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right", fontsize=8)


def _minutes(looks: Sequence[Look]) -> list[float]:
    return [look.at / 60 for look in looks]
