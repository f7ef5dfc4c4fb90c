"""Plans with NVIDIA's expert-parallel library in place of XLA's collectives. Estimates; nothing is timed.

    JAX_PLATFORMS=cpu python -m benchmarks.plan_transports [--plot docs/exchange_by_transport.png]

It needs the extra `aot` and some ten minutes of one core: DeepSeek-V3's programs are compiled for each deployment with
both transports. `tools/plan/nccl_ep.py` has the library's published figures and where they are from. The picture, for
which it needs the extra `plots`, has a decode layer by each transport.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.record import Cell, Report, arguments, run
from configs.deepseek_v3 import DEEPSEEK_V3
from configs.deepseek_v4 import DEEPSEEK_V4_FLASH
from configs.deployments import (
    DECODE_EP144,
    NODE_8XH200,
    PREFILL_EP32,
    V4_FLASH_4XH200,
    V4_FLASH_8XH100,
    V4_FLASH_DECODE_EP32,
)
from dsv3.engine.device.layout import DECODE_RESERVE, PREFILL_RESERVE
from sharding.experts.traffic import LayerRows
from sharding.experts.transport import choose
from sharding.mesh import Machine
from tools.plan import hlo, nccl_ep
from tools.plan.deployment import NCCL_EP, Deployment, kernel_rates
from tools.plan.plan import StepPlan, phases, step_plan
from tools.plan.programs import PlannedModel, compile_step, lay_out
from tools.plan.report import draw_layers
from tools.plan.roofline import HOST_S
from tools.plan.timeline import ScheduleSimulator, Timeline
from tools.plan.uncompiled import UncompiledPlan, uncompiled_plan

GOALS = {("decode_ep144", "decode"): 14_800, ("prefill_ep32", "prefill"): 62_700}
"""Tokens per second and node that DeepSeek published of its fleet's decode units, and of its prefill profile."""
UNITS = (DECODE_EP144, PREFILL_EP32, NODE_8XH200)
V4_UNITS = (V4_FLASH_4XH200, V4_FLASH_8XH100, V4_FLASH_DECODE_EP32)
AT_ONCE = {"decode_ep144": (64,), "prefill_ep32": (8192,), "node_8xh200": (48, 2048)}
"""Tokens that a device sends in a micro-batch, or in a whole step that is not split."""
SLOWER = (1.0, 1.15, 1.5)
"""Times of transfers as multiples of those planned; users report up to the second."""
ROLES = ("dispatch", "combine")
COLUMNS = {
    "figures": ["transfer", "GPUs", "NCCL EP, bfloat16 (us)", "line (us)", "DeepEP, FP8 there (us)", "line (us)",
                "line to DeepEP"],
    "bytes": ["deployment", "tokens at once", "transport", "in the node (MB)", "between nodes (MB)", "of the payload",
              "multiprocessors for them", "kernels", "dispatch (us)", "combine (us)"],
    "plans": ["deployment", "step", "transport", "step (ms)", "waits for dispatch (ms)", "waits for combine (ms)",
              "tokens/s per node", "goal", "of the goal"],
    "errors": ["deployment", "transfers take", "hidden (tokens/s per node)", "not hidden (tokens/s per node)"],
    "v4": ["deployment", "step", "transport", "transfers (ms)", "step (ms)", "takes most", "tokens/s per GPU"],
}  # fmt: skip


def main(report: Report) -> None:
    plot = arguments(__doc__, plot=Path).plot
    report.table("Low-latency transfers of 128 tokens to 8 experts each", COLUMNS["figures"], figures())
    report.table("A layer of DeepSeek-V3: a dispatch and a combine of a device", COLUMNS["bytes"], sent())
    compiled = [each for unit in UNITS for each in both(unit)]
    report.table("Plans of DeepSeek-V3 (estimate)", COLUMNS["plans"], (row for each in compiled for row in each.rows()))
    bars = (row for each in compiled if each.by_library for row in each.errors())
    report.table(f"The same with {NCCL_EP}, if its transfers are slower (estimate)", COLUMNS["errors"], bars)
    report.table("Plans of DeepSeek-V4-Flash, FP4 experts (estimate)", COLUMNS["v4"], v4())
    if plot is not None:
        layers, longest = pictured(*compiled[:2])
        draw_layers(layers, plot, longest)


def figures() -> Iterator[list[Cell]]:
    """Yields the published figures beside the lines that plans take."""
    for number, role in enumerate(ROLES):
        inside, outside = nccl_ep.low_latency_lines(number)
        rows = nccl_ep.TOKENS * nccl_ep.EXPERTS_PER_TOKEN
        for gpus in sorted({*nccl_ep.LOW_LATENCY, *nccl_ep.DEEPEP_LOW_LATENCY}):
            line, share = (inside, 7 / 8) if gpus == 8 else (outside, 1 - 8 / gpus)
            rate = nccl_ep.LOW_LATENCY.get(gpus)
            published = rate and rows * nccl_ep.SUM_BYTES / rate[number] / 1e3
            deepep = nccl_ep.DEEPEP_LOW_LATENCY.get(gpus)
            row = (nccl_ep.DEEPEP_ROW, nccl_ep.SUM_BYTES)[number]
            checked = 1e6 * line.seconds(share * rows * row) if deepep else None
            ratio = checked / deepep[number] if deepep and checked else None
            own = 1e6 * line.seconds(share * rows * nccl_ep.SUM_BYTES) if rate else None
            yield [role, gpus, published, own, deepep and deepep[number], checked, ratio]


def sent() -> Iterator[list[Cell]]:
    """Yields what a device sends in a layer by XLA's collectives, and by the library without padding."""
    model = DEEPSEEK_V3
    for unit in UNITS:
        for tokens in AT_ONCE[unit.name]:
            layer = LayerRows.from_widths(tokens, model.num_experts_per_tok, model.hidden_size, fp8_dispatch=True)
            payload = tokens * model.num_experts_per_tok * layer.row_bytes(model.num_experts_per_tok)
            machine, replicas = Machine(unit.nodes, unit.gpus_per_node), model.n_routed_experts + unit.redundant_experts
            transport = choose(machine, replicas, layer)
            traffic = transport.traffic(layer)
            inside = traffic.device_bytes - traffic.node_bytes
            reserve = {"decode_ep144": DECODE_RESERVE, "prefill_ep32": PREFILL_RESERVE}.get(unit.name)
            share = traffic.device_bytes / payload
            values = [inside / 1e6, traffic.node_bytes / 1e6, share, reserve, "NCCL's all-to-all", None, None]
            yield [unit.name, tokens, transport.kind.value, *values]
            library = nccl_ep.exchange(model, with_library(unit), tokens)
            assert library is not None
            took = [1e6 * library.seconds[role] for role in ROLES]
            share = (library.node_bytes + library.cross_bytes) / payload
            reserve = 0 if library.mode == "low latency" else reserve
            values = [library.node_bytes / 1e6, library.cross_bytes / 1e6, share, reserve, library.mode, *took]
            yield [unit.name, tokens, NCCL_EP, *values]


def with_library(unit: Deployment) -> Deployment:
    """Returns the deployment with NVIDIA's library."""
    return dataclasses.replace(unit, expert_transport=NCCL_EP)


@dataclasses.dataclass(frozen=True)
class CompiledUnit:
    """A deployment with the plan of each of its steps."""

    planned: PlannedModel
    steps: tuple[StepPlan, ...]

    @property
    def by_library(self) -> bool:
        return self.planned.deployment.expert_transport == NCCL_EP

    def rows(self) -> Iterator[list[Cell]]:
        """Yields a row of the table of plans for each step."""
        unit = self.planned.deployment
        for step in self.steps:
            goal = GOALS.get((unit.name, step.phase))
            per_node = unit.gpus_per_node * step.tokens_per_device
            waits = [1e3 * step.timeline.exposed.get(role, 0.0) for role in ROLES]
            cells = [1e3 * step.seconds, *waits, per_node, goal, goal and per_node / goal]
            yield [unit.name, step.phase, unit.expert_transport, *cells]

    def errors(self) -> Iterator[list[Cell]]:
        """Yields the rates of each step if transfers take a multiple of their time, hidden by the schedule or not."""
        unit = self.planned.deployment
        for step in self.steps:
            module = hlo.parse(step.text)
            rates = kernel_rates(unit.device, self.planned.model, step.multiprocessors.share)
            batches = step.timeline.micro_batches
            library = nccl_ep.exchange(self.planned.model, unit, step.tokens // batches)
            assert library is not None
            for factor in SLOWER:
                times = {role: factor * seconds for role, seconds in library.seconds.items()}
                line = ScheduleSimulator(module, step.collectives, step.stages, rates, times).simulate()
                all_waits = self.planned.model.num_moe_layers * batches * sum(times.values())
                exposed = line.step - sum(line.exposed.get(role, 0.0) for role in ROLES) + all_waits
                per_node = [unit.gpus_per_node * step.tokens / (s + HOST_S) for s in (line.step, exposed)]
                yield [f"{unit.name}, {step.phase}", f"{factor:g} times as long", *per_node]


def both(unit: Deployment) -> Iterator[CompiledUnit]:
    """Yields the deployment with the transport that serving chooses, and with NVIDIA's library."""
    for each in (unit, with_library(unit)):
        planned = lay_out(DEEPSEEK_V3, each)
        yield CompiledUnit(planned, tuple(step_plan(planned, compile_step(planned, phase)) for phase in phases(each)))


def pictured(two_hops: CompiledUnit, one_hop: CompiledUnit) -> tuple[list[tuple[str, Timeline]], float]:
    """Returns a decode layer by each transport, titled, and the seconds of the longest.

    The library's stand-in is shown with the bytes and the time of its own collectives, too.
    """
    [before], [after] = two_hops.steps, one_hop.steps
    unit, module = one_hop.planned.deployment, hlo.parse(after.text)
    rates = kernel_rates(unit.device, one_hop.planned.model, before.multiprocessors.share)
    found = hlo.collectives(module, unit.gpus_per_node)
    plain = ScheduleSimulator(module, found, before.stages, rates).simulate()
    layers = {
        "hierarchical: to nodes, then in a node, which nothing hides": before.timeline,
        "all_to_all: one hop with padded buffers": plain,
        f"{NCCL_EP}: one hop of NVIDIA's library, rows without padding": after.timeline,
    }
    titled = [(f"{unit.name}, {title}: {1e6 * line.layer:,.0f} us", line) for title, line in layers.items()]
    return titled, max(line.layer for line in layers.values())


def v4() -> Iterator[list[Cell]]:
    """Yields plans of DeepSeek-V4-Flash with both transports."""
    for unit in V4_UNITS:
        for each in (unit, with_library(unit)):
            plan: UncompiledPlan = uncompiled_plan(DEEPSEEK_V4_FLASH, "deepseek_v4_flash", each)
            for step in plan.steps:
                times: list[Any] = [1e3 * step.transfers, 1e3 * step.seconds, step.bound, step.tokens_per_device]
                yield [unit.name, step.phase, each.expert_transport, *times]


if __name__ == "__main__":
    run(main)
