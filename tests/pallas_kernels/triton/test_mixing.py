"""The weights of residual streams in Triton's interpreter."""

import functools

import numpy as np
import pytest

from pallas_kernels import gpus
from pallas_kernels.backend import Backend
from pallas_kernels.mixing import mixing_weights
from pallas_kernels.triton.resources import kernel_resources

HOW = {"streams": 4, "iterations": 20, "eps": 1e-6}


def operands(tokens: int, streams: int = 4) -> tuple[np.ndarray, ...]:
    rng, width = np.random.default_rng(tokens), streams * (streams + 2)
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in ((tokens, width), (width,), (3,)))


@pytest.mark.parametrize(("tokens", "streams", "iterations"), [(1, 4, 20), (33, 4, 3), (40, 2, 1)])
@pytest.mark.usefixtures("interpreted")
def test_weights_are_the_references(tokens: int, streams: int, iterations: int) -> None:
    """Also large logits, of which a softmax takes the largest away."""
    logits, base, scale = operands(tokens, streams)
    logits[0] *= 100
    how = HOW | {"streams": streams, "iterations": iterations}
    found, wanted = (mixing_weights(logits, base, scale, **how, backend=b) for b in (Backend.TRITON, Backend.REFERENCE))
    for mine, reference in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, reference, rtol=2e-5, atol=1e-7)


@pytest.mark.aot
@pytest.mark.parametrize("number", [80, 90, 120])
def test_the_kernel_fits(number: int) -> None:
    call = functools.partial(mixing_weights, **HOW, backend=Backend.TRITON)
    (kernel,) = kernel_resources(call, *operands(64), gpu=gpus.by_number(number))
    assert kernel.spilled_bytes == 0
