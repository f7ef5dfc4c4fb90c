"""DeepSeek's decode deployment: the compiled programs of model and MTP module for 144 GPUs."""

import dataclasses
import io
import json
import math
import re
from collections import Counter
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from rich.console import Console

from configs.deepseek_v3 import DEEPSEEK_V3
from configs.deployments import DECODE_EP144
from dsv3.engine.device.programs import Key, largest
from dsv3.engine.memory import local_bytes
from dsv3.model import AttentionForm
from pallas_kernels.multiprocessors import Multiprocessors, traced
from sharding.collectives import Overlap, resolve_overlap
from sharding.experts.traffic import LayerRows
from sharding.experts.transport import build
from sharding.experts.transport_kind import TransportKind
from sharding.mesh import Machine
from tests.dsv3.model.test_overlap_schedule import copied_weights, written
from tests.tools.plan import command_lines, test_launch_order
from tools.plan import plan as planning
from tools.plan import report
from tools.plan.memory import memory_of
from tools.plan.plan import Plan, ProgramPlan, StepPlan, make_plan, program_plan
from tools.plan.programs import CompiledProgram, PlannedModel, compile_run, compile_step, lay_out, runs
from tools.plan.report import draw

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(resolve_overlap("cuda") is not Overlap.HOOKS, reason="jax 0.11 overlaps nothing"),
]
MOE_LAYERS = 58


@pytest.fixture(scope="module")
def laid_out() -> PlannedModel:
    return lay_out(DEEPSEEK_V3, DECODE_EP144)


@pytest.fixture(scope="module")
def compiled(laid_out) -> CompiledProgram:
    [program] = compile_step(laid_out, "decode")
    return program


@pytest.fixture(scope="module")
def plan(compiled) -> Plan:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "compile_step", lambda *_: (compiled,))
        patch.setattr(planning, "measure", lambda *_: command_lines.written()["plan decode_ep144"])
        return make_plan(DEEPSEEK_V3, "deepseek_v3", DECODE_EP144)


@pytest.fixture(scope="module")
def step(plan) -> StepPlan:
    (step,) = plan.steps
    return step


def test_it_fits_80_gb(plan) -> None:
    assert plan.verdict.fits
    memory = plan.memory
    assert memory.compiled
    assert memory.account.working < 1.4e9
    assert memory.needed < 72e9
    assert memory.tokens_left > 128 * 4989


def test_a_pool_that_fills_the_memory_changes_no_program(laid_out, compiled, plan) -> None:
    """`working.json` is of a small pool and two MoE layers; with the server's pool XLA once rematerialized values.

    The program with the largest temporaries materializes cached tokens; the largest results are the logits of decode.
    """
    key = Key("prefill", 512, AttentionForm.MATERIALIZED)
    assert {key, compiled.run.key} <= set(largest(laid_out.engine, laid_out.programs.keys()))
    cfg = dataclasses.replace(laid_out.engine, num_pages=plan.memory.account.pages)
    served = dataclasses.replace(laid_out, engine=cfg).programs
    program: Any = served.get(key)  # the compiler takes the options of the test below
    taken = program.memory_analysis().temp_size_in_bytes + 2 * compiled.results
    assert taken == pytest.approx(command_lines.written()["plan decode_ep144"], rel=0.005)
    assert ".remat" not in program.as_text()


def test_no_process_waits_for_autotuning_of_another(laid_out) -> None:
    """A process with a stored program does not tune, so tuning must not be collective."""
    programs, given = dataclasses.replace(laid_out).programs, {}
    programs.store = SimpleNamespace(get=lambda name, lower, options: given.update({name: options}))
    for key in programs.keys():  # noqa: SIM118
        programs.get(key)
    assert {name.partition("-")[0] for name in given} > {"prefill", "decode", "sample", "logprobs", "move_experts"}
    assert {options["xla_gpu_shard_autotuning"] for options in given.values()} == {False}


def test_the_compiler_counts_the_same_arguments(plan, step, laid_out) -> None:
    """Bytes from shapes are those that XLA allocates, except for the batch and pointers."""
    layout = laid_out.layout
    computed = sum(plan.memory.weights.values()) + plan.memory.cache + local_bytes(layout.state)
    assert 0 <= step.arguments - computed < 1e6


def test_neither_the_pool_nor_a_weight_is_copied(step, laid_out, compiled) -> None:
    """A copy of the pool would be 45 GB, one of a layer's smallest stack of products 66 MB."""
    assert step.temporaries < 200e6
    unit = laid_out.deployment
    elements = [math.prod(shape) for _, shape in written(compiled.text, "copy")]
    assert elements
    assert math.prod(laid_out.layout.pages["latents"].shape) // unit.ranks not in elements
    assert not copied_weights(compiled.text, (DEEPSEEK_V3.n_routed_experts + unit.redundant_experts) // unit.devices)


def test_kernels_leave_multiprocessors_to_transfers_in_overlapped_steps(step, module) -> None:
    """The kernels' grids and NCCL's channels are compiled in."""
    assert step.multiprocessors == Multiprocessors(132, 8)
    assert module.multiprocessors == Multiprocessors(132, 0), "the MTP module's batch is whole"


@pytest.mark.parametrize(("count", "wanted", "reserved"), [(132, None, 8), (78, 6, 6)])
def test_bodies_are_traced_for_the_gpus_multiprocessors(count: int, wanted: int | None, reserved: int) -> None:
    device = dataclasses.replace(DECODE_EP144.device, multiprocessors=count)
    unit = dataclasses.replace(DECODE_EP144, device=device, reserved_multiprocessors=wanted)
    layout = lay_out(DEEPSEEK_V3, unit).layout
    seen = []

    def body(pages):
        seen.append(traced())
        return pages

    for key in (Key("decode", 128), Key("decode", 16), Key("sample", 128)):
        jax.eval_shape(layout.per_rank(key, body, (layout.pages,)).body, layout.pages)
    assert seen == [Multiprocessors(count, reserved), Multiprocessors(count), Multiprocessors(count)]


def test_nothing_waits_for_the_host(step, module) -> None:
    assert step.host_waits == module.host_waits == ()


def test_all_devices_launch_the_collectives_in_one_order(step, module) -> None:
    """Collectives in flight share the communicator of the nodes, whose channels fit the reserved multiprocessors."""
    assert step.order.faults == module.order.faults == ()
    assert (step.order.in_flight, step.order.communicators, step.order.channels) == (2, 1, 8)


def test_possible_deadlocks_of_this_program_are_found(compiled) -> None:
    test_launch_order.check_that_faults_are_found(compiled.text)


def test_bytes_equal_the_transports_formula(step, laid_out) -> None:
    traffic, size = laid_out.functions.traffic, DECODE_EP144.decode_requests
    assert traffic is not None
    programs = laid_out.layout.cfg.forward_programs
    expected = traffic(next(each for each in programs if (each.kind, each.size) == ("decode", size)))
    rows = [c for c in step.collectives if c.role in ("dispatch", "combine")]
    assert sum(c.step_bytes for c in rows) == expected.device_bytes
    assert sum(c.times * c.cross_bytes for c in rows) == expected.node_bytes


def test_transfers_between_nodes_hide_behind_matrix_work(step) -> None:
    """Shared expert and projections of the other micro-batch hide dispatch, its attention hides combine."""
    crossing = [c for c in step.collectives if c.cross_bytes > 1e6]
    hidden = Counter[str]()
    for c in crossing:
        hidden[c.role if c.is_hidden else "exposed"] += c.times
    # No work is left to hide the last layer's second combine.
    assert hidden == {"dispatch": 2 * MOE_LAYERS, "combine": 2 * MOE_LAYERS - 1, "exposed": 1}
    assert {stage for c in crossing for stage in c.between} >= {"shared_expert", "project", "attention"}


def test_the_layer_is_the_published_pipeline(step) -> None:
    line = step.timeline
    assert (line.layers, line.micro_batches) == (MOE_LAYERS - 1, 2)
    order = [(b.label, b.micro_batch) for b in line.blocks if b.label in ("shared_expert", "project", "attention")]
    half = [("shared_expert", 0), ("project", 1), ("attention", 1)]
    assert order == [*half, *((label, 1 - number) for label, number in half)]


def test_the_estimate_lies_between_the_roofline_and_twice_the_pipeline(step) -> None:
    assert step.floor is not None
    assert step.floor.step < step.seconds < 0.2
    assert step.tokens_per_device == pytest.approx(128 / step.seconds)


@pytest.fixture(scope="module")
def planned() -> PlannedModel:
    """The same unit with a draft for each request."""
    return lay_out(
        DEEPSEEK_V3, dataclasses.replace(DECODE_EP144, speculative_config={"method": "mtp"}, acceptance=0.85)
    )


@pytest.fixture(scope="module")
def module(planned) -> ProgramPlan:
    """The MTP module's program of a step; the model's program with drafts differs from `step` only in its rows."""
    _, run = runs(planned, "decode")
    return program_plan(planned, compile_run(planned, "decode", run))


def test_the_compiler_counts_the_modules_arguments(planned, module) -> None:
    """Its own weights, embedding and head, the whole cache and map, and hidden states of two tokens per request."""
    memory = memory_of(planned)
    groups = ("draft layers, routed experts", "draft layers, all else", "embedding and head")
    computed = sum(memory.weights[name] for name in groups) + memory.cache + local_bytes(planned.layout.state)
    hidden = 2 * DECODE_EP144.decode_requests * DEEPSEEK_V3.hidden_size * 2
    expert_map = local_bytes(planned.layout.params.placement)
    assert 0 <= module.arguments - computed - hidden - expert_map < 1e6
    assert module.temporaries < 300e6  # a copy of the pool would be 45 GB


def test_the_module_sends_the_bytes_of_its_transport(module) -> None:
    """One layer, one batch: a dispatch and a combine of 256 tokens for each of the two hops."""
    rows = LayerRows.from_widths(256, DEEPSEEK_V3.num_experts_per_tok, DEEPSEEK_V3.hidden_size, fp8_dispatch=True)
    expected = build(TransportKind.HIERARCHICAL, Machine(18, 8), 288, rows, Overlap.HOOKS).traffic(rows)
    sent = [c for c in module.collectives if c.role in ("dispatch", "combine")]
    assert [c.times for c in sent] == [1, 1, 1, 1]
    assert sum(c.node_bytes + c.cross_bytes for c in sent) == expected.device_bytes
    assert sum(c.cross_bytes for c in sent) == expected.node_bytes


def test_drafts_add_the_modules_time_and_the_accepted_tokens(step, module) -> None:
    chain = dataclasses.replace(module, run=dataclasses.replace(module.run, part="chain", times=2))
    drafting = dataclasses.replace(step, drafts=(module, chain), accepted=(0.9, 0.6, 0.3))
    assert (step.tokens_per_row, drafting.tokens_per_row) == (1, pytest.approx(2.8))
    assert drafting.seconds == pytest.approx(step.seconds + 3 * module.timeline.step)
    assert drafting.tokens_per_device == pytest.approx(128 * 2.8 / drafting.seconds)
    parts = ("eh_proj", "project", "attention", "router", "shared_expert", "experts", "head")
    assert module.timeline.step > sum(module.stages[name] for name in parts)


def test_a_report_shows_cost_and_gain_of_drafts(plan, step, module) -> None:
    drafting = dataclasses.replace(plan, steps=(dataclasses.replace(step, drafts=(module,), accepted=(0.85,)),))
    text = shown(drafting)
    assert "Collectives of the MTP module after a decode step, 256 tokens per rank" in text
    lines = {line.split("   ")[0].strip(): line.split()[-1] for line in text.splitlines() if line.strip()}
    assert lines["tokens per request and step"] == "1.85"
    assert lines["accepted by position (given)"] == "85.0%"
    written = json.loads(json.dumps(report.as_json(drafting)))["steps"][0]
    assert written["drafts"][0]["part"] == "module" and written["tokens_per_row"] == 1.85
    assert "tokens per request and step" not in shown(plan)


def shown(plan: Plan) -> str:
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(report.render(plan))
    return console.export_text()


def test_report_json_and_picture(plan, tmp_path) -> None:
    text = shown(plan)
    assert "weights: routed experts" in text
    assert "fits: needs 68." in text
    assert "known error" in text
    assert re.search(r"multiprocessors: for kernels, for transfers +124, 8", text)
    assert re.search(r"most transfers in flight, their channels +2, 8", text)
    assert re.search(r"possible deadlocks of collectives +none", text)
    written = json.loads(json.dumps(report.as_json(plan)))
    assert written["steps"][0]["timeline"]["micro_batches"] == 2
    launched = sum(written["steps"][0]["kernels"].values())
    assert 61 * 2 * 50 < launched < 61 * 2 * 110, "per layer and micro-batch: docs/plan.md says 105"
    assert written["steps"][0]["order"] == {"in_flight": 2, "communicators": 1, "channels": 8, "faults": []}
    draw(plan, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
