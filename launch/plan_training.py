"""`launch.plan train`: plans the memory, the transfers and the step time of a training run."""

import dataclasses
from typing import TYPE_CHECKING, Any

from absl import flags as absl_flags

from launch import flags, training
from tools.tables import make_table

if TYPE_CHECKING:
    from rich.table import Table

    from tools.plan.deployment import Device
    from tools.plan.training import LayerTimes
    from training.pipeline.memory import RankMemory
    from training.pipeline.schedules import PipelineSchedule

_DEVICE = absl_flags.DEFINE_enum("device", "H800", ["H800", "H200"], "train: on this GPU, in nodes of eight.")
absl_flags.adopt_module_key_flags(training)
_UTILIZATION = 0.9
GB = 1e9


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """The plan in bytes and seconds of one device; `rows` are a micro-batch's on a rank.

    `stage` is the slowest one; a device sends `pair_wire_bytes` in an overlapped pair of one MoE layer.
    """

    schedule: "PipelineSchedule"
    rows: int
    memory: "tuple[RankMemory, ...]"
    budget: int
    stage: "LayerTimes"
    bubble: float
    step: float
    pair_wire_bytes: int
    tokens: int

    @property
    def fits(self) -> bool:
        """Whether every rank's devices have enough memory."""
        return max(rank.needed for rank in self.memory) <= self.budget


def given() -> list[str]:
    """Returns the names of this module's flags that are on the command line."""
    return [flag.name for flag in (*training.FLAGS, _DEVICE) if absl_flags.FLAGS[flag.name].present]


def plan() -> tuple[dict[str, Any], bool]:
    """Plans and prints a training run; returns it for JSON, and whether it fits.

    Raises UsageError for an invalid configuration, mesh or schedule.
    """
    from rich.console import Console

    from configs.deployments import DEVICES

    device = DEVICES[_DEVICE.value]
    try:
        planned = _make(device)
    except ValueError as error:
        raise flags.UsageError(str(error)) from error
    console = Console()
    for table in (_memory_table(planned), _time_table(planned), _check_table()):
        console.print(table)
    need = max(rank.needed for rank in planned.memory)
    verdict = "fits" if planned.fits else "does not fit"
    console.print(
        f"{verdict}: needs {need / GB:.1f} GB of {planned.budget / GB:.1f} GB ({_UTILIZATION:g} of {device.name})"
    )
    return _as_json(planned, device), planned.fits


def _make(device: "Device") -> TrainingPlan:
    from tools.plan.deployment import kernel_rates
    from tools.plan.training import exchange_transfers
    from training.pipeline import simulator
    from training.pipeline.experts import TeamBuffers
    from training.pipeline.memory import memory_of
    from training.pipeline.schedules import micro_batch_rows

    config, (ranks, size) = training.config(), training.mesh()
    model, schedule = config.model, training.schedule(ranks)
    rows = micro_batch_rows(config.batch_size, model.n_routed_experts, schedule.micro_batches, size)
    tokens = rows // size.devices * config.sequence_length
    buffers = TeamBuffers.from_batch(tokens, model.num_experts_per_tok, model.n_routed_experts, size.experts)
    wire_bytes, wire = exchange_transfers(model, kernel_rates(device, model), buffers.lines, size.experts)
    stage = _longest_stage(config, device, schedule, tokens, wire)
    forward, backward, weight = stage.alone
    durations = simulator.Durations(forward, backward, weight, stage.pair)
    timeline = simulator.simulate(schedule, durations)
    return TrainingPlan(
        schedule,
        rows,
        memory_of(config, schedule, rows, size),
        int(_UTILIZATION * device.memory_bytes),
        stage,
        max(timeline.bubbles()) / timeline.makespan,
        timeline.makespan,
        2 * wire_bytes,
        config.batch_size * config.sequence_length,
    )


def _longest_stage(
    config: Any, device: "Device", schedule: "PipelineSchedule", tokens: int, wire: float
) -> "LayerTimes":
    """Returns the times of the slowest stage; an MTP module counts as a MoE layer, the head is not counted."""
    from tools.plan.training import LayerTimes
    from training.pipeline.stages import cut

    model = config.model
    dense, moe = (_layer(config, device, tokens, wire, dense=kind) for kind in (True, False))
    stages = []
    for stage in cut(model, schedule.stages):
        of = [dense if i < model.num_dense_layers else moe for i in range(stage.begin, stage.end)]
        of += [moe] * (model.num_nextn_predict_layers if stage.last else 0)
        parts = zip(*(dataclasses.astuple(layer) for layer in of), strict=True)
        stages.append(LayerTimes(*map(sum, parts)))
    return max(stages, key=lambda times: times.pair)


def _layer(config: Any, device: "Device", tokens: int, wire: float, *, dense: bool) -> "LayerTimes":
    """Returns the times of one layer, with FP8 products if the configuration has them."""
    from dsv3.config.model import Fp8Config
    from tools.plan.deployment import kernel_rates
    from tools.plan.training import layer_times, with_fp8_products

    def times(model: Any) -> "LayerTimes":
        keys = (config.sequence_length + 1) / 2
        return layer_times(model, kernel_rates(device, model), tokens, keys, wire, dense=dense)

    plain = times(config.model)
    if not config.fp8_products:
        return plain
    return with_fp8_products(plain, times(dataclasses.replace(config.model, fp8=Fp8Config())))


def _memory_table(planned: TrainingPlan) -> "Table":
    table = make_table("Memory of one device, GB", "rank", "weights", "gradients", "optimiser", "activations", "needed")
    for number, rank in enumerate(planned.memory):
        values = (rank.weights, rank.gradients, rank.optimizer, rank.activations, rank.needed)
        table.add_row(str(number), *(f"{value / GB:.3f}" for value in values))
    return table


def _time_table(planned: TrainingPlan) -> "Table":
    from training.pipeline import simulator

    schedule = planned.schedule
    table = make_table(f"{schedule.algorithm}, {schedule.ranks} ranks (a model, not a measurement)", "", "")
    table.add_row("micro-batches, of rows on a rank", f"{schedule.micro_batches}, {planned.rows}")
    table.add_row("micro-batches in flight at most", str(max(simulator.simulate(schedule).in_flight())))
    table.add_row("MB sent by a device per pair of a MoE layer", f"{planned.pair_wire_bytes / 1e6:,.1f}")
    for name, value in zip(("forward", "backward", "weight gradient"), planned.stage.alone, strict=True):
        table.add_row(f"{name} of the slowest stage", f"{value * 1e3:,.2f} ms")
    table.add_row("overlapped pair of the slowest stage", f"{planned.stage.pair * 1e3:,.2f} ms")
    table.add_row("idle, of a step", f"{planned.bubble:.1%}")
    table.add_row("step, without optimiser", f"{planned.step:,.3f} s")
    table.add_row("tokens/s, all devices", f"{planned.tokens / planned.step:,.0f}")
    return table


def _check_table() -> "Table":
    from configs.deepseek_v3 import DEEPSEEK_V3
    from configs.deployments import H800
    from tools.plan.training import against_profile

    table = make_table("The model against DeepSeek's profile: a pair of one layer", "", "estimate", "profile", "error")
    for name, (estimate, measured) in against_profile(DEEPSEEK_V3, H800).items():
        table.add_row(name, f"{estimate * 1e3:.1f} ms", f"{measured * 1e3:.1f} ms", f"{estimate / measured - 1:+.0%}")
    return table


def _as_json(planned: TrainingPlan, device: "Device") -> dict[str, Any]:
    from configs.deepseek_v3 import DEEPSEEK_V3
    from configs.deployments import H800
    from tools.plan.training import against_profile

    return {
        "config": training.CONFIG.value,
        "mesh": training.MESH.value,
        "pipeline": planned.schedule.algorithm,
        "micro_batches": planned.schedule.micro_batches,
        "device": device.name,
        "memory": [dataclasses.asdict(rank) | {"needed": rank.needed} for rank in planned.memory],
        "budget": planned.budget,
        "stage": dataclasses.asdict(planned.stage) | {"pair": planned.stage.pair},
        "pair_wire_bytes": planned.pair_wire_bytes,
        "bubble": planned.bubble,
        "step": planned.step,
        "tokens": planned.tokens,
        "errors": {
            name: estimate / measured - 1 for name, (estimate, measured) in against_profile(DEEPSEEK_V3, H800).items()
        },
        "fits": planned.fits,
    }
