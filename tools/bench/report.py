"""Shows the report of a load test as tables for people."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

# Above this part of a processor the client's own work shows in the server's figures.
BUSY_CLIENT = 0.8
LATENCIES = {
    "ttft_ms": "time to first token",
    "itl_ms": "inter-token latency",
    "tpot_ms": "time per output token",
    "e2e_ms": "end to end",
}


def render(report: Mapping[str, Any]) -> RenderableType:
    """Returns tables of the report that `serve.run` returns, with a line per thing that makes its figures doubtful."""
    parts: list[RenderableType] = [_totals(report), _latencies(report)]
    if report["errors"]:
        parts.append(_errors(report["errors"]))
    return Group(*parts, *(Text(f"note: {note}", style="yellow") for note in notes(report)))


def notes(report: Mapping[str, Any]) -> list[str]:
    """Returns what a reader has to know before trusting the figures, one line each."""
    found = []
    if report["interrupted"]:
        found.append("interrupted: requests that were still running are not counted")
    if report["requests"]["completed"] and report["tokens"]["output"] is None:
        found.append("the server states no token counts (neither usage nor token_ids), so there are no tokens/s")
    if report["requests"]["completed"] and report["tokens"]["itl_per"] == "chunk":
        found.append("the server does not say how many tokens a chunk carries: inter-token latency is per chunk")
    if report["client"]["cpu_fraction"] > BUSY_CLIENT:
        share = report["client"]["cpu_fraction"]
        found.append(f"the client used {share:.0%} of a processor: its own work shows in the latencies")
    return found


def _totals(report: Mapping[str, Any]) -> Table:
    options, requests, tokens = report["options"], report["requests"], report["tokens"]
    table = Table(box=box.SIMPLE, show_header=False, title=f"{options['model']} at {options['url']}")
    table.add_column(style="bold")
    table.add_column(justify="right")
    rows = {
        "load": describe_load(options),
        "requests completed / failed": f"{requests['completed']} / {requests['failed']}",
        "duration": f"{report['duration_s']:.2f} s",
        "input tokens (from cache)": f"{number(tokens['input'])} ({number(tokens['input_cached'])})",
        "output tokens": number(tokens["output"]),
        "requests/s": number(report["throughput"]["requests_per_s"]),
        "output tokens/s": number(report["throughput"]["output_tokens_per_s"]),
        "total tokens/s": number(report["throughput"]["total_tokens_per_s"]),
    }
    if report["goodput"]:
        good = report["goodput"]
        bounds = ", ".join(f"{metric} <= {limit:g} ms" for metric, limit in good["limits_ms"].items())
        rows[f"goodput ({bounds})"] = f"{number(good['requests_per_s'])} requests/s, {good['fraction']:.1%} of all"
    if report["drafts"]:
        rows |= _acceptance(report["drafts"])
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _acceptance(drafts: Mapping[str, Any]) -> dict[str, str]:
    at = ", ".join(f"{rate:.1%}" for rate in drafts["acceptance_rate_per_position"])
    return {
        "drafts accepted": f"{drafts['acceptance_rate']:.1%} of {number(drafts['draft_tokens'])}",
        "drafts accepted, per position": at,
        "acceptance length": f"{drafts['acceptance_length']:.2f} tokens per row and step",
    }


def describe_load(options: Mapping[str, Any]) -> str:
    """Names the kind of load in a few words."""
    at_most = options["concurrency"]
    if options["request_rate"] is None:
        return f"closed loop, {at_most} at a time"
    held = f", at most {at_most} at a time" if at_most else ""
    return f"open loop, {float(options['request_rate']):g} requests/s{held}"


def _latencies(report: Mapping[str, Any]) -> Table:
    table = Table(box=box.SIMPLE)
    table.add_column("milliseconds", style="bold", no_wrap=True)
    columns = ("mean", "p50", "p90", "p95", "p99", "max")
    for column in columns:
        table.add_column(column, justify="right")
    for key, name in LATENCIES.items():
        values = report[key]
        table.add_row(name, *(number(values[column] if values else None) for column in columns))
    delays = report["client"]["send_delay_ms"]
    table.add_row(
        "sent late (client)", *(number(delays[column] if delays else None) for column in columns), style="dim"
    )
    return table


def _errors(errors: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table("error", "count", "first message", box=box.SIMPLE, style="red")
    for kind, failure in errors.items():
        table.add_row(kind, str(failure["count"]), Text(failure["example"]))
    return table


def number(value: float | None) -> str:
    """Formats counts exactly and measures to about four digits."""
    if value is None:
        return "-"
    if isinstance(value, int) or value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 100 else f"{value:.2f}"
