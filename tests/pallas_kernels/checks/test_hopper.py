"""The oracle of combining split requests, compared with the kernel in the Mosaic interpreter."""

import functools

import jax
import numpy as np

from pallas_kernels.backend import Backend
from pallas_kernels.checks import operations
from pallas_kernels.mla.mosaic_combine import combine_splits
from pallas_kernels.mosaic import interpret_params, reset_interpreter


def test_the_oracle_combines_split_requests_like_the_kernel() -> None:
    for case in operations.combine_splits_cases(Backend.MOSAIC, True):
        operands = jax.jit(case.operands)(jax.random.key(0))
        reset_interpreter()
        combine = jax.jit(functools.partial(combine_splits, interpret=interpret_params()))
        out, lse = jax.block_until_ready(combine(**operands))
        reset_interpreter()
        wanted = jax.jit(operations.joined)(**operands)
        np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(wanted["out"], np.float32), 2**-7, 1e-3)
        np.testing.assert_allclose(lse, wanted["lse"], 1e-3, 1e-3)
        assert (np.asarray(out) != np.asarray(operands["out"])).any(), "some request is split"
