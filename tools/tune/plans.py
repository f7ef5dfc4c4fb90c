"""Times the legal plans of the kernels that a model's programs call, at their shapes."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dsv3.config.device_rates import peaks_of
from dsv3.engine.components import EngineComponents
from dsv3.engine.executor import lay_out
from dsv3.engine.jobs import JOB_KINDS
from pallas_kernels import checks, gpus, multiprocessors, native
from pallas_kernels.backend import Backend, resolve_backend
from pallas_kernels.checks import Case, arrays, experts, products
from pallas_kernels.checks.case import BFLOAT16, FLOAT32
from pallas_kernels.dense import layer_gemm, plain_gemm
from pallas_kernels.float8 import E4M3
from pallas_kernels.gemm import plan as hopper
from pallas_kernels.gemm import triton_dispatch
from pallas_kernels.tuned import PlanChoice, recording, set_plans
from tools.doctor.rates import timer
from tools.tune.selection import Outcome, fastest, timed_in_turns

_log = logging.getLogger(__name__)
_ROUNDS = 5
_MOST_PLANS = 6
_CPU_STACK_BYTES = 32 << 20
_CPU_BYTES_PER_S = 2e10
_GROUP_ROWS = 512  # that each group of a prefill step is assumed to have


class Kernel(NamedTuple):
    """How a kernel's choice is timed: the case of its shape under a plan.

    `takes_plan`: the case has the plan itself, and another number of rows; else its planner finds the plan in the
    table. `has_sms`: the last number of a shape are the multiprocessors that it is planned for.
    """

    case: Callable[[PlanChoice, Any], Case]
    takes_plan: bool = False
    has_sms: bool = False


def recorded_choices(components: EngineComponents) -> list[PlanChoice]:
    """Returns the choices that the programs of an engine make, the largest weights first; nothing is compiled."""
    with recording() as found:
        _, programs = lay_out(components, JOB_KINDS)
        programs.store = _Traced()
        programs.compile_all()
    return sorted(found.values(), key=lambda choice: -_weight(choice))


def tune_plans(
    choices: Iterable[PlanChoice], seconds_left: Callable[[], float], say: Callable[[str], None] = lambda line: None
) -> tuple[dict[str, str], list[Outcome], int]:
    """Returns the plans that are faster than the planner's, what was measured, and how many choices were not tried.

    A plan that is faster is used only if its results pass the check against the reference.
    """
    found, outcomes, untried = {}, [], 0
    backend = resolve_backend()
    try:
        for choice in choices:
            if seconds_left() <= 0:
                untried += 1
                continue
            started = time.monotonic()
            outcome = _outcome(choice, backend)
            if outcome is None:
                continue
            outcomes.append(outcome)
            if outcome.chosen != outcome.default:
                found[choice.name] = outcome.chosen
                say(f"{choice.name}: {outcome.chosen}, {outcome.gain:.2f} times as fast")
            _log.info("%s was measured in %.1f s", choice.name, time.monotonic() - started)
    finally:
        set_plans({})
    return found, outcomes, untried


def _outcome(choice: PlanChoice, backend: Backend) -> Outcome | None:
    """Returns the fastest plan of a choice; None where there is nothing to choose or its case does not call it."""
    plans = [choice.default, *(plan for plan in choice.legal if plan != choice.default)][:_MOST_PLANS]
    if len(plans) < 2:
        return None
    kernel = KERNELS[choice.kernel]
    case = kernel.case(choice, choice.default)
    operands = jax.jit(case.operands)(jax.random.key(0))
    device = jax.devices()[0]
    roof = case.bytes / (_CPU_BYTES_PER_S if device.platform == "cpu" else peaks_of(device.device_kind).hbm)
    timers, tried = [], []
    for plan in plans:
        with _under(choice, plan), recording() as called:
            try:
                called_case = kernel.case(choice, plan)
                timers.append(timer(lambda o, i, c=called_case: c.call(o, i, backend), operands, roof))
            except Exception as error:
                _log.info("%s is not possible for %s: %s", plan, choice.name, error)
                continue
        if choice.name not in called and not kernel.takes_plan:
            _log.info("%s is not timed: its case does not have this choice", choice.name)
            return None
        tried.append(plan)
    if tried[:1] != plans[:1]:
        return None
    at, gained = fastest(timed_in_turns(timers, _ROUNDS), 0)
    with _under(choice, tried[at]):
        if at and not checks.check(kernel.case(choice, tried[at]), backend).passed:
            _log.warning("%s is faster for %s, but its results are wrong: not used", tried[at], choice.name)
            at, gained = 0, 1.0
    return Outcome(choice.name, str(choice.default), str(tried[at]), gained)


@contextlib.contextmanager
def _under(choice: PlanChoice, plan: Any) -> Iterator[None]:
    """Traces with a plan, on the multiprocessors that the choice was made for."""
    set_plans({choice.name: str(plan)})
    if not KERNELS[choice.kernel].has_sms:
        yield
        return
    count = gpus.multiprocessors(gpus.default_device())
    with multiprocessors.taking(multiprocessors.Multiprocessors(count, count - int(choice.shape[-1]))):
        yield


class _Traced:
    """A store that traces every program and compiles none."""

    def get(self, name: str, lower: Callable[[], Any], options: Mapping[str, Any] | None) -> Callable[..., Any]:
        lower()
        return lambda *arguments: None

    def remove_unused(self) -> None:
        """Does nothing: no program is stored."""


def _weight(choice: PlanChoice) -> int:
    """Returns the values of a choice's weights: all shapes begin with (rows, N, K)."""
    _, n, k, *_ = choice.shape
    return int(n) * int(k)


def _dense(choice: PlanChoice, plan: Any) -> Case:
    """Returns the case of a dense product of any of the GPU kernels."""
    del plan
    m, n, k, itemsize, *more = (int(value) for value in choice.shape)
    if itemsize == 1:
        return products.dense_case(m, n, k)
    return products.router_case(m, n, k) if more[:1] == [4] else products.plain_case(m, n, k)


def _grouped(choice: PlanChoice, plan: Any) -> Case:
    m, n, k, itemsize, _ = (int(value) for value in choice.shape)
    groups = max(1, m // _GROUP_ROWS)
    dtype = E4M3 if itemsize == 1 else jnp.dtype(jnp.bfloat16)
    return experts.contiguous_case(groups, m // groups, n, k, dtype, plan)


def _on_cpu(choice: PlanChoice, plan: Any) -> Case:
    """Returns a product with one layer of a stack that no cache holds, or with a weight outside of a stack."""
    del plan
    rows, n, k, (dtype, kind) = *map(int, choice.shape[:3]), map(str, choice.shape[3:])
    size = n * k * jnp.dtype(dtype).itemsize
    layers = max(2, min(64, _CPU_STACK_BYTES // size)) if kind == "of a stack" else 1

    def operands(key: jax.Array) -> dict[str, jax.Array]:
        x, w = (arrays.normal(each, *shape).astype(dtype) for each, shape in
                zip(jax.random.split(key), ((rows, k), (layers, n, k)), strict=True))  # fmt: skip
        return {"x": x, "w": w if layers > 1 else w[0]}

    def call(operands: dict[str, jax.Array], i: Any, backend: Backend | None) -> jax.Array:
        if layers == 1:
            x, _ = jax.lax.optimization_barrier((operands["x"], i))
            return plain_gemm(x, operands["w"], backend=backend)
        return layer_gemm(operands["x"], operands["w"], i % layers, backend=backend)

    tolerance = FLOAT32 if dtype == "float32" else BFLOAT16
    return Case(choice.name, operands, call, {"out": tolerance}, flops=2 * rows * n * k, bytes=size)


KERNELS: dict[str, Kernel] = {
    hopper.DENSE: Kernel(_dense, has_sms=True),
    hopper.GROUPED: Kernel(_grouped, takes_plan=True, has_sms=True),
    triton_dispatch.DENSE: Kernel(_dense),
    native.PRODUCT: Kernel(_on_cpu),
}
"""The kernels whose plans are measured, by the name that their planner gives."""
