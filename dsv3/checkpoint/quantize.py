"""Plain products of a checkpoint that are served as block-scaled FP8: rounded on their devices once they are read."""

import functools
from collections.abc import Callable, Iterator

import jax
from jax import lax
from jax.sharding import Sharding

from dsv3.checkpoint.fill import aligned_empty
from dsv3.checkpoint.layout import leaves
from dsv3.checkpoint.load_plan import LoadPlan
from dsv3.config.model import ModelConfig
from dsv3.model.params import Fp8Weight
from pallas_kernels.fp8 import quantize_128x128


def plain_products(plan: LoadPlan, cfg: ModelConfig) -> Iterator[str]:
    """Yields the paths of the leaves of `plan` that a server may keep in FP8 and that are not."""
    for path, spec in leaves(cfg).items():
        if spec.quantizable and len(plan.leaves[path]) == 1:
            yield path


def quantized(stack: jax.Array, *, ue8m0: bool = False, sharding: Sharding | Fp8Weight | None = None) -> Fp8Weight:
    """Rounds a stack `[L, ..., N, K]` to e4m3 with a float32 scale per 128 x 128 values, layer after layer.

    Beside the stack its result must fit on its devices: half the bytes of bfloat16, twice that for a moment on a CPU.
    `ue8m0` rounds scales up to powers of two. `sharding` is that of the result; None leaves it to jax.
    """
    made = jax.block_until_ready(jax.jit(rounding(ue8m0), out_shardings=sharding)(stack))
    return jax.tree.map(_in_huge_pages, made)


def _in_huge_pages(made: jax.Array) -> jax.Array:
    """Returns the same array, where CPUs hold it in memory like that of weights from files (`aligned_empty`).

    jax's own memory has pages of 4 KiB, with which a decode step of one row waits longer for its weights.
    """
    if any(shard.device.platform != "cpu" for shard in made.addressable_shards):
        return made

    def moved(part: jax.Array, device: jax.Device | None) -> jax.Array:
        host = aligned_empty(part.shape, part.dtype)
        host[...] = part
        return jax.device_put(host, device)

    if not made.committed:
        return moved(made, None)
    parts = [moved(shard.data, shard.device) for shard in made.addressable_shards]
    return jax.make_array_from_single_device_arrays(made.shape, made.sharding, parts, dtype=made.dtype)


def quantized_shapes(
    stack: jax.ShapeDtypeStruct, *, ue8m0: bool = False, sharding: Sharding | Fp8Weight | None = None
) -> Fp8Weight:
    """Returns the shapes, dtypes and shardings of what `quantized` makes of such a stack."""
    shapes = jax.eval_shape(rounding(ue8m0), stack)
    apart = sharding if isinstance(sharding, Fp8Weight) else Fp8Weight(sharding, sharding)
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        shapes,
        apart,
        is_leaf=lambda x: x is None,
    )


def rounding(ue8m0: bool) -> Callable[[jax.Array], Fp8Weight]:
    """Returns what rounds a stack, one layer at a time; it can be traced."""
    round_layer = functools.partial(quantize_128x128, ue8m0=ue8m0)
    return lambda layers: Fp8Weight(*lax.map(round_layer, layers))
