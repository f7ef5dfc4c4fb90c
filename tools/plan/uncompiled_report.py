"""A plan from shapes as terminal tables and as JSON."""

import dataclasses
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from dsv3.config.model import CacheGroup
from dsv3.kv_cache.layout import entries_per_page, page_bytes, row_bytes, window_pages
from tools.plan import nccl_ep
from tools.plan.memory import GB
from tools.plan.report import SPARSE_PARTS, memory_json, memory_table, title, verdict_text
from tools.plan.uncompiled import StepEstimate, UncompiledPlan
from tools.tables import make_table

KNOWN_ERRORS = (
    "nothing of it was measured on a GPU: kernels are assumed to reach the rates of DeepSeek-V3's",
    "attention is assumed to reach what a model of its machine code gives",
    "transfers are assumed to hide behind the other micro-batch alone, and experts to be chosen evenly",
    "many requests: SGLang reached 0.27 of the estimate on 4 x H200 (Flash, 1,024 requests, both without drafts)",
    "a first token: SGLang reached 0.34 of the estimate there (one prompt of 4,096 tokens on average)",
    "experts of 1 to 8 tokens per GPU: the estimate is 0.46 to 0.56 of what DeepGEMM measured on 8 x H20",
    "one request: SGLang was 1.8 times as fast there (both with DSpark and 5.45 tokens per step)",
)
_UNITS = {"context": "page", "window": "window page", "request": "request"}


def render(plan: UncompiledPlan) -> Group:
    """Renders memory, cache groups and each step's estimate, the rates of both together, and the verdict."""
    deployment = plan.deployment
    parts: list[RenderableType] = [title(plan.model_name, deployment), memory_table(plan.memory, deployment)]
    parts.append(_cache_table(plan))
    parts += [_step_table(step, deployment.gpus_per_node) for step in plan.steps]
    if plan.mixed is not None or plan.handover is not None:
        parts.append(_traffic_table(plan))
    errors = (*KNOWN_ERRORS, *nccl_ep.known_errors(deployment))
    return Group(*parts, verdict_text(plan.verdict, (f"known error: {error}" for error in errors if plan.steps)))


def as_json(plan: UncompiledPlan) -> dict[str, Any]:
    """Returns the whole plan as plain data, in bytes, seconds and tokens."""
    pages, windows = cache_pages(plan)
    return {
        "model": plan.model_name,
        "deployment": dataclasses.asdict(plan.deployment),
        "memory": memory_json(plan.memory) | {"pages": pages, "window_pages": windows},
        "cache": [dict(zip(CACHE_COLUMNS, row, strict=True)) for row in cache_rows(plan)],
        "steps": [_step_json(step) for step in plan.steps],
        "mixed": dataclasses.asdict(plan.mixed) if plan.mixed else None,
        "handover": dataclasses.asdict(plan.handover) if plan.handover else None,
        "known_errors": [*KNOWN_ERRORS, *nccl_ep.known_errors(plan.deployment)],
        "verdict": dataclasses.asdict(plan.verdict),
    }


CACHE_COLUMNS = ("group", "layers", "kept for", "rows", "B per row", "B in all layers")


def cache_rows(plan: UncompiledPlan) -> list[tuple[str, int, str, int, int, int]]:
    """Returns a row per cache group: `rows` of a page, of a window page, or of a request, in each of `layers`."""
    cfg, cache_dtype = plan.model, plan.deployment.kv_cache_dtype

    def row(group: CacheGroup) -> tuple[str, int, str, int, int, int]:
        rows, nbytes = entries_per_page(cfg, group), row_bytes(cfg, cache_dtype, group.name)
        return group.name, len(group.layers), _UNITS[group.lifetime], rows, nbytes, len(group.layers) * rows * nbytes

    return [row(group) for group in cfg.cache_groups(cache_dtype)]


def cache_pages(plan: UncompiledPlan) -> tuple[int, int]:
    """Returns how many pages of the context and of the window fit one device, beside the state of its requests."""
    account, slots = plan.memory.account, plan.deployment.decode_requests
    cfg, cache_dtype = plan.model, plan.deployment.kv_cache_dtype
    return account.pages, window_pages(cfg, cache_dtype, account.pages, slots)


def _cache_table(plan: UncompiledPlan) -> Table:
    cfg, cache_dtype = plan.model, plan.deployment.kv_cache_dtype
    table = make_table(f"Cache groups, {cache_dtype} (pages of {cfg.page_size} tokens)", *CACHE_COLUMNS)
    for name, layers, kept, rows, width, nbytes in cache_rows(plan):
        table.add_row(name, f"{layers}", kept, f"{rows}", f"{width:,}", f"{nbytes:,}")
    context, window, request = (page_bytes(cfg, cache_dtype, name) for name in ("context", "window", "request"))
    pages, windows = cache_pages(plan)
    token = context / cfg.page_size
    table.add_row(f"a page: {token:,.0f} B per token, {pages:,} fit", "", "", "", "", f"{context:,}", style="bold")
    table.add_row(f"a window page: {windows:,} fit", "", "", "", "", f"{window:,}", style="bold")
    table.add_row("state of a request", "", "", "", "", f"{request:,}", style="bold")
    return table


def _step_table(step: StepEstimate, gpus_per_node: int) -> Table:
    title = f"A {step.phase} step of {step.tokens:,} tokens per rank (estimate from shapes, not a measurement)"
    table = make_table(title, "", "")
    for name, seconds in step.parts.items():
        if seconds:
            table.add_row(f"{name}, per step", f"{seconds * 1e3:.2f} ms")
        if name == "attention" and step.sparse is not None:
            for part, part_seconds in dataclasses.asdict(step.sparse).items():
                if part_seconds:
                    table.add_row(f"  of which {SPARSE_PARTS[part]}", f"{step.layers * part_seconds * 1e3:.2f} ms")
    inside, between = step.traffic.device_bytes - step.traffic.node_bytes, step.traffic.node_bytes
    table.add_row("a device sends to experts and back: in the node", f"{inside / 1e6:,.1f} MB")
    table.add_row("the same between nodes", f"{between / 1e6:,.1f} MB")
    if step.sums:
        table.add_row("a device sends to the others of its rank", f"{step.sums / 1e6:,.1f} MB")
    if step.accepted:
        table.add_row("accepted by position (given)", ", ".join(f"{share:.1%}" for share in step.accepted))
        table.add_row("tokens per request and step", f"{step.tokens_per_row:.2f}", style="bold")
    table.add_row("step", f"{step.seconds * 1e3:.1f} ms", style="bold")
    table.add_row("takes most", step.bound)
    table.add_row("tokens/s per GPU", f"{step.tokens_per_device:,.0f}", style="bold")
    table.add_row("tokens/s per node", f"{step.tokens_per_device * gpus_per_node:,.0f}", style="bold")
    if step.floor is not None:
        table.add_row("roofline (peak rates, perfect overlap): step", f"{step.floor.step * 1e3:.1f} ms")
    return table


def _traffic_table(plan: UncompiledPlan) -> Table:
    """Renders prompts and answers together, or the transfer from instances that compute the prompts."""
    table = make_table("Requests (estimate)", "", "")
    if (mixed := plan.mixed) is not None:
        what = f"prompts of {mixed.prompt:,.0f} and answers of {mixed.answer:,.0f} tokens"
        table.add_row(f"{what}: tokens/s per GPU", f"{mixed.tokens_per_device:,.0f}", style="bold")
        table.add_row("from token to token of a request", f"{mixed.per_answer * 1e3:.1f} ms")
    if (transfer := plan.handover) is not None:
        request = f"a request: {transfer.prompt:,.0f} prompt and {transfer.answer:,.0f} answer tokens"
        table.add_row(f"{request}, its pages and a window page", f"{transfer.nbytes / 1e6:,.0f} MB")
        table.add_row("the same over one device's link between nodes", f"{transfer.cross_seconds * 1e3:,.1f} ms")
        table.add_row("requests/s of the deployment", f"{transfer.requests_per_second:,.1f}")
        table.add_row("received per node", f"{transfer.bytes_per_second / GB:,.2f} GB/s")
    return table


def _step_json(step: StepEstimate) -> dict[str, Any]:
    return dataclasses.asdict(step) | {
        name: getattr(step, name) for name in ("parts", "seconds", "bound", "tokens_per_row", "tokens_per_device")
    }
