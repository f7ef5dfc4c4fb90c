"""Kernels start as many thread blocks as the program has multiprocessors for them."""

import re
import types

import jax
import jax.extend
import jax.numpy as jnp
import pytest

from pallas_kernels import gpus, mla
from pallas_kernels.backend import Backend
from pallas_kernels.dense import layer_gemm
from pallas_kernels.grouped import grouped_gemm_contiguous
from pallas_kernels.multiprocessors import Multiprocessors, taking, traced

bf16, i32 = jnp.bfloat16, jnp.int32


def grids(fn, *shapes) -> dict[str, int]:
    """The thread blocks of each kernel that `fn` starts, by name."""
    found: dict[str, int] = {}

    def visit(jaxpr) -> None:
        for eqn in jaxpr.eqns:
            meshes = str(eqn.params.get("meshes", eqn.params.get("mesh")))  # by the version of jax
            if grid := re.match(r"\(?Mesh\(grid=\((\d+)", meshes):
                found[eqn.params["name"]] = int(grid[1])
            for inner in jax.extend.core.jaxprs_in_params(eqn.params):
                visit(inner)

    visit(jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(*shape) for shape in shapes)).jaxpr)
    return found


def test_gpus_report_their_count_and_a_cpu_that_of_an_h200() -> None:
    for name, own, count in (("NVIDIA H20", {"core_count": 78}, 78), ("NVIDIA H100 PCIe", {"core_count": 114}, 114),
                             ("NVIDIA B200", {}, 148)):  # fmt: skip
        device = types.SimpleNamespace(platform="cuda", device_kind=name, **own)
        assert gpus.multiprocessors(device) == count
    assert gpus.multiprocessors(types.SimpleNamespace(platform="cpu", device_kind="cpu", core_count=1)) == 132


def test_at_least_one_is_left_for_kernels() -> None:
    assert (Multiprocessors(78, 24).taken, Multiprocessors(132, 33).share) == (54, 0.75)
    for reserved in (78, -1):
        with pytest.raises(ValueError, match=f"{reserved} multiprocessors shall be left.* fewer than the GPU's 78"):
            Multiprocessors(78, reserved)


@pytest.mark.parametrize(
    ("available", "blocks"), [(None, 132), (Multiprocessors(78), 78), (Multiprocessors(132, 24), 108)]
)
def test_grids_are_those_of_the_program(available: Multiprocessors | None, blocks: int) -> None:
    """One function traced three times: the number is part of the keys of jax's caches."""
    with taking(available or traced()):
        found = grids(step, *SHAPES)
    dense = {108: "split"}.get(blocks, "narrow")  # with 108 the last wave of 224 tiles is too empty
    assert found == {
        f"bf16_dense_{dense}_64x128": blocks,
        "bf16_contiguous_narrow_8x128": blocks,
        "mla_decode": blocks // 2,
        "mla_combine": blocks // 2,
        "mla_prefill": 108 if available and available.reserved else 8 * 128,
    }


def step(x, w, rows, experts, groups, q, pages, table, lengths, keys, values, cu_lengths):
    backend = Backend.MOSAIC
    return (
        layer_gemm(x, w, 0, backend=backend),
        grouped_gemm_contiguous(rows, experts, groups, tile_m=8, backend=backend),
        mla.mla_decode(q, pages, table, lengths, scale=1.0, pages_per_layer=64, backend=backend),
        mla.mla_prefill(keys, keys, values, cu_lengths, scale=1.0, backend=backend),
    )


SHAPES = (
    ((64, 7168), bf16),
    ((1, 2 * 14336, 7168), bf16),
    ((256, 2048), bf16),
    ((4, 2048, 2048), bf16),
    ((32,), i32),
    ((4, 1, 128, 576), bf16),
    ((64, 64, 576), bf16),
    ((4, 16), i32),
    ((4,), i32),
    ((1024, 128, 192), bf16),
    ((1024, 128, 128), bf16),
    ((3,), i32),
)
