"""DeepSeek's prefill deployment: the compiled program for 32 GPUs."""

import math

import pytest

from configs.deepseek_v3 import DEEPSEEK_V3
from configs.deployments import PREFILL_EP32
from sharding.collectives import Overlap, resolve_overlap
from tests.dsv3.model.test_overlap_schedule import copied_weights, layer_loop, written
from tests.tools.plan import command_lines, test_launch_order
from tools.plan import plan as planning
from tools.plan.plan import Plan, make_plan
from tools.plan.programs import CompiledProgram, PlannedModel, compile_step, lay_out
from tools.plan.timeline import COMPUTE, CROSS_LINK

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(resolve_overlap("cuda") is not Overlap.HOOKS, reason="jax 0.11 overlaps nothing"),
]


@pytest.fixture(scope="module")
def planned() -> PlannedModel:
    return lay_out(DEEPSEEK_V3, PREFILL_EP32)


@pytest.fixture(scope="module")
def compiled(planned) -> CompiledProgram:
    [program] = compile_step(planned, "prefill")
    return program


@pytest.fixture(scope="module")
def plan(compiled) -> Plan:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "compile_step", lambda *_: (compiled,))
        patch.setattr(planning, "measure", lambda *_: command_lines.written()["plan prefill_ep32"])
        return make_plan(DEEPSEEK_V3, "deepseek_v3", PREFILL_EP32)


def test_it_fits_80_gb(plan) -> None:
    assert plan.verdict.fits
    memory = plan.memory
    assert memory.compiled
    assert memory.account.working < 5e9
    assert memory.tokens_left > 10 * PREFILL_EP32.prefill_tokens


def test_the_layer_is_the_published_timeline(plan) -> None:
    """Attention and shared expert || combine, attention || dispatch, experts || dispatch, the rest || combine."""
    (step,) = plan.steps
    line = step.timeline
    named = ("attention", "shared_expert", "experts")
    computed = [(b.label, b.micro_batch) for b in line.blocks if b.lane == COMPUTE and b.label in named]
    assert list(dict.fromkeys(computed)) == [  # attention 0 and experts are cut, for the second hops
        ("attention", 1),
        ("shared_expert", 0),
        ("attention", 0),
        ("experts", 1),
        ("experts", 0),
        ("shared_expert", 1),
    ]
    crossing = [(b.label, b.micro_batch) for b in line.blocks if b.lane == CROSS_LINK]
    assert list(dict.fromkeys(crossing)) == [("combine", 0), ("dispatch", 1), ("dispatch", 0), ("combine", 1)]


def test_kernels_leave_as_many_multiprocessors_as_deepseeks(plan) -> None:
    """108 of 132 multiprocessors compute in DeepSeek's profile of this step."""
    (step,) = plan.steps
    assert (step.multiprocessors.taken, step.multiprocessors.reserved) == (108, 24)


def test_all_devices_launch_the_collectives_in_one_order(plan) -> None:
    """Hops inside and between nodes are in flight together, and share the reserved multiprocessors."""
    (step,) = plan.steps
    assert step.order.faults == ()
    assert (step.order.in_flight, step.order.communicators, step.order.channels) == (2, 2, 24)


def test_possible_deadlocks_of_this_program_are_found(compiled) -> None:
    test_launch_order.check_that_faults_are_found(compiled.text)


def test_nothing_waits_for_the_host(plan) -> None:
    """Neither overflow rounds nor the presence of cached tokens need the host."""
    (step,) = plan.steps
    assert step.host_waits == ()


def test_everything_hides_behind_matrix_work(plan) -> None:
    """Both hops of dispatch and combine are hidden, except for the last combine."""
    (step,) = plan.steps
    sent = [c for c in step.collectives if c.role in ("dispatch", "combine")]
    assert {(c.role, c.group_size): c.is_hidden for c in sent if c.times > 1} == {
        ("dispatch", 4): True,
        ("dispatch", 8): True,
        ("combine", 8): True,
        ("combine", 4): True,
    }
    assert sum(c.times for c in sent if not c.is_hidden) <= 1


def test_the_page_pool_is_not_copied(planned, compiled) -> None:
    elements = [math.prod(shape) for _, shape in written(compiled.text, "copy")]
    assert elements
    assert math.prod(planned.layout.pages["latents"].shape) // planned.deployment.ranks not in elements


def test_no_weight_is_copied(planned, compiled) -> None:
    experts = DEEPSEEK_V3.n_routed_experts + PREFILL_EP32.redundant_experts
    assert not copied_weights(compiled.text, experts // planned.deployment.devices)


def test_the_overflow_flag_is_reduced_after_the_layers(compiled) -> None:
    assert not any("all-reduce" in line for line in layer_loop(compiled.text))
