"""A plan as terminal tables, as JSON, and the timeline of one MoE layer as a picture."""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tools.plan import nccl_ep
from tools.plan.deployment import Deployment, kernel_rates
from tools.plan.hlo import Collective
from tools.plan.memory import GB, Memory, Verdict
from tools.plan.plan import Handover, Plan, ProgramPlan, StepPlan
from tools.plan.roofline import HOST_S, KNOWN_ERRORS
from tools.plan.timeline import LANES, Block, Timeline, block_name
from tools.tables import make_table


def render(plan: Plan, prefill: Plan | None = None) -> Group:
    """Renders memory, collectives and estimate of each step, the KV transfer, and the verdict.

    `prefill` is the plan of the deployment that computes the prompts.
    """
    parts: list[RenderableType] = [title(plan.model_name, plan.deployment), memory_table(plan.memory, plan.deployment)]
    for step in plan.steps:
        parts += [_collective_table(step), _schedule_table(step), *map(_collective_table, step.drafts)]
        parts.append(_estimate_table(plan, step))
    if plan.handover is not None:
        parts.append(_handover_table(plan, plan.handover, prefill))
    errors = (f"known error: {error}" for error in _known_errors(plan.deployment))
    notes = [f"estimate's rates: {_rates(plan)}", *errors] if plan.steps else []
    return Group(*parts, verdict_text(plan.verdict, notes))


def title(model_name: str, deployment: Deployment) -> Text:
    """Renders the headline of a plan."""
    gpus = f"{deployment.nodes} x {deployment.gpus_per_node} {deployment.device.name}"
    return Text(f"{model_name}, {deployment.name}: {gpus}", style="bold")


def verdict_text(verdict: Verdict, notes: Iterable[str]) -> Text:
    """Renders whether a deployment fits, what would change that, and `notes`."""
    lines = [f"{'fits' if verdict.fits else 'does not fit'}: {verdict.why}"]
    lines += [*(f"  - {change}" for change in verdict.changes), *notes]
    return Text("\n".join(lines), style="" if verdict.fits else "red")


def as_json(plan: Plan, prefill: Plan | None = None) -> dict[str, Any]:
    """Returns the whole plan as plain data, in bytes, seconds and tokens."""
    memory = plan.memory
    return {
        "model": plan.model_name,
        "deployment": dataclasses.asdict(plan.deployment),
        "memory": memory_json(memory),
        "steps": [_step_json(plan, step) for step in plan.steps],
        "handover": dataclasses.asdict(plan.handover) if plan.handover else None,
        "ends": _partial_pages_json(plan),
        "prefill_nodes": plan.prefill_nodes(prefill) if prefill else None,
        "rates": dataclasses.asdict(kernel_rates(plan.deployment.device, plan.model)),
        "known_errors": _known_errors(plan.deployment),
        "verdict": dataclasses.asdict(plan.verdict),
    }


def memory_json(memory: Memory) -> dict[str, Any]:
    """Returns the memory of a device as plain data, in bytes."""
    account = memory.account
    return {
        "weights": memory.weights,
        "cache_tokens": memory.cache_tokens,
        **{name: getattr(memory, name) for name in ("token", "cache", "needed", "tokens_left")},
        "state": account.state,
        "working": account.working if memory.compiled else None,
        "budget": account.pool,
    }


def _partial_pages_json(plan: Plan) -> dict[str, Any] | None:
    cost = plan.partial_pages
    if cost is None:
        return None
    return dataclasses.asdict(cost) | {
        "steps": cost.steps,
        "per_step": cost.per_step,
        "tokens_per_node": plan.tokens_per_node,
    }


def _step_json(plan: Plan, step: StepPlan) -> dict[str, Any]:
    return _program_json(step) | {
        "floor": dataclasses.asdict(step.floor) | {"step": step.floor.step} if step.floor else None,
        "drafts": [_program_json(program) for program in step.drafts],
        "accepted": list(step.accepted),
        "tokens_per_row": step.tokens_per_row,
        "seconds": step.seconds,
        "tokens_per_device": step.tokens_per_device,
        "tokens_per_node": step.tokens_per_device * plan.deployment.gpus_per_node,
    }


def _program_json(program: ProgramPlan) -> dict[str, Any]:
    names = ("phase", "tokens", "compile_seconds", "arguments", "results", "temporaries", "stages", "seconds")
    return {name: getattr(program, name) for name in names} | {
        "part": program.run.part,
        "multiprocessors": dataclasses.asdict(program.multiprocessors) | {"taken": program.multiprocessors.taken},
        "times": program.run.times,
        "host_waits": list(program.host_waits),
        "kernels": dict(program.kernels),
        "order": {name: getattr(program.order, name) for name in ("in_flight", "communicators", "channels", "faults")},
        "sparse": dataclasses.asdict(program.sparse) if program.sparse else None,
        "collectives": [dataclasses.asdict(c) | {"step_bytes": c.step_bytes} for c in program.collectives],
        "timeline": dataclasses.asdict(dataclasses.replace(program.timeline, exposed={}))
        | {"exposed": dict(program.timeline.exposed)},
    }


def memory_table(memory: Memory, deployment: Deployment) -> Table:
    """Renders the memory of a device of `deployment`."""
    account = memory.account
    table = make_table("Memory of one device", "", "GB", "from")
    for name, nbytes in memory.weights.items():
        table.add_row(f"weights: {name}", f"{nbytes / GB:.3f}", "shapes")
    table.add_row("weights", f"{account.weights / GB:.3f}", "shapes", style="bold")
    needed = f"cache of {memory.cache_tokens:,} tokens x {memory.token:,} B"
    table.add_row(needed, f"{memory.cache / GB:.3f}", "shapes")
    table.add_row("state of batch slots, with the sampler's", f"{account.state / GB:.3f}", "shapes")
    working = f"{account.working / GB:.3f}" if account.working else "-"
    origin = "compiler" if memory.compiled else "assumed" if account.working else "not compiled"
    table.add_row("temporaries and results", working, origin)
    table.add_row("needed", f"{memory.needed / GB:.3f}", "", style="bold")
    limit = f"budget, {deployment.memory_utilization:g} x {deployment.device.memory_bytes / GB:g} GB"
    table.add_row(limit, f"{account.pool / GB:.3f}", "deployment")
    table.add_row("tokens of cache that fit", f"{memory.tokens_left:,}", "")
    return table


_PARTS = {
    "model": "a {phase} step",
    "module": "the MTP module after a {phase} step",
    "chain": "one run of the MTP module for a further draft",
}


def _collective_table(step: ProgramPlan) -> Table:
    name = _PARTS[step.run.part].format(phase=step.phase)
    waits = len(step.host_waits) or "none"
    title = f"Collectives of {name}, {step.tokens:,} tokens per rank (waits for the host: {waits})"
    table = make_table(title, "what", "devices", "times", "MB in node", "MB between", "hidden by")
    for what, group in _grouped(step.collectives).items():
        inside, between = (
            sum(c.times * getattr(c, name) for c in group) / 1e6 for name in ("node_bytes", "cross_bytes")
        )
        times = sum(c.times for c in group)
        table.add_row(*what, f"{times:,}", f"{inside:,.1f}", f"{between:,.1f}", _hidden_by(group))
    return table


def _grouped(found: Iterable[Collective]) -> dict[tuple[str, str], list[Collective]]:
    groups: dict[tuple[str, str], list[Collective]] = {}
    for c in found:
        name = f"{c.role}: {c.kind}" if c.role != "other" else c.kind
        groups.setdefault((name, f"{c.group_size}"), []).append(c)
    return groups


def _hidden_by(group: Sequence[Collective]) -> str:
    stages = dict.fromkeys(stage for c in group for stage in c.between)
    exposed = sum(c.times for c in group if not c.is_hidden)
    total = sum(c.times for c in group)
    if exposed == total:
        return "nothing (exposed)"
    return ", ".join(stages) + (f" ({exposed:,} exposed)" if exposed else "")


def _schedule_table(step: StepPlan) -> Table:
    line = step.timeline
    title = f"One MoE layer of {_BATCHES[line.micro_batches == 2]} as scheduled, {line.layer * 1e6:,.0f} us (estimate)"
    table = make_table(title, "lane", "what", "from us", "to us")
    for block in line.blocks:
        if block.end - block.start >= 1e-6:
            table.add_row(block.lane, block_name(block), f"{block.start * 1e6:,.0f}", f"{block.end * 1e6:,.0f}")
    return table


SPARSE_PARTS = {
    "scores": "index scores",
    "choice": "top-k selection",
    "copies": "copies of the selected latents",
    "attention": "attention core",
    "launches": "launches of these kernels",
    "expansion": "materialized keys and values of all tokens",
    "mask": "mask",
    "pooling": "making entries",
}


def _estimate_table(plan: Plan, step: StepPlan) -> Table:
    line, deployment = step.timeline, plan.deployment
    table = make_table("Estimate (a model, not a measurement)", "", "")
    for name, seconds in step.stages.items():
        if seconds:
            per = "step" if name == "head" else "layer and micro-batch"
            table.add_row(f"{name}, per {per}", f"{seconds * 1e6:,.0f} us")
        if name == "attention" and step.sparse is not None:
            for part, part_seconds in dataclasses.asdict(step.sparse).items():
                if part_seconds:
                    table.add_row(f"  of which {SPARSE_PARTS[part]}", f"{part_seconds * 1e6:,.0f} us")
    for role, seconds in line.exposed.items():
        table.add_row(f"waiting for {role}, per step", f"{seconds * 1e3:.1f} ms")
    table.add_row("host, per step", f"{HOST_S * 1e3:.1f} ms")
    table.add_row("kernels and collectives that the program launches", f"{sum(step.kernels.values()):,}")
    split = step.multiprocessors
    table.add_row("multiprocessors: for kernels, for transfers", f"{split.taken}, {split.reserved}")
    order = step.order
    table.add_row("most transfers in flight, their channels", f"{order.in_flight}, {order.channels}")
    table.add_row("possible deadlocks of collectives", "; ".join(order.faults) or "none")
    _add_drafts(table, step)
    table.add_row("step", f"{step.seconds * 1e3:.1f} ms", style="bold")
    table.add_row("tokens/s per GPU", f"{step.tokens_per_device:,.0f}", style="bold")
    table.add_row("tokens/s per node", f"{step.tokens_per_device * deployment.gpus_per_node:,.0f}", style="bold")
    if step.floor is not None:
        what = "step without the MTP module" if step.drafts else "step"
        table.add_row(f"roofline (peak rates, perfect overlap): {what}", f"{step.floor.step * 1e3:.1f} ms")
    return table


def _handover_table(plan: Plan, transfer: Handover, prefill: Plan | None) -> Table:
    table = make_table("KV transfer from prefill instances (estimate)", "", "")
    request = f"a request: {transfer.prompt:,.0f} prompt and {transfer.answer:,.0f} answer tokens"
    table.add_row(request, f"{transfer.nbytes / 1e6:,.0f} MB")
    table.add_row("its pages over one device's link between nodes", f"{transfer.cross_seconds * 1e3:,.1f} ms")
    table.add_row("its pages over one device's link in a node", f"{transfer.node_seconds * 1e3:,.1f} ms")
    if plan.partial_pages is not None:
        cost = plan.partial_pages
        table.add_row("prefill of partial last pages, 1 to 64 tokens of each prompt", f"{cost.seconds * 1e3:,.1f} ms")
        table.add_row(f"the same, once in {cost.steps:.1f} decode steps: per step", f"{cost.per_step * 1e3:,.1f} ms")
        table.add_row("tokens/s per node, with partial pages", f"{plan.tokens_per_node:,.0f}", style="bold")
    table.add_row("requests/s of the deployment", f"{transfer.requests_per_second:,.1f}")
    table.add_row("pages received per node", f"{transfer.bytes_per_second / 1e9:,.2f} GB/s")
    if prefill is not None and (nodes := plan.prefill_nodes(prefill)) is not None:
        hits = f"{prefill.deployment.prefix_hit_rate:.0%} of prompts cached"
        table.add_row(f"nodes of {prefill.deployment.name} that feed it, {hits}", f"{nodes:,.1f}", style="bold")
    return table


def _add_drafts(table: Table, step: StepPlan) -> None:
    """Adds the cost and the gain of drafts."""
    if not step.drafts:
        return
    table.add_row("the model's program, per step", f"{step.timeline.step * 1e3:.1f} ms")
    for program in step.drafts:
        what = "one draft" if program.run.part == "module" else f"{program.run.times} more"
        table.add_row(f"MTP module for {what}, per step", f"{program.seconds * 1e3:.1f} ms")
    if step.accepted:
        table.add_row("accepted by position (given)", ", ".join(f"{share:.1%}" for share in step.accepted))
        table.add_row("tokens per request and step", f"{step.tokens_per_row:.2f}", style="bold")


def _known_errors(deployment: Deployment) -> list[str]:
    return [*KNOWN_ERRORS, *nccl_ep.known_errors(deployment)]


def _rates(plan: Plan) -> str:
    r = kernel_rates(plan.deployment.device, plan.model)
    return (
        f"products {r.dense_flops / 1e12:.0f} and {r.grouped_flops / 1e12:.0f} (prefill {r.prefill_flops / 1e12:.0f}), "
        f"attention {r.decode_core_flops / 1e12:.0f} (prefill {r.prefill_core_flops / 1e12:.0f}) TFLOP/s; "
        f"weights {r.dense_bandwidth / 1e12:.1f} and {r.grouped_bandwidth / 1e12:.1f} TB/s; "
        f"links {r.node_link / 1e9:.0f} GB/s in the node, {r.dispatch_link / 1e9:.0f} and "
        f"{r.combine_link / 1e9:.1f} between nodes"
    )


_COLORS = ("#e9a23b", "#5b8fd1")  # of the micro-batches
_NEITHER = "#c4c4c4"
_NARROW, _NO_TEXT = 0.06, 0.012
"""Shares of the layer's time: below the first a bar's label is rotated, below the second omitted."""


def draw(plan: Plan, path: Path) -> None:
    """Writes a PNG with one panel per step. Raises ModuleNotFoundError without matplotlib (extra `plots`)."""
    deployment = plan.deployment
    devices = f"{deployment.devices} {deployment.device.name}"
    titles = (
        f"{plan.model_name}, {deployment.name}: one MoE layer of a {step.phase} step, {step.tokens:,} tokens per rank "
        f"in {_BATCHES[step.timeline.micro_batches == 2]}, {devices}"
        for step in plan.steps
    )
    draw_layers([(title, step.timeline) for title, step in zip(titles, plan.steps, strict=True)], path)


_BATCHES = {True: "two micro-batches", False: "one batch"}


def draw_layers(layers: Sequence[tuple[str, Timeline]], path: Path, width: float | None = None) -> None:
    """Writes a PNG with a panel for the layer of each titled timeline, `width` seconds long, or as long as the layer.

    Raises ModuleNotFoundError without matplotlib (extra `plots`).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 3.4 * len(layers) + 0.3), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(layers), 1, squeeze=False)[:, 0]
    for axes, (title, line) in zip(panels, layers, strict=True):
        for block in line.blocks:
            _bar(axes, block, width or line.layer)
        axes.set_yticks(range(len(LANES)), LANES)
        axes.set_ylim(len(LANES) - 0.5, -0.5)
        axes.set_xlim(0, (width or line.layer) * 1e6)
        axes.set_xlabel("microseconds (estimated durations, compiled order)")
        axes.set_title(title, fontsize=10, loc="left")
    figure.savefig(path, dpi=100)


def _bar(axes: Any, block: Block, whole: float) -> None:
    start, width = block.start * 1e6, (block.end - block.start) * 1e6
    lane = LANES.index(block.lane)
    color = _NEITHER if block.micro_batch is None else _COLORS[block.micro_batch % len(_COLORS)]
    axes.barh(lane, width, left=start, height=0.86, color=color, edgecolor="white", linewidth=0.8)
    share = (block.end - block.start) / whole
    if share > _NO_TEXT:
        text = block_name(block).replace("_expert", "")
        turned = 90 if share < _NARROW else 0
        axes.text(start + width / 2, lane, text, rotation=turned, ha="center", va="center", fontsize=8, clip_on=True)
