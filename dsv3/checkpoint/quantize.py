"""Plain products of a checkpoint that are served as block-scaled FP8: rounded on their devices once they are read."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax import lax
from jax.sharding import Sharding

from dsv3.checkpoint.layout import leaves
from dsv3.checkpoint.load_plan import LoadPlan
from dsv3.config import ModelConfig
from dsv3.model.params import Fp8Weight
from pallas_kernels.fp8 import quantize_128x128

Convert = Callable[[jax.Array], Fp8Weight]


def plain_products(plan: LoadPlan, cfg: ModelConfig, where: Mapping[str, Any]) -> Iterator[tuple[str, Convert]]:
    """Yields the leaves of `plan` that a server may keep in FP8 and that are not, each with what makes it so.

    `where` has the shardings of leaves by path; a leaf without one stays where it is.
    """
    ue8m0 = cfg.fp8 is not None and cfg.fp8.scale_fmt == "ue8m0"
    for path, spec in leaves(cfg).items():
        if spec.quantizable and len(plan.leaves[path]) == 1:
            yield path, functools.partial(quantized, ue8m0=ue8m0, sharding=where.get(path))


def quantized(stack: jax.Array, *, ue8m0: bool = False, sharding: Sharding | Fp8Weight | None = None) -> Fp8Weight:
    """Rounds a stack `[L, ..., N, K]` to e4m3 with a float32 scale per 128 x 128 values, layer after layer.

    Beside the stack its result must fit on its devices: half the bytes of bfloat16. `ue8m0` rounds scales up to powers
    of two.
    """
    round_layer = functools.partial(quantize_128x128, ue8m0=ue8m0)
    program = jax.jit(lambda layers: Fp8Weight(*lax.map(round_layer, layers)), out_shardings=sharding)
    return jax.block_until_ready(program(stack))
