"""Simulates the schedule of a compiled program with batches other than its own, to estimate their times.

Smaller buckets are assumed to have the same schedule, with transfers in proportion to their tokens. That is an
approximation, as capacities are rounded up.
"""

import dataclasses
from collections.abc import Callable

from dsv3.config.model import ModelConfig
from tools.plan import hlo, nccl_ep
from tools.plan.deployment import Deployment, PlannedBatch, Rates, kernel_rates
from tools.plan.hlo import Collective, collectives
from tools.plan.plan import PartialPageCost, experts_per_device, lengths, stage_seconds
from tools.plan.programs import CompiledProgram, PlannedModel, compile_step, lay_out
from tools.plan.roofline import HOST_S, decode_stages
from tools.plan.timeline import ScheduleSimulator

_UNBOUNDED = ("router", "head")


class SimulatedProgram:
    """The simulated timeline of a program that was compiled for its largest batch."""

    def __init__(self, planned: PlannedModel, compiled: CompiledProgram) -> None:
        self._planned, self._compiled = planned, compiled
        self._module = hlo.parse(compiled.text)
        self._found = list(collectives(self._module, planned.deployment.gpus_per_node))
        share = planned.reserve.of(compiled.run.key.kind, compiled.run.key.size).share
        self._rates: Rates = kernel_rates(planned.deployment.device, planned.model, share)
        self._batches = ScheduleSimulator(self._module, self._found, {}, self._rates).micro_batches

    def seconds(self, size: int, keys: int) -> float:
        """Returns the seconds of a step, host included, of `size` tokens per rank that attend to `keys` keys each."""
        share = size / self._compiled.run.tokens
        found = [_scaled(each, share) for each in self._found]
        sent, bucket = size // self._batches, self._compiled.run.tokens // self._batches
        library = nccl_ep.exchange(self._planned.model, self._planned.deployment, sent, bucket)
        transfers = None if library is None else library.seconds
        stages = self._stages(size, keys)
        return ScheduleSimulator(self._module, found, stages, self._rates, transfers).simulate().step + HOST_S

    def _stages(self, size: int, keys: int) -> dict[str, float]:
        """Returns the stages' seconds; a small prefill takes at least the time to read its weights."""
        phase, run = self._compiled.phase, dataclasses.replace(self._compiled.run, tokens=size)
        context = max(1, 2 * keys if phase == "prefill" else keys)  # prefill's tokens attend to half of a prompt
        deployment = dataclasses.replace(self._planned.deployment, context_length=context, prefix_hit_rate=0.0)
        at = dataclasses.replace(self._planned, deployment=deployment)
        found = stage_seconds(at, phase, run, self._rates, self._batches)
        if phase == "decode":
            return found
        batch = PlannedBatch(size // self._batches, 0, experts_per_device(at), deployment.tensor_parallel)
        least = decode_stages(at.model, self._rates, batch)
        return {name: s if name in _UNBOUNDED else max(s, least.get(name, 0.0)) for name, s in found.items()}


def _scaled(collective: Collective, share: float) -> Collective:
    """Returns the collective with a share of its bytes."""
    return dataclasses.replace(
        collective,
        node_bytes=int(share * collective.node_bytes),
        cross_bytes=int(share * collective.cross_bytes),
    )


def with_partial_pages(deployment: Deployment, page_size: int) -> Deployment:
    """Returns a decode deployment with the prefill program for the partial last pages of prompts."""
    return dataclasses.replace(deployment, prefill_tokens=page_size, max_num_batched_tokens=page_size)


def partial_page_cost(model: ModelConfig, deployment: Deployment, progress: Callable[[str], None]) -> PartialPageCost:
    """Compiles a decode deployment's program for the partial last pages of prompts, and estimates its cost.

    Partial pages are half full on average; an MTP module is not counted. Raises as `make_plan` does.
    """
    page_size = model.page_size * deployment.decode_context_parallel
    planned = lay_out(model, with_partial_pages(deployment, page_size))
    progress(f"compiling prefill of partial pages for {deployment.devices} x {deployment.device.name}")
    compiled, *_ = compile_step(planned, "prefill")
    prompt, answer = lengths(deployment)
    rows = deployment.decode_requests * deployment.ranks
    return PartialPageCost(SimulatedProgram(planned, compiled).seconds(page_size, round(prompt / 2)), rows, answer)
