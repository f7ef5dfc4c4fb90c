"""Batch-invariant steps of DeepSeek-V3 for Hopper: prefill and decode start the same kernels for any number of rows."""

import functools
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import pytest

from configs.deepseek_v3 import DEEPSEEK_V3
from dsv3.model import PAGE_SIZE, AttentionForm, DecodeBatch, PrefillBatch, decode, logits, prefill
from dsv3.model.forms import FORMS, applies
from pallas_kernels import bodies, invariance
from pallas_kernels.backend import Backend
from tests.dsv3.model.test_aot import CFG, fp8_params

ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
POOL = {"latents": jax.ShapeDtypeStruct((62 * 64, PAGE_SIZE, 576), jnp.bfloat16)}
FORM = AttentionForm.ABSORBED


def of_prompts(tokens: int) -> PrefillBatch:
    return PrefillBatch(ints((tokens,)), ints((tokens,)), ints((9,)), ints((8,)), ints((8, 32)), form=FORM)


def of_requests(rows: int, tokens: int) -> DecodeBatch:
    return DecodeBatch(ints((rows, tokens)), ints((rows,)), ints((rows, 8)), form=FORM)


def started(batch: PrefillBatch | DecodeBatch) -> set[str]:
    """The operations of a step that are kernels, whose names say their tiles, or products of XLA."""

    def step(params: Any, batch: Any, pool: Any) -> jax.Array:
        run = prefill if isinstance(batch, PrefillBatch) else decode
        out = run(params, CFG, batch, pool, backend=Backend.MOSAIC)
        return logits(params, CFG, out.hidden, Backend.MOSAIC)

    found: set[str] = set()

    def visit(jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            if "mesh" in eqn.params or "meshes" in eqn.params:
                found.add(str(eqn.params["name"]))
            if eqn.primitive.name == "dot_general":
                found.add("dot_general")
            for inner in jax.extend.core.jaxprs_in_params(eqn.params):
                visit(inner)

    with bodies.left_out():  # names of kernels are read, which bodies take most of the time to trace
        visit(jax.make_jaxpr(step)(fp8_params(), batch, POOL).jaxpr)
    return found


@functools.cache
def started_by_64(invariant: bool) -> set[str]:
    if not invariant:
        return started(of_prompts(64))
    with invariance.batch_invariant():
        return started(of_prompts(64))


@pytest.mark.parametrize("batch", [of_prompts(2048), of_requests(1, 1), of_requests(64, 3)])
def test_kernels_are_those_of_another_number_of_rows(batch: PrefillBatch | DecodeBatch) -> None:
    assert started(batch) != started_by_64(invariant=False)
    with invariance.batch_invariant():
        found = started(batch)
    assert found == started_by_64(invariant=True)
    assert "mla_decode" in found and "dot_general" not in found


def test_an_engine_has_programs_of_decodes_forms_alone() -> None:
    forms = [form for form in AttentionForm if applies(form, DEEPSEEK_V3, "cuda", 10**6, batch_invariant=True)]
    assert forms == [FORM] and FORMS[FORM].decodes
