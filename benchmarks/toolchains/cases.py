"""What a toolchain must be able to do, one part per process: kernels, steps, executables. Needs no GPU.

    JAX_PLATFORMS=cpu python -m benchmarks.toolchains.cases PART

Prints one JSON object per line: {"case", "passed", "says", "figures"}. A spill is a figure; only an error is a failure.
Exits with 0 if all passed, 1 if some failed, 2 if nothing can be compiled here.
"""

import ctypes
import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import serialize_executable

from benchmarks.gpu import mla, triton_kernels
from benchmarks.record import parser_of
from configs.bundled import MODEL
from configs.deepseek_v2 import DEEPSEEK_V2_LITE
from configs.deepseek_v3 import DEEPSEEK_V3, DEEPSEEK_V32
from configs.deployments import DEVICES
from configs.glm import GLM_4_7_FLASH
from configs.kimi import KIMI_K2_THINKING
from dsv3.config.model import FP8, ModelConfig
from dsv3.kv_cache.layout import pool
from dsv3.model import AttentionForm, DecodeBatch, PrefillBatch, decode, prefill
from pallas_kernels import aot, checks, gpus, toolchain
from pallas_kernels.backend import Backend, resolve_backend
from pallas_kernels.checks import Row
from pallas_kernels.mla import mla_decode, write_pages
from tools.plan.deployment import Deployment
from tools.plan.programs import abstract_params
from tools.sass.kernels import program_of

MODELS = {
    "bundled": MODEL,
    "DeepSeek-V2-Lite": DEEPSEEK_V2_LITE,
    "GLM-4.7-Flash": GLM_4_7_FLASH,
    "DeepSeek-V3": DEEPSEEK_V3,
    "DeepSeek-V3.2": DEEPSEEK_V32,
    "Kimi-K2-Thinking": KIMI_K2_THINKING,
}
"""One of each family whose steps hold other kernels: V3.2 has sparse attention and FP8 pages, Kimi INT4 experts."""
TRITON_GPUS = {"A100": 80, "L40S": 89, "B200": 100}
_SYMBOLS = "MOSAIC_GPU_RUNTIME_LIB_PATH"
array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
type Cases = Iterator[tuple[str, Callable[[], Iterator[Row]]]]


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("part", choices=PARTS)
    part = parser.parse_args(arguments).part
    toolchain.prefer_own_ptxas()
    passed = True
    for name, rows in PARTS[part]():
        try:
            for row in rows():
                passed &= _print(row)
        except aot.AotUnavailableError as error:
            print(error, file=sys.stderr)
            return 2
        except Exception as error:  # the next case is tried
            text = " ".join(f"{type(error).__name__}: {error}".split())
            passed &= _print(Row(name, False, text if len(text) <= 600 else f"{text[:300]} ... {text[-300:]}"))
    return 0 if passed else 1


def _print(row: Row) -> bool:
    print(json.dumps(row.as_json()), flush=True)
    return row.passed


def mosaic_kernels() -> Cases:
    """Yields attention with each of its plans, and programs of each operation, for an H200."""
    programs = [(": ".join(key), *program_of(case)) for key, case in mla.compiled().items()]
    for operation in checks.names(Backend.MOSAIC):
        found = list(triton_kernels.programs(operation, Backend.MOSAIC))
        programs += [(f"{operation}, {name}", *program) for name, *program in found[:1] + found[1:][-2:]]
    for name, fn, arguments in programs:
        yield name, functools.partial(_resources, name, fn, arguments)


def _resources(name: str, fn: Callable[..., Any], arguments: tuple[Any, ...]) -> Iterator[Row]:
    for kernel in aot.kernel_resources(fn, *arguments):
        yield _row(f"{name}: {kernel.name}", kernel)


def _row(case: str, kernel: aot.KernelResources) -> Row:
    return Row(case, True, figures={"registers": kernel.registers, "spilled": kernel.spill_bytes})


def triton_kernels_of(name: str) -> Cases:
    """Yields kernels of each operation, compiled by Triton and assembled by the toolchain's ptxas."""
    for operation in checks.names(Backend.TRITON):
        yield f"{operation}, {name}", functools.partial(_assembled, operation, name)


def _assembled(operation: str, name: str) -> Iterator[Row]:
    for kernel in triton_kernels.kernels(operation, gpus.by_number(TRITON_GPUS[name]), few=True):
        (architecture,) = re.findall(r"^\.target (\w+)", kernel.ptx, flags=re.MULTILINE)
        report = _ptxas("-v", "-arch", architecture, "/dev/stdin", "-o", "/dev/null", given=kernel.ptx)
        (resources,) = aot.parse_reports(report)
        yield _row(f"{operation}, {name}: {kernel.name}", resources)


def _ptxas(*arguments: str, given: str = "") -> str:
    """Returns what the ptxas that kernels are assembled by says."""
    done = subprocess.run(["ptxas", *arguments], input=given, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(f"ptxas ended with {done.returncode}: {done.stdout + done.stderr}")
    return done.stdout + done.stderr


def steps(name: str) -> Cases:
    """Yields a decode step of each family, compiled whole for a GPU, kernels included, and a prefill step of one."""
    for family in MODELS:
        yield f"{family}, decode, {name}", functools.partial(_step, family, "decode", name)
    family = "DeepSeek-V2-Lite"
    yield f"{family}, prefill, {name}", functools.partial(_step, family, "prefill", name)


def _step(family: str, phase: str, name: str) -> Iterator[Row]:
    compiled = compiled_step(MODELS[family], phase, aot.TARGETS[name])
    text = compiled.as_text()
    calls = len(re.findall(r'custom_call_target="(?:mosaic_gpu|triton_kernel_call)\w*"', text))
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    yield Row(f"{family}, {phase}, {name}", calls > 0, "" if calls else "it holds no kernel", {
        "kernels": calls, "temporaries": temporaries,
    })  # fmt: skip


def compiled_step(model: ModelConfig, phase: str, target: aot.GpuTarget) -> jax.stages.Compiled:
    """Compiles a step of one GPU: 1,024 tokens of prompts, or 64 requests, from pages of the type that pays."""
    cfg = dataclasses.replace(model, num_nextn_predict_layers=0)
    alone = Deployment("alone", DEVICES["H200"], 1, gpus_per_node=1, decode_requests=64, expert_parallel=False)
    choice = {"form": AttentionForm.TOPK if cfg.index_layers else AttentionForm.ABSORBED}
    if phase == "prefill":
        batch: Any = PrefillBatch(ints((1024,)), ints((1024,)), ints((9,)), ints((8,)), ints((8, 64)), **choice)
    else:
        batch = DecodeBatch(ints((64, 1)), ints((64,)), ints((64, 64)), **choice)
    run = {"prefill": prefill, "decode": decode}[phase]

    def step(backend, params, batch, pages):
        out = run(params, cfg, batch, pages, backend=backend)
        return out.hidden, out.pages

    pages = pool(cfg, FP8 if cfg.index_layers else "bfloat16", 4096)
    return _compiled(step, abstract_params(cfg, alone), batch, pages, target=target, donated=2)


def _compiled(fn: Callable[..., Any], *arguments: Any, target: aot.GpuTarget, donated: int) -> jax.stages.Compiled:
    """Compiles `fn(backend, *arguments)` with the kernels of a GPU's own backend."""
    mesh = aot.gpu_mesh({"device": 1}, target=target)
    device = mesh.devices.flat[0]
    with gpus.compiling_for(gpus.target(device)):
        fn = functools.partial(fn, resolve_backend(device))
        return aot.compile_for(fn, *arguments, mesh=mesh, donate_argnums=(donated,))


def executables() -> Cases:
    """Yields what a compiled program with kernels is as a file, and what that is linked with when it is loaded."""
    for gpu, kernels in (("H200", ("mla_decode", "mla_combine", "mla_write")), ("A100", ("combine", "write"))):
        case = f"a program with kernels for {gpu} as bytes"
        yield case, functools.partial(_serialised, case, gpu, kernels)
    yield "symbols of the host's part of Mosaic kernels", _linked


def decode_step(backend: Backend, q, pages, rows, ids, offsets, table, lengths):
    """Writes new rows to pages, and attends to them."""
    place = {"pages_per_layer": 64, "backend": backend}
    pages = write_pages(pages, rows, ids, offsets, layer=0, **place)
    return mla_decode(q, pages, table, lengths, scale=0.1, **place), pages


_MOSAIC_STEP = functools.partial(decode_step, Backend.MOSAIC)
_SHAPES = *map(array, ((8, 1, 16, 576), (128, 64, 576), (8, 576))), *map(ints, ((8,), (8,), (8, 32), (8,)))


def _serialised(case: str, gpu: str, kernels: tuple[str, ...]) -> Iterator[Row]:
    """Yields the size of an executable; it must hold the kernels, and no word of another ptxas (12 leaves none)."""
    compiled = _compiled(decode_step, *_SHAPES, target=aot.TARGETS[gpu], donated=1)
    executable = serialize_executable.serialize(compiled)[0]
    assembled = {found.decode() for found in re.findall(rb"tools, release (\d+\.\d+)", executable)}
    own = re.findall(r"release (\d+\.\d+)", _ptxas("--version"))[0]
    wrong = [] if assembled <= {own} else [f"assembled by ptxas {sorted(assembled)}, and {own} is first on PATH"]
    if not any(kernel.encode() in executable for kernel in kernels):  # it is compressed: not every name is found
        wrong.append(f"none of {', '.join(kernels)} in it")
    yield Row(case, not wrong, "; ".join(wrong), {"bytes": len(executable)})


def _linked() -> Iterator[Row]:
    """Looks each symbol up in the library that jax names to its plugin, as that does."""
    needed = aot.host_symbols(_MOSAIC_STEP, *_SHAPES)
    library = ctypes.CDLL(os.environ[_SYMBOLS])
    missing = sorted(name for name in needed if not hasattr(library, name))
    wrong = f"{os.environ[_SYMBOLS]} has no {', '.join(missing)}" if missing else "" if needed else "none is needed"
    yield Row("symbols of the host's part of Mosaic kernels", not wrong, wrong, {"symbols": len(needed)})


def toy() -> Cases:
    """Yields one kernel, for a test of the machinery."""
    yield "decode", functools.partial(_resources, "decode", _MOSAIC_STEP, _SHAPES)


PARTS: dict[str, Callable[[], Cases]] = {
    "executables": executables,
    "mosaic": mosaic_kernels,
    **{f"steps-{name}": functools.partial(steps, name) for name in aot.TARGETS},
    **{f"triton-{name}": functools.partial(triton_kernels_of, name) for name in TRITON_GPUS},
    "toy": toy,
}
"""What a process can be asked for, the quickest first."""


if __name__ == "__main__":
    sys.exit(main())
