"""A case of an operation, and the row of its check.

A check sets what must not be read to NaN, runs the operation twice, and compares it with the reference.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.backend import Backend

NUMBER = 1
"""The checked weight of a stack: not the first."""


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Allowed differences from the reference; all apply."""

    diff: float
    """On `|x - y|^2 / (|x|^2 + |y|^2)` of all values together: DeepGEMM's calc_diff."""
    relative: float
    """A value may differ by this fraction of itself ..."""
    absolute: float
    """... plus this fraction of the root mean square of all."""
    reason: str
    """The reason."""


EXACT = Tolerance(0, 0, 0, "nothing is rounded")
BFLOAT16 = Tolerance(1e-5, 2**-7, 2**-5, "the result, and what attention multiplies with, is rounded to bfloat16")
FP8_SUMS = Tolerance(1e-3, 2**-7, 2**-4, "tensor cores keep some 14 bits of a sum of 128 FP8 products")
FLOAT32 = Tolerance(1e-8, 2**-12, 2**-10, "sums of float32 in another order")


def _as_they_are(operands: Any, i: Any) -> Any:
    del i
    return operands


def widened(operands: Any) -> Any:
    """Returns the operands with all 16-bit floats as float32."""
    narrow = (jnp.bfloat16, jnp.float16)
    return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype in narrow else x, operands)


@dataclasses.dataclass(frozen=True)
class Case:
    """An operation at one shape."""

    name: str
    operands: Callable[[jax.Array], Any]
    """Makes the operands, from a key."""
    call: Callable[..., Any]
    """(operands, i, backend) -> result, with weight number i of a stack. Benchmarks time it."""
    tolerance: Mapping[str, Tolerance]
    """By the names of `counted`."""
    counted: Callable[[Any, Any], Mapping[str, jax.Array]] = lambda operands, result: {"out": result}
    """(operands, result) -> the arrays to compare, with 0 for undefined values."""
    poisoned: Callable[[Any, Any], Any] = _as_they_are
    """(operands, i) -> operands with NaN where call i must not read."""
    exact: Callable[[Any], Any] = widened
    """Operands -> those of the reference."""
    reference: Callable[[Any, Any], Any] | None = None
    """(exact operands, i) -> result; None for `call` with Backend.REFERENCE."""
    flops: float = 0
    bytes: float = 0
    """At least read and written by a call."""
    key: tuple = ()
    """Key of published figures in a benchmark."""
    sliced: Callable[..., Any] | None = None
    """(operands, i) -> result, XLA's product with the slice `stack[i]`; None if not timed."""


@dataclasses.dataclass(frozen=True)
class Row:
    """The result of a check."""

    case: str
    passed: bool
    says: str = ""
    figures: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Returns the row for `json.dumps`, without figures that JSON has no number for."""
        figures = {name: value for name, value in self.figures.items() if math.isfinite(value)}
        return {"case": self.case, "passed": self.passed, "says": self.says, "figures": figures}


class ContextLostError(RuntimeError):
    """An error, such as an illegal address, has ended the device's context."""


def check(case: Case, backend: Backend) -> Row:
    """Returns the row of a case; an exception is a failed row.

    Raises ContextLostError if the device's context is lost.
    """
    try:
        return _compared(case, backend)
    except Exception as error:  # whatever it is, the next case runs
        says = f"raised {type(error).__name__}: {_one_line(error)}"
    try:
        jax.block_until_ready(jnp.zeros(1) + 1)
    except Exception as error:
        raise ContextLostError(f"{case.name} {says}; then nothing runs: {_one_line(error)}") from error
    return Row(case.name, False, says)


def expected(case: Case, operands: Any, i: Any) -> Mapping[str, jax.Array]:
    """Returns the expected result of `case`, by the reference with float32 products."""
    with jax.default_matmul_precision("highest"):
        exact = case.exact(operands)
        result = case.reference(exact, i) if case.reference else case.call(exact, i, Backend.REFERENCE)
        return case.counted(exact, result)


def _compared(case: Case, backend: Backend) -> Row:
    operands = jax.jit(lambda key, i: case.poisoned(case.operands(key), i))(jax.random.key(0), NUMBER)
    run = jax.jit(lambda operands, i: case.counted(operands, case.call(operands, i, backend)))
    first = jax.block_until_ready(run(operands, NUMBER))
    second = jax.block_until_ready(run(operands, NUMBER))
    wanted = jax.jit(lambda operands, i: expected(case, operands, i))(operands, NUMBER)
    figures: dict[str, float] = {}
    faults: list[str] = []
    for name, tolerance in case.tolerance.items():
        found = {key: float(value) for key, value in _measured(first[name], wanted[name], tolerance).items()}
        figures |= {f"{name}.{key}": value for key, value in found.items()}
        faults += _faults(name, found, tolerance)
    changed = int(_differing(first, second))
    if changed and not faults:
        faults.append(f"two runs differ in {changed} values")
    return Row(case.name, not faults, "; ".join(faults), figures)


def _faults(name: str, found: Mapping[str, float], tolerance: Tolerance) -> list[str]:
    if not math.isfinite(found["diff"] + found["largest"]):
        return [f"{name} has values that are not finite where the reference has others"]
    if found["largest"] > 1:
        allowed = f"{tolerance.relative:.1e} of itself and {tolerance.absolute:.1e} of the root mean square"
        return [f"{name} is off by {found['largest']:.3g} times what a value may be: {allowed} ({tolerance.reason})"]
    if found["diff"] > tolerance.diff:
        return [f"{name} has calc_diff {found['diff']:.2e}, allowed {tolerance.diff:.0e} ({tolerance.reason})"]
    return []


def _measured(got: jax.Array, wanted: jax.Array, tolerance: Tolerance) -> dict[str, jax.Array]:
    if got.shape != wanted.shape:
        raise ValueError(f"the result has shape {got.shape}, and that of the reference {wanted.shape}")
    return _differences(got, wanted, tolerance.relative, tolerance.absolute)


@jax.jit
def _differences(got: jax.Array, wanted: jax.Array, relative: float, absolute: float) -> dict[str, jax.Array]:
    """Returns calc_diff, and the largest difference relative to the tolerance. Infinities may be equal."""
    x, y = got.astype(jnp.float32), wanted.astype(jnp.float32)
    error = jnp.where(x == y, 0, jnp.abs(x - y))
    x, y = (jnp.where(jnp.isinf(v), 0, v) for v in (x, y))
    norm = jnp.sum(x * x) + jnp.sum(y * y)
    allowed = relative * jnp.abs(y) + absolute * jnp.sqrt(jnp.sum(y * y) / max(y.size, 1))
    share = jnp.where(error == 0, 0, error / allowed)
    return {
        "diff": jnp.where(norm == 0, 0, jnp.sum(error * error) / jnp.where(norm == 0, 1, norm)),
        "largest": jnp.max(share, initial=0),
    }


@jax.jit
def _differing(first: Any, second: Any) -> jax.Array:
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return sum((jnp.sum(a != b) for a, b in pairs), jnp.int32(0))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
