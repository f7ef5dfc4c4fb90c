"""Starts Triton kernels from jax, by way of jax-triton. Everything else in the project starts them through `start`.

The PTX is made when a program is lowered and lies in it, so a machine that only runs compiled programs needs no Triton.
jax-triton 0.4.1 registers a rule with jax for results that nobody uses, in the form of jax 0.11; under jax 0.12 it
fails. It is taken out here, since jax's own rule is right for these kernels.
"""

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import jax

from pallas_kernels.backend import BackendUnavailableError, traced_gpu
from pallas_kernels.toolchain import prefer_own_ptxas

OPTIONS = {"ptx_version": 87, "enable_fp_fusion": True}
"""PTX in the form of CUDA 12.8, the first that knows sm_120, so that ptxas from there on reads it; and fused
multiply-adds, which Triton 3.10 leaves out unless asked."""


def start(
    kernel: str,
    arrays: Sequence[jax.Array | jax.Ref],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    grid: tuple[int, ...],
    warps: int = 4,
    stages: int = 2,
    **arguments: Any,
) -> tuple[jax.Array, ...]:
    """Runs a kernel for the GPU that `traced_gpu` names.

    Args:
      kernel: module and function in `pallas_kernels.triton.kernels`: "product.product".
      arrays: what the kernel reads, in the order of its first parameters; it writes to those that are references.
      outputs: shapes and dtypes of what it writes, its last parameters without a default.
      grid: number of programs, along up to three axes.
      warps: of a program.
      stages: buffers of its pipelined loop.
      arguments: its constants and other numbers, by name.

    Returns:
      An array for each of `outputs`. What the kernel does not write is undefined.

    Raises:
      BackendUnavailableError: jax-triton is not installed.
      UnknownGpuError: nothing says for which GPU.
    """
    return _jax_triton().triton_call(
        *arrays,
        kernel=kernel_function(kernel),
        out_type=tuple(outputs),
        grid=grid,
        name=kernel.split(".")[1],
        num_warps=warps,
        num_stages=stages,
        compute_capability=traced_gpu().number,
        backend_options=OPTIONS,
        **arguments,
    )


def update(kernel: str, target: jax.Array, arrays: Sequence[jax.Array], **options: Any) -> jax.Array:
    """Returns `target` as the kernel leaves it, which has it as its first parameter: in place where it is donated.

    `options` are those of `start`.
    """
    written = jax.new_ref(target)
    start(kernel, (written, *arrays), (), **options)
    return jax.freeze(written)


def kernel_function(kernel: str) -> Any:
    """Returns the Triton function that `start` calls by this name."""
    module, name = kernel.split(".")
    return getattr(importlib.import_module(f"pallas_kernels.triton.kernels.{module}"), name)


def require() -> None:
    """Raises BackendUnavailableError where `start` would, for want of jax-triton."""
    _jax_triton()


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
