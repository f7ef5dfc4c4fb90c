"""Starts Triton kernels from jax through jax-triton. All of the project starts them through `start`.

Lowering a program compiles the PTX into it, so a machine that only runs compiled programs needs no Triton. jax-triton
0.4.1 registers a dead-code rule of jax 0.11, which fails under jax 0.12. It is removed here; jax's default rule is
correct for these kernels.
"""

import ast
import functools
import importlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import bodies
from pallas_kernels.backend import Backend, BackendUnavailableError, traced_gpu
from pallas_kernels.toolchain import prefer_own_ptxas

OPTIONS = {"ptx_version": 87, "enable_fp_fusion": True}
"""PTX of CUDA 12.8, the first with sm_120, for ptxas from that version on; and fused multiply-adds, off by default in
Triton 3.10."""


def start(
    kernel: str,
    arrays: Sequence[jax.Array | jax.Ref],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    grid: tuple[int, ...],
    backend: Backend = Backend.TRITON,
    warps: int = 4,
    stages: int = 2,
    **arguments: Any,
) -> tuple[jax.Array, ...]:
    """Runs a kernel for the GPU that `traced_gpu` names, inside `bodies.left_out` one that does nothing.

    Args:
      kernel: module and function in `pallas_kernels.triton.kernels`: "product.product".
      arrays: the kernel's first parameters; it may write to those that are references.
      outputs: shapes and dtypes of its outputs, the last parameters without a default.
      grid: number of programs, along up to three axes.
      backend: that of the program, MOSAIC on Hopper.
      warps: of a program.
      stages: buffers of its pipelined loop.
      arguments: its constants and other numbers, by name.

    Returns:
      An array for each of `outputs`, undefined where the kernel does not write.

    Raises:
      BackendUnavailableError: jax-triton is not installed.
      UnknownGpuError: the GPU is unknown.
    """
    library, function = _jax_triton(), kernel_function(kernel)
    return library.triton_call(
        *arrays,
        kernel=_without_body(function) if bodies.are_left_out() else function,
        out_type=tuple(outputs),
        grid=grid,
        name=kernel.split(".")[1],
        num_warps=warps,
        num_stages=stages,
        compute_capability=traced_gpu(backend).number,
        backend_options=OPTIONS,
        **arguments,
    )


def update(
    kernel: str, targets: Sequence[jax.Array], arrays: Sequence[jax.Array], **options: Any
) -> tuple[jax.Array, ...]:
    """Runs a kernel on `targets`, its first parameters, and returns what it makes of them: in place if donated.

    `options` are those of `start`.
    """
    written = [jax.new_ref(target) for target in targets]
    start(kernel, (*written, *arrays), (), **options)
    return tuple(map(jax.freeze, written))


def scalar(number: jax.Array | int) -> jax.Array:
    """Returns a number as kernels take it, int32 `[1]`: it may be traced."""
    return jnp.asarray(number, jnp.int32).reshape(1)


def kernel_function(kernel: str) -> Any:
    """Returns the Triton function that `start` calls by this name."""
    module, name = kernel.split(".")
    return getattr(importlib.import_module(f"pallas_kernels.triton.kernels.{module}"), name)


@functools.cache
def _without_body(function: Any) -> Any:
    """Returns a Triton function of this name and these parameters that does nothing."""
    [definition] = ast.parse(function.src).body
    assert isinstance(definition, ast.FunctionDef)
    definition.body = [ast.Pass()]
    empty = type(function)(function.fn)
    empty._unsafe_update_src(ast.unparse(definition))
    return empty


@functools.cache
def _jax_triton() -> Any:
    try:
        import jax_triton
        from jax_triton import triton_lib
    except ModuleNotFoundError as error:
        raise BackendUnavailableError(
            f"Backend.TRITON needs jax-triton, and {error.name} is missing: install the 'triton' extra, or use "
            "Backend.REFERENCE"
        ) from error
    prefer_own_ptxas()
    triton_lib.pe.dce_rules.pop(triton_lib.triton_kernel_call_p, None)
    return jax_triton
