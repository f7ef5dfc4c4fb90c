"""Runs kernels in the Mosaic interpreter: data races raise, and unwritten values are NaN."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from tests.pallas_kernels.numerics import normal

NUM_BLOCKS = 2
"""Blocks of a grid in these tests: each computes several tiles; more would take longer."""


def interpret(fn, *args):
    """`jit(fn)(*args)` with every Mosaic kernel interpreted."""
    with plgpu.force_gpu_interpret_mode(mosaic.interpret_params()):
        try:
            return jax.block_until_ready(jax.jit(fn)(*args))
        except Exception:
            mosaic.reset_interpreter()
            raise


def bfloat16(key, *shape):
    """Normal bfloat16 values and the same in float64."""
    x = normal(key, *shape).astype(jnp.bfloat16)
    return jnp.asarray(x), x.astype(np.float64)


def untouched(x) -> bool:
    """True when nothing of x was written: the interpreter begins with NaN."""
    return bool(np.isnan(np.asarray(x, np.float32)).all())
