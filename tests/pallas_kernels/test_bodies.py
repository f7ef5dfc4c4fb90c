"""Kernels without bodies: the same calls, and never in programs that run."""

import re

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import aot, bodies, gpus
from pallas_kernels.backend import Backend
from pallas_kernels.fp8 import quantize_1x128

X = jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)


def test_a_body_is_omitted_only_in_the_block() -> None:
    def body() -> None:
        raise AssertionError

    with bodies.left_out():
        empty = bodies.traced(body)
    assert bodies.traced(body) is body
    assert empty(1, scratch=2) is None
    assert empty.__name__ == "body"


@pytest.mark.aot
@pytest.mark.parametrize(
    ("backend", "target"), [(Backend.MOSAIC, "mosaic_gpu"), (Backend.TRITON, "triton_kernel_call")]
)
def test_a_program_that_runs_has_its_kernels_whatever_was_traced_before(backend: Backend, target: str) -> None:
    """The call is the same, with another body: the setting is part of jax's cache keys."""
    quantize = jax.jit(lambda x: quantize_1x128(x, backend=backend))

    def lowered() -> tuple[str, int]:
        with gpus.compiling_for(gpus.by_number(90)):
            text = aot.lower_for(quantize, X).as_text()
        [call] = (line for line in text.splitlines() if target in line)
        return re.sub(r"mhlo.backend_config = \{.*\}", "", call).split("->")[-1], len(call)

    with bodies.left_out():
        left_out = lowered()
    whole = lowered()
    with bodies.left_out():
        assert lowered() == left_out
    assert whole[0] == left_out[0]
    assert whole[1] > 1.5 * left_out[1]
