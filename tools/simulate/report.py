"""A simulation as terminal tables, and as a picture over time: nodes, tokens, waits, use."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tools.plan.roofline import KNOWN_ERRORS
from tools.simulate.record import RequestLog
from tools.simulate.simulation import FleetSnapshot
from tools.tables import make_table

_COLORS = {"prefill": "#e9a23b", "decode": "#5b8fd1", "both": "#5b8fd1"}
MODELLED = (
    "real: admission, chunked prefill, decode batches, pages, prefix index, planner and accounting of offload tiers, "
    "the router's cost and its memory of sent pages",
    "modelled: step times (the plan's schedule with estimated durations), links and copies at given rates, lengths of "
    "answers (given), the router's queue; no failures, no slow hosts",
)


def render(figures: dict[str, Any]) -> Group:
    """Renders the figures that `simulate` returns."""
    requests = figures["requests"]
    counts = ", ".join(f"{count:,} {name}" for name, count in requests.items())
    parts: list[RenderableType] = [Text(f"requests: {counts}", style="bold"), _rates(figures), _latencies(figures)]
    parts.append(_roles(figures))
    if figures["tiers"]:
        parts.append(_tiers(figures))
    simulator = figures["simulator"]
    took = f"{simulator['wall_s']:,.0f} s, {simulator['processor_s']:,.0f} processor seconds"
    lines = [
        f"{simulator['virtual_s']:,.0f} s simulated in {took}",
        *MODELLED,
        *(f"known error: {error}" for error in KNOWN_ERRORS),
    ]
    return Group(*parts, Text("\n".join(lines)))


def _rates(figures: dict[str, Any]) -> Table:
    table = make_table(f"The last {figures['seconds']:,.0f} s", "", "")
    table.add_row("requests/s answered", f"{figures['requests_per_second']:,.2f}")
    table.add_row("answer tokens/s", f"{figures['output_tokens_per_second']:,.0f}")
    table.add_row("mean prompt, mean answer", f"{figures['mean_prompt']:,.0f}, {figures['mean_answer']:,.0f}")
    table.add_row("prefix cache hit rate", f"{figures['hit_rate']:.1%}")
    if figures["goodput"]:
        good = figures["goodput"]
        table.add_row("goodput", f"{good['requests_per_second']:,.2f} requests/s, {good['share']:.1%}")
    return table


def _latencies(figures: dict[str, Any]) -> Table:
    names = ("mean", "p50", "p90", "p95", "p99", "max")
    table = make_table("Milliseconds", "", *names)
    for title, key in (("to the first token", "ttft_ms"), ("per token", "tpot_ms"), ("between tokens", "itl_ms")):
        found = figures[key]
        table.add_row(title, *(f"{found[name]:,.1f}" if found else "-" for name in names))
    return table


def _roles(figures: dict[str, Any]) -> Table:
    columns = ("nodes", "steps", "busy", "decode step ms", "preempted", "hits on device")
    table = make_table("Instances", "", *columns)
    for role, found in figures["roles"].items():
        step = f"{found['decode_step_ms']:.1f}" if role != "prefill" else "-"
        hits = f"{found['found_on_device']:.1%}" if role != "decode" else "-"
        cells = f"{found['nodes']:,.2f}", f"{found['steps']:,.0f}", f"{found['busy']:.1%}", step
        table.add_row(f"{role}: {found['times']}", *cells, f"{found['preemptions']:,}", hits)
    return table


def _tiers(figures: dict[str, Any]) -> Table:
    table = make_table("Offload tiers", "", "queries", "hits", "hit rate", "GB written", "pages evicted")
    for name, found in figures["tiers"].items():
        share = found["hits"] / found["queries"] if found["queries"] else 0.0
        cells = f"{found['queries']:,.0f}", f"{found['hits']:,.0f}", f"{share:.1%}"
        table.add_row(name, *cells, f"{found['stored_bytes'] / 1e9:,.1f}", f"{found['evictions']:,.0f}")
    return table


def draw(snapshots: Sequence[FleetSnapshot], record: RequestLog, path: Path) -> None:
    """Writes an SVG or PNG, by suffix. Raises ModuleNotFoundError without matplotlib (extra `plots`)."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 9), layout="constrained")
    FigureCanvasAgg(figure)
    nodes, rates, waits, use = figure.subplots(4, 1, sharex=True)
    _draw_nodes(nodes, snapshots)
    _draw_rates(rates, snapshots)
    _draw_waits(waits, snapshots, record)
    _draw_use(use, snapshots)
    use.set_xlabel("minutes of virtual time")
    with matplotlib.rc_context({"svg.hashsalt": "dsv3"}):  # the same file for the same day
        figure.savefig(path, dpi=100, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw_nodes(axes: Any, snapshots: Sequence[FleetSnapshot]) -> None:
    minutes, roles = _minutes(snapshots), list(snapshots[0].nodes)
    columns = [[snapshot.nodes[role] for snapshot in snapshots] for role in roles]
    axes.stackplot(minutes, columns, labels=roles, colors=[_COLORS[role] for role in roles], step="post")
    axes.set_ylabel("nodes")
    axes.legend(loc="upper right", fontsize=8)


def _draw_rates(axes: Any, snapshots: Sequence[FleetSnapshot]) -> None:
    pairs = list(itertools.pairwise(snapshots))
    arrived = [(b.arrived - a.arrived) / (b.at - a.at) for a, b in pairs]
    tokens = [(b.output_tokens - a.output_tokens) / (b.at - a.at) / 1e3 for a, b in pairs]
    axes.plot(_minutes(snapshots)[1:], tokens, color="#444444", label="thousand answer tokens/s")
    axes.plot(_minutes(snapshots)[1:], arrived, color="#b04a4a", label="requests/s", linewidth=0.8)
    axes.set_ylabel("per second")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right", fontsize=8)


def _draw_waits(axes: Any, snapshots: Sequence[FleetSnapshot], record: RequestLog) -> None:
    spans = [record.ttft(a.at, b.at) for a, b in itertools.pairwise(snapshots)]
    for rank, color in ((50, "#5b8fd1"), (99, "#b04a4a")):
        values = [float(np.percentile(span, rank)) if len(span) else np.nan for span in spans]
        axes.plot(_minutes(snapshots)[1:], values, color=color, label=f"p{rank}")
    axes.set_yscale("log")
    axes.set_ylabel("s to the first token")
    axes.legend(loc="upper right", fontsize=8)


def _draw_use(axes: Any, snapshots: Sequence[FleetSnapshot]) -> None:
    for role in snapshots[0].use:
        axes.plot(
            _minutes(snapshots), [100 * snapshot.use[role] for snapshot in snapshots], color=_COLORS[role], label=role
        )
    axes.set_ylabel("cache or batch slots, %")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right", fontsize=8)


def _minutes(snapshots: Sequence[FleetSnapshot]) -> list[float]:
    return [snapshot.at / 60 for snapshot in snapshots]
