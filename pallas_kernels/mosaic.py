"""Common code of the Mosaic GPU kernels: shared-memory layouts, the interpreter, differences between JAX releases."""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.evaluation import evaluate
from pallas_kernels.toolchain import prefer_own_ptxas


@functools.cache
def load_mosaic() -> Any:
    """Returns jax's module, whose import gives jaxlib the library that compiled kernels are linked with.

    An executable with kernels can be loaded from a file only after it.
    """
    prefer_own_ptxas()
    return importlib.import_module("jax.experimental.pallas.mosaic_gpu")


if TYPE_CHECKING:
    from jax.experimental.pallas import mosaic_gpu as plgpu
else:

    class _MosaicGpu:
        def __getattr__(self, name):
            return getattr(load_mosaic(), name)

    plgpu = _MosaicGpu()


NUM_SMS = 132
"""Multiprocessors of an H100, H200 or H800 in SXM form, the default of plans."""

SMEM_BYTES = 232_448
"""Shared memory one thread block may use on sm_90: 227 KiB, barriers included."""


TILE_ROWS = 8
"""Rows of a swizzled tile: TMA moves whole tiles of an array in memory, or less than one."""


def pad_to_tiles(x: jax.Array) -> jax.Array:
    """Adds rows of zeros to `x` `[G, M, C]` where TMA could not address it: M above 8 and not a multiple of 8."""
    rows = x.shape[1]
    extra = -rows % TILE_ROWS if rows > TILE_ROWS else 0
    return jnp.pad(x, ((0, 0), (0, extra), (0, 0))) if extra else x


_SWIZZLES = (128, 64, 32)


def swizzle_transforms(dtype: jax.typing.DTypeLike, minor: int) -> "tuple[plgpu.Transform, ...]":
    """Returns the tiling and swizzle that TMA and wgmma agree on for a shared-memory array.

    Args:
      dtype: element type.
      minor: length of the array's last axis in elements. 128 bytes of it make a swizzled row, or all of it when
        it is shorter (64 or 32 bytes).
    """
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = min(128, minor * itemsize)
    while minor * itemsize % swizzle:
        swizzle //= 2
    if swizzle < 32:
        raise ValueError(f"no swizzle fits {minor} elements of {jnp.dtype(dtype).name}; rows must be 32 bytes or more")
    tiling = plgpu.TilingTransform((TILE_ROWS, swizzle // itemsize))  # type: ignore[abstract]
    return tiling, plgpu.SwizzleTransform(swizzle)  # type: ignore[abstract]


def whole_tile(columns: int, n: int, dtype: jnp.dtype) -> int:
    """Returns the widest swizzled tile that divides both `columns` and `n`.

    TMA accepts only such a tile, or one that holds all `n`. Where there is none, the widest: the interpreter accepts
    it.
    """
    tiles = [tile for swizzle in _SWIZZLES if columns % (tile := swizzle // dtype.itemsize) == 0]
    return next((tile for tile in tiles if n <= tile or n % tile == 0), tiles[0])


def row_layout() -> Any:
    """Returns the layout of one value per row of a wgmma result."""
    return plgpu.Layout.WGMMA.reduce(1)


def inline_mgpu(emit: Callable, arg_types: tuple, result: Any, model: Callable) -> Callable:
    """Returns a function of arrays in a kernel whose code `emit` makes, where Pallas has no operation.

    Args:
      emit: takes the launch context and the arrays' fragments, and returns the result's.
      arg_types: the layouts of arguments.
      result: shape, dtype and layout of the result.
      model: what the function computes, in jax, for the interpreter.
    """

    def emitted(*args: Any) -> Any:
        return emit(*args)

    emitted.model = model  # type: ignore[attr-defined]
    return plgpu.inline_mgpu(arg_types=arg_types, return_type=result)(emitted)


def interpret_params(*, detect_races: bool = True, **options) -> "plgpu.InterpretGPUParams":
    """Returns the settings for running Mosaic GPU kernels in the CPU interpreter; a data race raises.

    Use with `plgpu.force_gpu_interpret_mode(interpret_params())` around a public operation, or as a kernel's
    `interpret` argument. After an exception inside a kernel call `reset_interpreter` before the next one.
    """
    fields = {field.name for field in dataclasses.fields(plgpu.InterpretGPUParams)}
    if "on_race" in fields:
        options = {"on_race": "raise", **options}
    elif detect_races:
        _raise_on_races()
    _take_left_operands_in_registers()
    _call_models()
    _evaluate_threads()
    return plgpu.InterpretGPUParams(detect_races=detect_races, **options)


def reset_interpreter() -> None:
    """Resets the interpreter's shared state after an exception inside a kernel."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call  # no public name on jax 0.11.2 and 0.12

    interpret_pallas_call.reset_gpu_interpret_mode_state()


@functools.cache
def _take_left_operands_in_registers() -> None:
    """Lets the interpreter multiply a left operand in registers; jax 0.12 mistakes it for the key of a buffer."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as callbacks  # looked up there at each product

    of_buffers = callbacks.wgmma

    def content(which: str, call: dict):
        """Returns a buffer's key, the part that is used, and its content."""
        memory = callbacks._get_shared_memory()
        key = callbacks.HostAllocationKey.from_array(call[f"{which}_allocation_key_as_array"])
        transforms = jax.tree.map(int, callbacks._remove_noop_transforms(call[f"{which}_transforms"]))
        part = memory.access(key, transforms)
        info = callbacks.memory.GPULoggingInfo(call["mesh_location"], call["thread"], call["source_info"])
        values, _, _ = memory.get_buffer_content(key, part, call["thread"], logging_info=info)
        return (key, part), values, info

    @callbacks.fail_on_exception
    def wgmma(**call):
        left = call["a_allocation_key_as_array"]
        if left.ndim != 2:
            return of_buffers(**call)
        _, right, _ = content("b", call)
        place, sums, info = content("acc", call)
        sums = sums + np.matmul(np.asarray(left), right, dtype=sums.dtype)
        callbacks._get_shared_memory().store_buffer_content(*place, sums, call["thread"], logging_info=info)
        return call["token"]

    callbacks.wgmma = wgmma


@functools.cache
def _call_models() -> None:
    """Lets the interpreter call the model of a function of `inline_mgpu`; it knows none but those of one library."""
    from jax._src.pallas.mosaic_gpu.interpret import jaxpr_interpret  # its method is looked up there at each call

    interpreter = jaxpr_interpret.JaxprInterpreter
    of_library = interpreter._interpret_inline_mgpu_p

    def interpret(self: Any, eqn: Any, token: Any, get_invals: Callable) -> tuple[Any, list[jax.Array]]:
        model = getattr(eqn.params["mgpu_fn"], "model", None)
        return of_library(self, eqn, token, get_invals) if model is None else (token, [model(*get_invals())])

    interpreter._interpret_inline_mgpu_p = interpret  # type: ignore[method-assign]


@functools.cache
def _evaluate_threads() -> None:
    """Lets the interpreter evaluate a kernel's threads instead of compiling them, which takes many times longer."""
    from jax._src.pallas.mosaic.interpret import thread_map  # the function is looked up there for each thread
    from jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks import fail

    def run(jaxpr, consts, *arguments) -> None:
        try:
            evaluate(jaxpr, consts, *arguments)
        except Exception as error:
            fail(error, thread_map.NESTED_TOKEN_VALUE)  # the others would wait for this thread
            raise

    thread_map._run_jaxpr = run


@functools.cache
def _raise_on_races() -> None:
    """Makes jax 0.11's interpreter raise on a race; it only prints there (`on_race` came with 0.12)."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks  # the class is looked up there at each kernel start

    class RaisingRaceDetection(gpu_callbacks.GPURaceDetectionState):
        def check_read(self, *args, **kwargs):
            super().check_read(*args, **kwargs)
            self._raise_if_found()

        def check_write(self, *args, **kwargs):
            super().check_write(*args, **kwargs)
            self._raise_if_found()

        def _raise_if_found(self):
            if self.races_found:
                raise RuntimeError("data race in a Mosaic GPU kernel; the accesses are printed above")

    gpu_callbacks.GPURaceDetectionState = RaisingRaceDetection  # type: ignore[misc]
