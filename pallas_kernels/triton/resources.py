"""Resources of Triton kernels, on a machine without a GPU: registers, spills, shared memory.

The kernels come from a traced program, and are compiled as jax-triton does. Needs the `triton` extra.
"""

import dataclasses
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax

from pallas_kernels import gpus
from pallas_kernels.gpus import GpuKind

_CALL = "triton_kernel_call"
_POINTERS = {
    "bfloat16": "*bf16",
    "float16": "*fp16",
    "float32": "*fp32",
    "float8_e4m3fn": "*fp8e4nv",
    "int32": "*i32",
    "uint32": "*u32",
    "uint8": "*u8",
    "bool": "*i1",
}
_TOOL_SECONDS = 60


@dataclasses.dataclass(frozen=True)
class TritonResources:
    """Resources of one kernel: registers and bytes of spills per thread, bytes of shared memory per program."""

    name: str
    warps: int
    registers: int
    spilled_bytes: int
    shared_memory: int
    ptx: str = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class TracedKernel:
    """A kernel of a traced program: its Triton function, the types of its parameters, its constants and options."""

    function: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, Any]


def kernel_resources(fn: Callable, *args, gpu: GpuKind) -> tuple[TritonResources, ...]:
    """Compiles every Triton kernel of `fn(*args)` for `gpu`, in the order of the program.

    Args:
      fn: a function that requests `Backend.TRITON`.
      args: arrays or ShapeDtypeStructs.
      gpu: a row of `gpus.KINDS`.
    """
    return tuple(compile_kernel(kernel, gpu) for kernel in traced_kernels(fn, *args, gpu=gpu))


def traced_kernels(fn: Callable, *args, gpu: GpuKind) -> list[TracedKernel]:
    """Returns the Triton kernels of `fn(*args)` as it is traced for `gpu`."""

    def fresh(*args):  # a new function: jax caches traces per function, whatever the GPU
        return fn(*args)

    with gpus.compiling_for(gpu):
        return [_describe(equation) for equation in _equations(jax.make_jaxpr(fresh)(*args).jaxpr)]


def _equations(jaxpr: Any) -> Iterator[Any]:
    """Finds the calls of kernels, in the bodies of loops and branches too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == _CALL:
            yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")):
            if hasattr(inner, "jaxpr") or hasattr(inner, "eqns"):
                yield from _equations(getattr(inner, "jaxpr", inner))


def _describe(equation: Any) -> TracedKernel:
    """Reads a call: arrays have the names of pointers, and other numbers are 32-bit integers."""
    params = equation.params
    constants = dict(params["metaparams"])
    arrays = iter([*(v.aval for v in equation.invars), *params["out_shapes"]])
    names = [name for name in params["fn"].arg_names if name not in constants]
    types = {name: _POINTERS[str(next(arrays).dtype)] if name.endswith("_ptr") else "i32" for name in names}
    return TracedKernel(params["fn"], types, constants, dict(params["backend_options"]))


def compile_kernel(kernel: TracedKernel, gpu: GpuKind) -> TritonResources:
    """Compiles a kernel for `gpu` with Triton and the ptxas that comes with it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    order = kernel.function.arg_names
    signature = {name: kernel.signature.get(name, "constexpr") for name in order}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(order) if signature[name].startswith("*")}
    constants = {(order.index(name),): value for name, value in kernel.constants.items()}
    source = ASTSource(kernel.function, signature, constants, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", gpu.number, 32), options=kernel.options)
    registers, spilled = _registers(compiled.asm["cubin"])
    return TritonResources(
        name=compiled.metadata.name,
        warps=compiled.metadata.num_warps,
        registers=registers,
        spilled_bytes=spilled,
        shared_memory=compiled.metadata.shared,
        ptx=compiled.asm["ptx"],
    )


def _registers(cubin: bytes) -> tuple[int, int]:
    """Returns the registers of a thread, and the bytes of its stack: kernels have no arrays there, so they are spills.

    Raises RuntimeError if the tool that reads machine code fails, or its report is unknown.
    """
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_SECONDS)
    found = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout)
    if done.returncode or found is None:
        raise RuntimeError(f"{command} ended with {done.returncode} and said: {(done.stdout + done.stderr)[:2000]}")
    return int(found[1]), int(found[2])
