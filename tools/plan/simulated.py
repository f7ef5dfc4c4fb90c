"""A compiled program whose schedule is played with other batches than its own: an estimate of each one's time.

Smaller buckets are taken to have the same schedule, with transfers in proportion to their tokens: an approximation, as
capacities are rounded up. `ends_of` plays the program that computes the ends of prompts, where another instance has
computed their whole pages.
"""

import dataclasses
from collections.abc import Callable, Iterable

from dsv3.config.model import ModelConfig
from tools.plan import hlo
from tools.plan.deployment import Deployment, PlannedBatch, Rates, rates_of
from tools.plan.hlo import Collective, collectives
from tools.plan.plan import Ends, experts_per_device, lengths, stages_of
from tools.plan.programs import CompiledProgram, LaidOut, compile_step, lay_out
from tools.plan.roofline import HOST_S, decode_stages
from tools.plan.timeline import Player

_NO_FLOOR = ("router", "head")


class Played:
    """A program of a deployment, compiled for its largest batch."""

    def __init__(self, planned: LaidOut, compiled: CompiledProgram) -> None:
        self._planned, self._compiled = planned, compiled
        self._module = hlo.parse(compiled.text)
        self._found = list(collectives(self._module, planned.deployment.gpus_per_node))
        share = planned.reserve.of(compiled.run.key.kind, compiled.run.key.size).share
        self._rates: Rates = rates_of(planned.deployment.device, planned.model, share)
        self._batches = Player(self._module, self._found, {}, self._rates).micro_batches

    def table(self, buckets: Iterable[int], keys: Iterable[int]) -> dict[int, tuple[float, ...]]:
        """Returns the seconds of a step by bucket, at each of so many keys per token."""
        keys = tuple(keys)
        return {size: tuple(self.seconds(size, each) for each in keys) for size in buckets}

    def seconds(self, size: int, keys: int) -> float:
        """Returns the seconds of a step of `size` tokens per rank, which attend to `keys` keys each; host included."""
        share = size / self._compiled.run.tokens
        found = [_scaled(each, share) for each in self._found]
        return Player(self._module, found, self._stages(size, keys), self._rates).play().step + HOST_S

    def _stages(self, size: int, keys: int) -> dict[str, float]:
        """Returns the stages' seconds; those of a small prefill are no shorter than reading their weights."""
        phase, run = self._compiled.phase, dataclasses.replace(self._compiled.run, tokens=size)
        context = max(1, 2 * keys if phase == "prefill" else keys)  # prefill's tokens attend to half of their prompt
        deployment = dataclasses.replace(self._planned.deployment, context_length=context, prefix_hit_rate=0.0)
        at = dataclasses.replace(self._planned, deployment=deployment)
        found = stages_of(at, phase, run, self._rates, self._batches)
        if phase == "decode":
            return found
        batch = PlannedBatch(size // self._batches, 0, experts_per_device(at), deployment.tensor_parallel)
        floor = decode_stages(at.model, self._rates, batch)
        return {name: s if name in _NO_FLOOR else max(s, floor.get(name, 0.0)) for name, s in found.items()}


def _scaled(collective: Collective, share: float) -> Collective:
    """Returns a collective that sends a share of the bytes."""
    return dataclasses.replace(
        collective,
        node_bytes=int(share * collective.node_bytes),
        cross_bytes=int(share * collective.cross_bytes),
    )


def with_ends(deployment: Deployment, page_size: int) -> Deployment:
    """Returns a decode deployment with the program that computes the ends of prompts."""
    return dataclasses.replace(deployment, prefill_tokens=page_size, max_num_batched_tokens=page_size)


def ends_of(model: ModelConfig, deployment: Deployment, progress: Callable[[str], None]) -> Ends:
    """Compiles the program of a decode deployment, and estimates its time; an MTP module behind it is left out.

    Ends have half a page at the mean. Raises DeploymentError and `AotUnavailableError` as `make_plan` does.
    """
    planned = lay_out(model, with_ends(deployment, model.page_size))
    progress(f"compiling the ends of prompts for {deployment.devices} x {deployment.device.name}")
    compiled, *_ = compile_step(planned, "prefill")
    prompt, answer = lengths(deployment)
    rows = deployment.decode_requests * deployment.ranks
    return Ends(Played(planned, compiled).seconds(model.page_size, round(prompt / 2)), rows, answer)
