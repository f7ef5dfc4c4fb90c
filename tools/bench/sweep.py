"""Runs the same load at several concurrencies: what one user gets against what all of them get together."""

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tools.bench import report, serve
from tools.bench.stream import Record

REPORT_VERSION = 1


@dataclasses.dataclass(frozen=True)
class SweepOptions:
    """What `python -m launch.bench sweep` was asked for, besides the load of each point.

    `requests_per_user`: a point has this many requests times its concurrency. `devices` share the work of the server.
    Raises ValueError for values that cannot be.
    """

    concurrencies: tuple[int, ...]
    requests_per_user: int = 8
    devices: int = 1

    def __post_init__(self) -> None:
        if not self.concurrencies or min(self.concurrencies) < 1:
            raise ValueError(f"--concurrencies {self.concurrencies}: give at least one, and none below 1")
        if list(self.concurrencies) != sorted(set(self.concurrencies)):
            raise ValueError(f"--concurrencies {self.concurrencies}: must rise")
        for name in ("requests_per_user", "devices"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)}: must be at least 1")


async def run(
    load: serve.ServeOptions,
    options: SweepOptions,
    on_point: Callable[[int, int], None],
    on_record: Callable[[Record], None],
) -> dict[str, Any]:
    """Measures one point after the other and returns them as plain data; an interrupt ends the sweep with what it has.

    So does a server that refuses a later point's warm-up. `on_point(concurrency, requests)` is called when a point's
    load begins. Each point draws prompts of its own, so that none finds those of another in the prefix cache. Raises
    BenchError and ValueError as `serve.run` where the first point cannot be measured.
    """
    points: list[dict[str, Any]] = []
    ended: str | None = None
    for i, concurrency in enumerate(options.concurrencies):
        here = dataclasses.replace(
            load,
            concurrency=concurrency,
            num_prompts=options.requests_per_user * concurrency,
            num_warmups=concurrency if load.num_warmups else 0,
            seed=load.seed + i,
        )
        try:
            measured = await serve.run(here, functools.partial(on_point, concurrency), on_record)
        except (asyncio.CancelledError, serve.BenchError) as error:
            if not points:
                raise
            ended = f"no point at {concurrency}: {error or 'interrupted'}"
            break
        points.append(point(concurrency, measured, options.devices))
        if measured["interrupted"]:
            break
    return {
        "version": REPORT_VERSION,
        "options": measured["options"] | {name: None for name in ("concurrency", "num_prompts")} | vars(options),
        "points": points,
        "ended": ended,
    }


def point(concurrency: int, measured: Mapping[str, Any], devices: int) -> dict[str, Any]:
    """Returns a point of the curve out of a report of `serve.run`.

    A user's tokens per second are 1 over the mean time per output token: what a reader of one stream sees once it has
    begun. Those per device are all tokens over the duration, prompts' time included, divided by the devices.
    """
    tpot, output = measured["tpot_ms"], measured["throughput"]["output_tokens_per_s"]
    return {
        "concurrency": concurrency,
        "tokens_per_s_per_user": 1e3 / tpot["mean"] if tpot and tpot["mean"] else None,
        "tokens_per_s": output,
        "tokens_per_s_per_device": None if output is None else output / devices,
        **{name: measured[name] for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms")},
        **{name: measured[name] for name in ("requests", "errors", "duration_s", "interrupted", "goodput")},
        "client_cpu_fraction": measured["client"]["cpu_fraction"],
    }


def render(result: Mapping[str, Any]) -> RenderableType:
    """Returns the curve as a table, with a line per thing that makes its figures doubtful."""
    options = result["options"]
    table = Table(box=box.SIMPLE, title=f"{options['model']} at {options['url']}, {options['devices']} device(s)")
    for head in ("users", "per user", "of all", "per device", "TTFT p50", "TTFT p99", "ITL p99"):
        table.add_column(head, justify="right")
    for each in result["points"]:
        rates = [each[name] for name in ("tokens_per_s_per_user", "tokens_per_s", "tokens_per_s_per_device")]
        times = [each[name] and each[name][rank] for name, rank in _TIMES]
        table.add_row(str(each["concurrency"]), *map(report.number, [*rates, *times]))
    doubts = _doubts(result["points"]) + ([result["ended"]] if result["ended"] else [])
    return Group(table, Text("output tokens per second, and milliseconds", style="dim"), *map(_note, doubts))


_TIMES = (("ttft_ms", "p50"), ("ttft_ms", "p99"), ("itl_ms", "p99"))


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Writes the curve as SVG or PNG, as the path ends. Raises ModuleNotFoundError without matplotlib (`plots`)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    known = [each for each in result["points"] if each["tokens_per_s_per_user"] and each["tokens_per_s_per_device"]]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    x = [each["tokens_per_s_per_user"] for each in known]
    y = [each["tokens_per_s_per_device"] for each in known]
    axes.plot(x, y, marker="o", color="#5b8fd1")
    for each, at_x, at_y in zip(known, x, y, strict=True):
        axes.annotate(str(each["concurrency"]), (at_x, at_y), xytext=(5, 5), textcoords="offset points", fontsize=8)
    options = result["options"]
    axes.set(xlabel="tokens per second and user", ylabel="tokens per second and device", xlim=(0, None), ylim=(0, None))
    axes.set_title(f"{options['model']} on {options['devices']} device(s), labelled by requests at a time", fontsize=10)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)


def _doubts(points: Sequence[Mapping[str, Any]]) -> list[str]:
    found = []
    for each in points:
        at = f"at {each['concurrency']}"
        if each["interrupted"]:
            found.append(f"{at}: interrupted; requests that were still running are not counted")
        if each["requests"]["failed"]:
            kinds = ", ".join(f"{kind} ({error['example']})" for kind, error in each["errors"].items())
            found.append(f"{at}: {each['requests']['failed']} failed: {kinds}")
        if each["requests"]["completed"] and each["tokens_per_s"] is None:
            found.append(f"{at}: the server states no token counts, so there are no tokens/s")
        if each["client_cpu_fraction"] > report.BUSY_CLIENT:
            found.append(f"{at}: the client took {each['client_cpu_fraction']:.0%} of a processor; its own work shows")
    return found


def _note(text: str) -> Text:
    return Text(f"note: {text}", style="yellow")
