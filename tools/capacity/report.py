"""A fleet on paper as tables for a terminal and as JSON: what is planned, and beside it what is published."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from tools.capacity.instances import KINDS, Instance
from tools.capacity.staffing import FORMULAS, Fleet

GB = 1e9


@dataclasses.dataclass(frozen=True)
class Reference:
    """What a plan is held against: published figures, and the plan's day with the published numbers of nodes.

    `published` is under names of properties of `Fleet`, or of its `Traffic`; `errors` say what is known to be off.
    """

    charted: Fleet
    published: dict[str, float]
    errors: Sequence[str]


_FIGURES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("nodes", "nodes at the mean", lambda n: f"{n:,.2f}"),
    ("bare_nodes", "the same, with parts of instances", lambda n: f"{n:,.2f}"),
    ("peak_nodes", "nodes at the peak", lambda n: f"{n:,.0f}"),
    ("cost", "cost per day", lambda n: f"${n:,.0f}"),
    ("income", "theoretical income per day", lambda n: f"${n:,.0f}"),
    ("margin", "margin on the cost", lambda n: f"{n:.1%}"),
    ("input_per_node", "prompt tokens/s per prefill node, hits included", lambda n: f"{n:,.0f}"),
    ("output_per_node", "answer tokens/s per decode node", lambda n: f"{n:,.0f}"),
)
_TOKENS = {
    "input": "prompt tokens, hits included",
    "computed": "prompt tokens computed",
    "output": "answer tokens",
    "all": "all tokens",
}


def value_of(fleet: Fleet, name: str) -> float | None:
    """Returns a figure of a fleet or of its traffic by name; None where it is not known."""
    return getattr(fleet, name) if hasattr(fleet, name) else getattr(fleet.traffic, name)


def render(fleet: Fleet, notes: Sequence[str] = (), reference: Reference | None = None) -> Group:
    """Renders the tables: the day, the instances, their number over the day, figures, bytes; then formulas, errors."""
    errors = [*notes, *(reference.errors if reference else ())]
    return Group(
        Text(f"A fleet on paper for {fleet.traffic.name}: {fleet.traffic.note}", style="bold"),
        _day_table(fleet),
        _instance_table(fleet),
        _staff_table(fleet),
        _figure_table(fleet, reference),
        _price_table(fleet),
        _byte_table(fleet),
        Text("\n".join([*(f"formula: {each}" for each in FORMULAS), *(f"known error: {each}" for each in errors)])),
    )


def as_json(fleet: Fleet, notes: Sequence[str] = (), reference: Reference | None = None) -> dict[str, Any]:
    """Returns the fleet under plain names: tokens, seconds, bytes, dollars."""
    return {
        "traffic": dataclasses.asdict(fleet.traffic),
        "instances": [dataclasses.asdict(each) for each in (fleet.prefill, fleet.decode)],
        "terms": dataclasses.asdict(fleet.terms),
        "staffed": [
            {
                "seconds": each.span.seconds,
                "prefill": each.prefill,
                "decode": each.decode,
                "nodes": fleet.nodes_in(each),
            }
            for each in fleet.staffed
        ],
        "figures": _figures(fleet),
        "as_charted": _figures(reference.charted) if reference else None,
        "published": reference.published if reference else None,
        "formulas": list(FORMULAS),
        "known_errors": [*notes, *(reference.errors if reference else ())],
    }


def _figures(fleet: Fleet) -> dict[str, Any]:
    return {
        **{name: value_of(fleet, name) for name, _, _ in _FIGURES},
        "dollars_per_million": {name: fleet.per_million(name) for name in _TOKENS},
        "load": {kind: fleet.load(kind) for kind in KINDS},
        "bytes_per_second": {name: fleet.bytes_per_second(name) for name in ("input", "cached", "computed", "output")},
        "requests_at_once": max(map(fleet.at_once, fleet.staffed)),
    }


def _day_table(fleet: Fleet) -> Table:
    traffic = fleet.traffic
    table = _table("Traffic of a day", "", "")
    for field, what in (("input", "prompt tokens"), ("cached", "found in a cache"), ("output", "answer tokens")):
        share = f" ({traffic.mean('cached') / traffic.mean('input'):.2%})" if field == "cached" else ""
        table.add_row(what + share, f"{traffic.per_day(field) / 1e9:,.3f} B")
    table.add_row("requests", f"{traffic.requests * 86400 / 1e6:,.3f} M")
    table.add_row("mean prompt, answer", f"{traffic.prompt:,.0f}, {traffic.answer:,.0f} tokens")
    table.add_row("mean context while answering", f"{traffic.context:,.0f} tokens")
    return table


def _instance_table(fleet: Fleet) -> Table:
    table = _table("Instances", "", "nodes", "tokens/s per node", "batch per GPU", "which means", "rate from")
    for each in (fleet.prefill, fleet.decode):
        row: list[str | Text] = [
            each.kind,
            f"{each.nodes}",
            f"{each.tokens_per_node:,.0f}",
            _batch(each),
            _pace(each),
            Text(each.source),
        ]
        table.add_row(*row)
    return table


def _batch(instance: Instance) -> str:
    return f"{instance.batch:,.0f} {'tokens per step' if instance.kind == 'prefill' else 'requests'}"


def _pace(instance: Instance) -> str:
    if instance.kind == "prefill":
        return f"{1 / instance.per_batch:,.2f} s per step"
    return f"{instance.per_batch:,.1f} tokens/s per request"


def _staff_table(fleet: Fleet) -> Table:
    columns = ("from h", "to h", "prefill", "decode", "nodes", "requests at once", "load of prefill", "load of decode")
    table = _table("Instances over the day", *columns)
    begin = 0.0
    for _, group in itertools.groupby(fleet.staffed, lambda each: (each.prefill, each.decode)):
        mine = list(group)
        end = begin + sum(each.span.seconds for each in mine) / 3600
        counts = [f"{n:,}" for n in (mine[0].prefill, mine[0].decode, fleet.nodes_in(mine[0]))]
        at_once = f"{max(map(fleet.at_once, mine)):,.0f}"
        loads = [f"{fleet.load(kind, mine):.1%}" for kind in KINDS]
        table.add_row(f"{begin:.2f}", f"{end:.2f}", *counts, at_once, *loads)
        begin = end
    return table


def _figure_table(fleet: Fleet, reference: Reference | None) -> Table:
    heads = ["", "planned"] + (["off", "as in the picture", "off", "published"] if reference else [])
    table = _table("The fleet", *heads)
    for name, what, show in _FIGURES:
        value = value_of(fleet, name)
        if value is None:
            continue
        cells = [show(value)]
        if reference:
            target = reference.published.get("nodes" if name == "bare_nodes" else name)
            charted = value_of(reference.charted, name) if name in reference.published else None
            cells += [_off(value, target), "" if charted is None else show(charted), _off(charted, target)]
            cells.append("" if target is None else show(target))
        table.add_row(what, *cells)
    for kind in KINDS:
        loads = [f"{each.load(kind):.1%}" for each in [fleet, *([reference.charted] if reference else [])]]
        table.add_row(f"load of {kind} instances", *itertools.chain(*((load, "") for load in loads)))
    return table


def _off(value: float | None, target: float | None) -> str:
    return "" if value is None or target is None else f"{value / target - 1:+.2%}"


def _price_table(fleet: Fleet) -> Table:
    table = _table(f"Cost at ${fleet.terms.gpu_hour:g} per GPU and hour", "", "dollars per million")
    for name, what in _TOKENS.items():
        table.add_row(what, f"{fleet.per_million(name):.4f}")
    return table


def _byte_table(fleet: Fleet) -> Table:
    title = f"Pages that move, {fleet.terms.token_bytes:,} B per token, at the mean"
    table = _table(title, "", "fleet GB/s", "GB/s per prefill node", "GB/s per decode node")
    rows = (
        ("from prefill to decode", "input", KINDS),
        ("read from the cache (hits)", "cached", KINDS[:1]),
        ("written to the cache: prompts", "computed", KINDS[:1]),
        ("written to the cache: answers, if these are kept", "output", KINDS[1:]),
    )
    for what, field, kinds in rows:
        rate = fleet.bytes_per_second(field) / GB
        nodes = {"prefill": fleet.prefill_nodes, "decode": fleet.decode_nodes}
        table.add_row(what, f"{rate:,.1f}", *(f"{rate / nodes[kind]:,.2f}" if kind in kinds else "" for kind in KINDS))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.show_header = any(columns)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 or column == "rate from" else "right")
    return table
