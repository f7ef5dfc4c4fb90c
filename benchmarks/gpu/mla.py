"""MLA attention on a GPU, in one run: correctness, FlashMLA's table, prefill, cache write, and the tunables.

    python -m benchmarks.gpu.mla --out DIR                       on a Hopper GPU; under nine minutes
    JAX_PLATFORMS=cpu python -m benchmarks.gpu.mla --compile     without one: registers and spills

Writes DIR/mla.md (the tables) and DIR/mla.json, anew after each child process (`children.py`). What is compared, and
how far it may be off, is a case of `pallas_kernels.checks`; what is wrong is not timed. A time is the median of many
runs with the L2 cache flushed before each; times are CUPTI's, summed over the operation's kernels. Accounting is
FlashMLA's: flop = b * h * s_q * 2 * length * (576 + 512), bytes = queries + cached rows + output. Every rate stands
next to what the same run measured for a copy, for a bfloat16 product of 8192^3, and for the best plain XLA formulation.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax

from benchmarks.gpu import children
from benchmarks.gpu import mla_cases as more
from benchmarks.gpu.children import Key
from benchmarks.gpu.device_time import Flushed, median_ms
from benchmarks.record import Report, run
from pallas_kernels import checks
from pallas_kernels.backend import Backend
from pallas_kernels.checks import Case, Row, Tolerance
from pallas_kernels.checks.attention import ATTENDED, SCALE, Decode, edge_decodes, first_decodes, named
from pallas_kernels.checks.prefill import CONTEXTS, PREFILLS, Prefill
from pallas_kernels.mla import mosaic_ops
from tools.doctor.rates import SHARE, Roofs, roof_seconds

_WRITE = {"out": Tolerance(1e-5, 2**-7, 2**-7, "a bfloat16 that is rounded twice")}
_FEW = 5  # runs of what takes long
type Measure = Callable[[Roofs], Row]


def main(report: Report) -> int:
    title = (__doc__ or "").split("\n")[0]
    rows = entries()
    return children.main(report, "benchmarks.gpu.mla", title, list(rows), lambda key, roofs: rows[key](roofs), programs)


def entries(backend: Backend = Backend.MOSAIC) -> dict[Key, Measure]:
    """Returns what measures each row, what matters most first."""
    prefills = [Prefill.even(*shape) for shape in PREFILLS]
    contexts = [Prefill.even(*shape) for shape in CONTEXTS]
    tables: dict[str, list[tuple[str, Measure]]] = {
        "edge cases": [(case.name(), _checked(case.case(), backend)) for case in edge_decodes()],
        "decode": [(case.name(), functools.partial(decode, case, backend)) for case in first_decodes()],
        "prefill": [(case.name(), functools.partial(prefill, case, backend)) for case in prefills],
        "norm, rotate and write the cache": [
            (f"{case.tokens} tokens", functools.partial(write, case, backend)) for case in more.WRITES
        ],
        "splits of decode": [
            (case.name(), functools.partial(tune_decode, case, backend)) for case in more.tuned_decodes()
        ],
        "tiles of prefill": [(case.name(), functools.partial(tune_prefill, case, backend)) for case in prefills[1:3]],
        "new tokens to cached ones": [(case.name(), functools.partial(context, case, backend)) for case in contexts],
        "more of decode": [(case.name(), functools.partial(decode, case, backend)) for case in more.other_decodes()],
    }
    return {(table, name): measure for table, rows in tables.items() for name, measure in rows}


def _checked(case: Case, backend: Backend) -> Measure:
    def measure(roofs: Roofs) -> Row:
        del roofs
        return checks.check(case, backend)

    return measure


def decode(shape: Decode, backend: Backend, roofs: Roofs) -> Row:
    """Measures decode attention under a schedule that is made once a step."""
    case = shape.case()

    def timed() -> dict[str, float]:
        arrays = shape.arrays(jax.random.key(0))
        schedule = jax.jit(shape.schedule)(arrays[3])
        call = shape.call(backend)
        ms = median_ms(lambda *five: call(*five[:4], schedule=five[4]), *arrays, schedule)
        return _rates(case, ms, roofs) | {
            "schedule us (once a step)": 1e3 * median_ms(shape.schedule, arrays[3]),
            "plain XLA us": 1e3 * min(median_ms(f, *arrays, runs=_FEW) for f in more.plain_formulations(shape)),
        }

    return _if_right(case, backend, timed)


def prefill(shape: Prefill, backend: Backend, roofs: Roofs) -> Row:
    """Measures attention of new tokens among themselves."""
    case = shape.case()

    def timed() -> dict[str, float]:
        arrays = shape.arrays(jax.random.key(0))
        plain = min(median_ms(f, *arrays, runs=_FEW) for f in more.plain_prefills(shape))
        return _rates(case, median_ms(shape.call(backend), *arrays), roofs) | {"plain XLA us": 1e3 * plain}

    return _if_right(case, backend, timed)


def context(shape: Prefill, backend: Backend, roofs: Roofs) -> Row:
    """Measures the absorbed form, next to the expanded one: new tokens' own pairs are in the latter alone."""
    case, other = shape.context_case(), more.Expanded(shape)

    def timed() -> dict[str, float]:
        arrays = shape.context_arrays(jax.random.key(0))
        figures = _rates(case, median_ms(shape.call_context(backend), *arrays, runs=_FEW), roofs)
        arrays, groups = other.arrays(), shape.heads // other.heads_at_once
        ms = median_ms(other.call(backend), *arrays, runs=_FEW)
        return figures | {"expanded us": 1e3 * groups * ms, "groups of heads": groups}

    expanded = Case(
        f"{case.name}, expanded", lambda key: other.arrays(), lambda o, i, of: other.call(of)(*o), ATTENDED,
        counted=lambda operands, result: result,
    )  # fmt: skip
    row = checks.check(expanded, backend)
    return _if_right(case, backend, timed) if row.passed else row


def write(shape: more.Write, backend: Backend, roofs: Roofs) -> Row:
    """Measures the forms of a write. XLA's is the reference."""
    del roofs
    figures: dict[str, float] = {}
    arrays, calls = shape.arrays(), shape.calls(backend)
    for name, call in calls.items():
        case = Case(
            name, lambda key: arrays, lambda o, i, of, call=call: call(*o), _WRITE, exact=lambda operands: operands,
            reference=lambda operands, i: calls["XLA"](*operands),
        )  # fmt: skip
        row = checks.check(case, backend)
        if not row.passed:
            return dataclasses.replace(row, says=f"{name}: {row.says}", figures=figures)
        figures[f"{name}, us"] = 1e3 * median_ms(call, *arrays, donate=True)
    return Row("", True, "", figures)


def tune_decode(shape: Decode, backend: Backend, roofs: Roofs) -> Row:
    """Measures splits of the work over blocks. The number of parts is compiled in, the overhead of a request not."""
    del roofs
    call, figures = shape.call(backend), {}
    timer = Flushed(lambda *five: call(*five[:4], schedule=five[4]))
    arrays = shape.arrays(jax.random.key(0))
    for waves, overhead in more.SPLITS:
        cut = functools.partial(shape.schedule, waves=waves, request_overhead=overhead)

        def attend(operands: tuple, i: Any, of: Backend, cut: Callable = cut) -> dict[str, jax.Array]:
            how = {} if of is Backend.REFERENCE else {"schedule": cut(operands[3])}
            return named(shape.call(of)(*operands, **how))

        row = checks.check(dataclasses.replace(shape.case(), call=attend), backend)
        if not row.passed:
            return dataclasses.replace(row, says=f"{waves} waves, overhead {overhead}: {row.says}", figures=figures)
        ms = timer.median_ms(*arrays, jax.jit(cut)(arrays[3]))
        figures[f"{waves} waves, overhead {overhead}, us"] = 1e3 * ms
    return Row("", True, "", figures)


def tune_prefill(shape: Prefill, backend: Backend, roofs: Roofs) -> Row:
    """Measures tiles of keys."""
    del roofs
    figures, arrays = {}, shape.arrays(jax.random.key(0))
    for tile in more.PREFILL_TILES:
        call = _tiled(tile)

        def attend(operands: tuple, i: Any, of: Backend, call: Callable = call) -> dict[str, jax.Array]:
            return named((call if of is Backend.MOSAIC else shape.call(of))(*operands))

        row = checks.check(dataclasses.replace(shape.case(), call=attend), backend)
        name = f"{tile[0]} keys, {tile[1]} stages"
        if not row.passed:
            return dataclasses.replace(row, says=f"{name}: {row.says}", figures=figures)
        figures[f"{name}, us"] = 1e3 * median_ms(call if backend is Backend.MOSAIC else shape.call(backend), *arrays)
    return Row("", True, "", figures)


def _tiled(tile: tuple[int, int]) -> Callable:
    return functools.partial(mosaic_ops.prefill_mosaic, scale=SCALE, key_block=tile[0], stages=tile[1])


def _if_right(case: Case, backend: Backend, timed: Callable[[], dict[str, float]]) -> Row:
    row = checks.check(case, backend)
    return dataclasses.replace(row, figures=timed() | dict(row.figures)) if row.passed else row


def _rates(case: Case, ms: float, roofs: Roofs) -> dict[str, float]:
    roof = roof_seconds(roofs, case.flops, case.bytes, bfloat16=True)
    rates = {"TFLOP/s": case.flops / ms / 1e9, "GB/s": case.bytes / ms / 1e6}
    return {"us": ms * 1e3, SHARE: roof / ms * 1e3, **rates}


def programs() -> Iterator[tuple[str, Callable[..., Any], tuple]]:
    """Yields a program for each kernel and setting a run needs."""
    narrow = [case for case in edge_decodes() if case.latent != more.LATENT]
    decodes = [*first_decodes(), *more.other_decodes(), *narrow]
    for case in {(c.heads, c.queries, c.fp8, c.latent): c for c in decodes}.values():
        for waves, overhead in more.SPLITS[:: len(more.SPLITS) // 2]:
            cut = functools.partial(case.schedule, waves=waves, request_overhead=overhead)
            schedule = jax.eval_shape(cut, case.shapes()[3])
            call = case.call(Backend.MOSAIC)
            yield (
                f"decode {case.name()}, {waves} waves",
                lambda *five, call=call: call(*five[:4], schedule=five[4]),
                (*case.shapes(), schedule),
            )
    for tile in more.PREFILL_TILES:
        prompts = Prefill.even(*PREFILLS[1])
        yield f"prefill {prompts.name()}, {tile}", _tiled(tile), prompts.shapes()
    cached = Prefill.even(*CONTEXTS[0])
    yield f"context {cached.name()}", cached.call_context(Backend.MOSAIC), cached.context_shapes()
    expanded = more.Expanded(cached)
    yield f"expanded {cached.name()}", expanded.call(Backend.MOSAIC), expanded.shapes()
    for name, call in more.WRITES[0].calls(Backend.MOSAIC).items():
        yield f"write, {name}", call, more.WRITES[0].shapes()


if __name__ == "__main__":
    run(main)
