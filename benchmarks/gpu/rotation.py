"""What the rotation of queries compiles to on an H200: checkpoints' pairs, and halves. No GPU is needed.

    JAX_PLATFORMS=cpu python -m benchmarks.gpu.rotation

Halves are what a permutation of the weights' rows at load would make of the pairs. The last 64 of 192 columns of each
head are turned, and the others kept, as `dsv3.model.layers.attention.project` does. Prints the bytes of arguments and
results, those in between, the kernels, and how many operations XLA has fused in them.
"""

import functools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp

from dsv3.model.layers.rope import Rotation, rotate, rotate_halves
from pallas_kernels import aot

HEADS, N, P = 128, 128, 64


def queries(turn: Callable, q: jax.Array, by: Rotation) -> jax.Array:
    """Returns queries `[T, H, N + P]` whose last part is turned."""
    return jnp.concatenate([q[..., :N], turn(q[..., N:], by)], axis=-1)


def main() -> None:
    for tokens in (128, 4096):
        q = jax.ShapeDtypeStruct((tokens, HEADS, N + P), jnp.bfloat16)
        by = Rotation(*(jax.ShapeDtypeStruct((tokens, P // 2), jnp.float32) for _ in range(2)))
        for name, turn in (("pairs", rotate), ("halves", rotate_halves)):
            print(f"{tokens:>5} tokens, {name:<6}: {read(functools.partial(queries, turn), q, by)}")


def read(fn: Callable, *arguments: object) -> str:
    """Returns what the compiled program of `fn` consists of."""
    compiled = aot.compile_to_read(aot.lower_for(fn, *arguments))
    text, buffers = compiled.as_text(), compiled.memory_analysis()
    moved = buffers.argument_size_in_bytes + buffers.output_size_in_bytes
    entry = text[text.index("\nENTRY") :]
    kernels = len(re.findall(r" fusion\(", entry))
    fused = re.findall(r"^  (?:ROOT )?%\S+ = \S+ (\w[\w-]*)\(", text[: text.index("\nENTRY")], flags=re.MULTILINE)
    operations = sum(op not in ("parameter", "constant", "bitcast") for op in fused)
    between = buffers.temp_size_in_bytes / 1e6
    return f"{moved / 1e6:,.1f} MB, {between:,.1f} MB in between, {kernels} kernel, {operations} operations"


if __name__ == "__main__":
    main()
