"""Capacity plan for DeepSeek's published day, `launch.plan fleet`: instances, cost, income and margin. Imports no jax.

It compares a plan's rates, or published ones, with the published nodes, cost, income and margin (docs/plan.md). For
other traffic use `tools.simulate`.

Published as numbers (open-infra-index, day 6: 27 to 28 February 2025, noon to noon UTC+8): tokens, mean context,
prices, lease and `PUBLISHED`. The nodes over the day are read from the published picture to a quarter of an hour; their
mean is the published one. Steps of 30 and 60 nodes divide in one way into instances of 4 and of 18 nodes, from which
the number of each kind is inferred. The traffic over the day is assumed to be proportional to the nodes.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from tools.plan.deployment import PHASES, Phase
from tools.tables import make_table

Day = Sequence[tuple[float, int, int]]
"""Hours, prefill instances, decode instances: one span after the other."""

TOKENS = {"input": 608e9, "cached": 342e9, "computed": 266e9, "output": 168e9}
"""Tokens of the day: of prompts, of these from a cache and computed, and of answers."""
CONTEXT = 4989
"""Mean tokens of a request in the cache while it decodes: the prompt and half of the answer."""
REQUESTS = (TOKENS["input"] + TOKENS["output"] / 2) / CONTEXT
PROMPT, ANSWER = TOKENS["input"] / REQUESTS, TOKENS["output"] / REQUESTS
PRICES = {"computed": 0.55, "cached": 0.14, "output": 2.19}
"""Dollars per million tokens."""
GPU_HOUR = 2.0
DAY_S = 86_400
CHART: Day = (
    (12.0, 29, 9),
    (1.25, 23, 7),
    (0.75, 20, 6),
    (0.75, 17, 5),
    (0.25, 14, 4),
    (0.5, 11, 3),
    (3.0, 8, 2),
    (0.5, 11, 3),
    (0.5, 14, 4),
    (0.5, 20, 6),
    (0.5, 23, 7),
    (3.5, 29, 9),
)
"""Prefill instances of 4 nodes, decode instances of 18: 278 nodes at the most, 68 at the least."""
LOADS = tuple((4 * prefill + 18 * decode) / 226.75 for _, prefill, decode in CHART)
"""Traffic of each span, relative to the mean of the day."""
PUBLISHED = {
    "nodes": 226.75,
    "peak_nodes": 278,
    "cost": 87_072,
    "income": 562_027,
    "margin": 5.45,
    "input_per_node": 73_700,
    "output_per_node": 14_800,
}
FORMULAS = (
    "instances = ceil(tokens per second / tokens per second of an instance), at least 1; prefill counts computed "
    "tokens (prompts less hits)",
    "requests of a day = (prompt tokens + answer tokens / 2) / mean context",
    "requests at once = answer tokens per second / tokens per second of one request (Little's law)",
    "cost = nodes x GPUs per node x 24 h x dollars per GPU and hour; income = sum of tokens x price; "
    "margin = income / cost - 1",
    "pages to decode = prompt tokens x bytes per token; read from the cache = hits x bytes per token; "
    "written = computed and answer tokens x bytes per token, each page once",
)
KNOWN_ERRORS = (
    "planned: the rates of --rates=fleet are means of this very day, so the error is the rounding to whole instances; "
    "the peak and the load over the day assume traffic in proportion to the picture's nodes",
    "the picture of income per hour reads as some 8 % more per node at the peak and 10 % less at night",
    "as in the picture: nodes are given, not computed; tokens are published to a billion, so income is within 0.3 %",
)
_ROUNDING = 1e-9  # of an instance: tolerance for float sums
_GB = 1e9


class RateError(ValueError):
    """An instance's plan that cannot be read or does not suit the day; the message says what to change."""


@dataclasses.dataclass(frozen=True)
class InstanceRate:
    """The throughput of one instance of `nodes` of `gpus_per_node`: each node reaches `tokens_per_node` per second.

    Prefill counts computed tokens, not those from a cache. `batch` is, per GPU, the tokens of a prefill step or the
    requests of a decode step. `context` is the mean context and `source` the origin of the rate. From a plan come
    `room`, the tokens that fit a GPU's cache, and `token_bytes`.
    """

    kind: Phase
    nodes: int
    gpus_per_node: int
    tokens_per_node: float
    batch: float
    context: float
    source: str
    room: int | None = None
    token_bytes: int | None = None

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of the whole instance."""
        return self.nodes * self.tokens_per_node

    @property
    def per_batch(self) -> float:
        """Tokens per second and unit of the batch: in decode a request's speed, in prefill 1 / step time."""
        return self.tokens_per_node / self.gpus_per_node / self.batch


_SPEED = 21  # tokens per second of one request: 20 to 22 are published
PUBLISHED_RATES: dict[str, tuple[InstanceRate, InstanceRate]] = {
    "fleet": (
        InstanceRate(
            "prefill",
            4,
            8,
            73_700 * 266 / 608,
            16_384,
            4383,
            "published: 73.7k tokens/s per node, 266 of 608 B computed",
        ),
        InstanceRate(
            "decode",
            18,
            8,
            14_800,
            14_800 / 8 / _SPEED,
            4989,
            "published: 14.8k tokens/s per node, 20 to 22 per request",
        ),
    ),
    "profile": (
        InstanceRate(
            "prefill", 4, 8, 62_700, 16_384, 4096, "DeepSeek's profile: EP32, prompts of 4K, no hits, experts balanced"
        ),
        InstanceRate("decode", 16, 8, 18_600, 128, 4096, "DeepSeek's profile: EP128, experts balanced"),
    ),
}
"""What DeepSeek published of prefill and decode instances on H800s: means of the day, and its profiles."""


def read_rate(kind: Phase, path: Path, model: str) -> InstanceRate:
    """Reads an instance's rate from the file of `python -m launch.plan DEPLOYMENT --json=FILE`.

    Raises RateError if it is not such a file, has no step of this kind, does not fit, or is of another model.
    """
    try:
        plan = json.loads(path.read_text("utf-8"))
        return _rate(kind, plan, path.name, model)
    except RateError as error:
        raise RateError(f"{path}: {error}") from None
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise RateError(f"{path}: cannot be read: {error}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise RateError(f"{path}: not what launch.plan --json writes: {type(error).__name__} {error}") from None


def _rate(kind: Phase, plan: dict[str, Any], name: str, model: str) -> InstanceRate:
    if plan["model"] != model:
        raise RateError(f"is a plan of {plan['model']}, not of --model {model}")
    deployment, memory = plan["deployment"], plan["memory"]
    left, token = memory["tokens_left"], memory["token"]
    [*steps] = (step for step in plan["steps"] if step["phase"] == kind)
    field = "prefill_tokens" if kind == "prefill" else "decode_requests"
    if not plan["verdict"]["fits"]:
        raise RateError(f"does not fit: {plan['verdict']['why']}")
    if not steps:
        raise RateError(f"has no {kind} step: its deployment needs {field}")
    per_rank, split = deployment[field], deployment["tensor_parallel"]
    nodes, gpus, context = deployment["nodes"], deployment["gpus_per_node"], deployment["context_length"]
    numbers = [nodes, gpus, split, per_rank, steps[0]["tokens_per_node"], context, left, token]
    if not all(isinstance(n, int | float) and 0 < n < math.inf for n in numbers):
        raise RateError(f"has numbers that are not positive and finite: {numbers}")
    source = f"plan {name}, an estimate: {deployment['name']}"
    rate = steps[0]["tokens_per_node"]
    return InstanceRate(kind, nodes, gpus, rate, per_rank / split, context, source, int(left / split), token)


def check_context(rate: InstanceRate) -> Sequence[str]:
    """Returns a warning if the rate's mean context is not the day's.

    Raises RateError if the batch does not fit the cache at the day's context.
    """
    context = PROMPT if rate.kind == "prefill" else CONTEXT
    if rate.kind == "decode" and rate.room is not None and rate.batch * context > rate.room:
        raise RateError(
            f"{rate.source}: {rate.batch:,.0f} requests of {context:,.0f} tokens per GPU need more than the "
            f"{rate.room:,} tokens of cache that fit: plan it with decode_requests {int(rate.room / context)} and "
            f"context_length {context:.0f}"
        )
    if abs(context / rate.context - 1) <= 0.1:
        return ()
    what = "mean prompt" if rate.kind == "prefill" else "mean context"
    return (
        f"{rate.kind}: the rate is for a {what} of {rate.context:,.0f} tokens, the traffic's is {context:,.0f}; give a "
        f"plan for that context (--{rate.kind}_plan)",
    )


def size_instances(prefill: InstanceRate, decode: InstanceRate) -> Day:
    """Returns the day with the instances that the traffic of each span needs."""

    def needed(field: str, load: float, rate: InstanceRate) -> int:
        return max(1, math.ceil(per_second(field) * load / rate.tokens_per_second - _ROUNDING))

    return tuple(
        (hours, needed("computed", load, prefill), needed("output", load, decode))
        for (hours, _, _), load in zip(CHART, LOADS, strict=True)
    )


def per_second(field: str) -> float:
    """Returns tokens per second at the mean of the day."""
    return TOKENS[field] / DAY_S


def figures(day: Day, prefill: InstanceRate, decode: InstanceRate, token_bytes: int, gpu_hour: float) -> dict[str, Any]:
    """Returns nodes, tokens per second, bytes and dollars of a day's instances by `FORMULAS`."""
    rates = {"prefill": prefill, "decode": decode}
    nodes = {kind: sum(span[0] * span[i] for span in day) / 24 * rates[kind].nodes for i, kind in enumerate(PHASES, 1)}
    most = {kind: rates[kind].tokens_per_node * nodes[kind] for kind in PHASES}
    cost = {kind: nodes[kind] * rates[kind].gpus_per_node * gpu_hour * 24 for kind in PHASES}
    whole = sum(cost.values())
    income = sum(TOKENS[field] * price for field, price in PRICES.items()) / 1e6
    paid = {"input": cost["prefill"], "computed": cost["prefill"], "output": cost["decode"]}
    return {
        "nodes": sum(nodes.values()),
        "bare_nodes": per_second("computed") / prefill.tokens_per_node + per_second("output") / decode.tokens_per_node,
        "peak_nodes": max(p * prefill.nodes + d * decode.nodes for _, p, d in day),
        "cost": whole,
        "income": income,
        "margin": income / whole - 1,
        "input_per_node": per_second("input") / nodes["prefill"],
        "output_per_node": per_second("output") / nodes["decode"],
        "nodes_of": nodes,
        "dollars_per_million": {
            **{field: dollars / TOKENS[field] * 1e6 for field, dollars in paid.items()},
            "all": whole / (TOKENS["input"] + TOKENS["output"]) * 1e6,
        },
        "load": {
            "prefill": per_second("computed") / most["prefill"],
            "decode": per_second("output") / most["decode"],
        },
        "bytes_per_second": {field: per_second(field) * token_bytes for field in TOKENS},
        "requests_at_once": max(LOADS) * per_second("output") / decode.per_batch,
    }


def plan_day(prefill: InstanceRate, decode: InstanceRate, token_bytes: int, gpu_hour: float) -> dict[str, Any]:
    """Returns the day planned with these rates, and as charted, as plain data in tokens, seconds, bytes, dollars."""
    day, published = size_instances(prefill, decode), PUBLISHED_RATES["fleet"]
    return {
        "instances": [dataclasses.asdict(rate) for rate in (prefill, decode)],
        "terms": {"token_bytes": token_bytes, "gpu_hour": gpu_hour},
        "staffed": [
            {"seconds": hours * 3600, "prefill": p, "decode": d, "nodes": p * prefill.nodes + d * decode.nodes}
            for hours, p, d in day
        ],
        "figures": figures(day, prefill, decode, token_bytes, gpu_hour),
        "as_charted": figures(CHART, *published, token_bytes, gpu_hour),
        "published": PUBLISHED,
        "formulas": list(FORMULAS),
        "known_errors": [*check_context(prefill), *check_context(decode), *KNOWN_ERRORS],
    }


def render(planned: dict[str, Any]) -> Group:
    """Renders the result of `plan_day` as tables."""
    rates = [InstanceRate(**each) for each in planned["instances"]]
    notes = [*(f"formula: {each}" for each in FORMULAS), *(f"known error: {each}" for each in planned["known_errors"])]
    what = "DeepSeek's published day; the traffic over the day is proportional to the nodes of the published picture"
    return Group(
        Text(f"Capacity plan for day6: {what}", style="bold"),
        _day_table(),
        _instance_table(rates),
        _sizing_table(planned["staffed"], *rates),
        _figure_table(planned["figures"], planned["as_charted"]),
        _price_table(planned),
        _byte_table(planned),
        Text("\n".join(notes)),
    )


def _day_table() -> Table:
    table = make_table("Traffic of a day", "", "")
    table.add_row("prompt tokens", f"{TOKENS['input'] / 1e9:,.3f} B")
    share = TOKENS["cached"] / TOKENS["input"]
    table.add_row(f"cache hits ({share:.2%})", f"{TOKENS['cached'] / 1e9:,.3f} B")
    table.add_row("answer tokens", f"{TOKENS['output'] / 1e9:,.3f} B")
    table.add_row("requests", f"{REQUESTS / 1e6:,.3f} M")
    table.add_row("mean prompt, answer", f"{PROMPT:,.0f}, {ANSWER:,.0f} tokens")
    table.add_row("mean context while decoding", f"{CONTEXT:,.0f} tokens")
    return table


def _instance_table(rates: Sequence[InstanceRate]) -> Table:
    table = make_table("Instances", "", "nodes", "tokens/s per node", "batch per GPU", "which means", "rate from")
    table.columns[-1].justify = "left"
    for each in rates:
        batch, pace = f"{each.batch:,.0f} requests", f"{each.per_batch:,.1f} tokens/s per request"
        if each.kind == "prefill":
            batch, pace = f"{each.batch:,.0f} tokens per step", f"{1 / each.per_batch:,.2f} s per step"
        table.add_row(each.kind, f"{each.nodes}", f"{each.tokens_per_node:,.0f}", batch, pace, Text(each.source))
    return table


def _sizing_table(staffed: Sequence[dict[str, Any]], prefill: InstanceRate, decode: InstanceRate) -> Table:
    columns = ("from h", "to h", "prefill", "decode", "nodes", "requests at once", "load of prefill", "load of decode")
    table = make_table("Instances over the day", *columns)
    begin, computed, output = 0.0, per_second("computed"), per_second("output")
    spans = zip(staffed, LOADS, strict=True)
    for (p, d), group in itertools.groupby(spans, lambda each: (each[0]["prefill"], each[0]["decode"])):
        mine = [(each["seconds"], load) for each, load in group]
        seconds, work = sum(s for s, _ in mine), sum(s * load for s, load in mine)
        end = begin + seconds / 3600
        loads = [
            f"{rate * work / (count * of.tokens_per_second * seconds):.1%}"
            for rate, count, of in ((computed, p, prefill), (output, d, decode))
        ]
        at_once = f"{max(load for _, load in mine) * output / decode.per_batch:,.0f}"
        nodes = f"{p * prefill.nodes + d * decode.nodes:,}"
        table.add_row(f"{begin:.2f}", f"{end:.2f}", f"{p:,}", f"{d:,}", nodes, at_once, *loads)
        begin = end
    return table


_SHOWN: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("nodes", "nodes at the mean", lambda n: f"{n:,.2f}"),
    ("bare_nodes", "the same, with fractions of instances", lambda n: f"{n:,.2f}"),
    ("peak_nodes", "nodes at the peak", lambda n: f"{n:,.0f}"),
    ("cost", "cost per day", lambda n: f"${n:,.0f}"),
    ("income", "theoretical income per day", lambda n: f"${n:,.0f}"),
    ("margin", "margin on the cost", lambda n: f"{n:.1%}"),
    ("input_per_node", "prompt tokens/s per prefill node, hits included", lambda n: f"{n:,.0f}"),
    ("output_per_node", "answer tokens/s per decode node", lambda n: f"{n:,.0f}"),
)


def _figure_table(planned: dict[str, Any], charted: dict[str, Any]) -> Table:
    table = make_table("The fleet", "", "planned", "off", "as in the picture", "off", "published")
    for name, what, show in _SHOWN:
        target = PUBLISHED["nodes" if name == "bare_nodes" else name]
        cells = [show(planned[name]), f"{planned[name] / target - 1:+.2%}", "", "", show(target)]
        if name in PUBLISHED:
            cells[2:4] = [show(charted[name]), f"{charted[name] / target - 1:+.2%}"]
        table.add_row(what, *cells)
    for kind in PHASES:
        loads = [f"{each['load'][kind]:.1%}" for each in (planned, charted)]
        table.add_row(f"load of {kind} instances", loads[0], "", loads[1])
    return table


def _price_table(planned: dict[str, Any]) -> Table:
    table = make_table(f"Cost at ${planned['terms']['gpu_hour']:g} per GPU and hour", "", "dollars per million")
    names = {"input": "prompt tokens, hits included", "computed": "prompt tokens computed", "output": "answer tokens"}
    for name, what in (names | {"all": "all tokens"}).items():
        table.add_row(what, f"{planned['figures']['dollars_per_million'][name]:.4f}")
    return table


def _byte_table(planned: dict[str, Any]) -> Table:
    title = f"Pages that move, {planned['terms']['token_bytes']:,} B per token, at the mean"
    table = make_table(title, "", "fleet GB/s", "GB/s per prefill node", "GB/s per decode node")
    rows = (
        ("from prefill to decode", "input", PHASES),
        ("read from the cache (hits)", "cached", PHASES[:1]),
        ("written to the cache: prompts", "computed", PHASES[:1]),
        ("written to the cache: answers, if these are kept", "output", PHASES[1:]),
    )
    nodes = planned["figures"]["nodes_of"]
    for what, field, kinds in rows:
        rate = planned["figures"]["bytes_per_second"][field] / _GB
        table.add_row(what, f"{rate:,.1f}", *(f"{rate / nodes[kind]:,.2f}" if kind in kinds else "" for kind in PHASES))
    return table
