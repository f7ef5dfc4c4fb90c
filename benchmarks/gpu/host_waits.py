"""Times a loop that does not run between two products: XLA copies its condition to the host, which waits for it.

    python -m benchmarks.gpu.host_waits --out DIR       on a GPU; under one minute

An exchange once asked after each combine whether a row was left for an overflow round: 232 questions in a decode step
over several nodes in two micro-batches. No served step asks any more (`tools.plan.hlo.Module.host_waits`). The table
says what that saves: as many products with nothing, a `while_loop` and a `cond` between them, which all leave the
values as they are.

Writes DIR/host_waits.md. A figure is the median over runs of the whole chain on the host's clock.
"""

import argparse
import datetime
import functools
import shlex
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax

PLACES = 232
TOKENS, WIDTH = 64, 8192  # 134 MB of bfloat16 weights: no product finds them in the L2 cache
RUNS = 20
KINDS = ("nothing", "while_loop", "cond")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the table")
    args = parser.parse_args()
    device = jax.devices()[0]
    if device.platform != "gpu":
        print(
            f"This benchmark needs a GPU; the device here is {device.device_kind!r}. Nothing was run.", file=sys.stderr
        )
        return 2
    lines = table()
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    header = (
        f"{now}; {device.device_kind}; jax {jax.__version__}; {device.client.platform_version!r}\n"
        f"command: python -m benchmarks.gpu.host_waits {shlex.join(sys.argv[1:])}\n"
    )
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "host_waits.md").write_text("\n".join([header, *lines]) + "\n")
    return 0


@functools.partial(jax.jit, static_argnames=("kind", "places"))
def chain(x: jax.Array, w: jax.Array, longest: jax.Array, *, kind: str, places: int) -> jax.Array:
    """`places` products of x [T, D] with w [D, D]; `longest` [] int32 above 0 lets what stands between them run."""

    def overflow(x: jax.Array) -> jax.Array:
        return x + 1

    def between(x: jax.Array) -> jax.Array:
        if kind == "while_loop":
            once = (jnp.int32(0), x)
            return lax.while_loop(lambda carry: carry[0] < longest, lambda c: (c[0] + 1, overflow(c[1])), once)[1]
        return lax.cond(longest > 0, overflow, lambda x: x, x) if kind == "cond" else x

    def body(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return between(jnp.tanh(x @ w)), None

    return lax.scan(body, x, None, length=places)[0]


def table() -> list[str]:
    """A row for each of KINDS: microseconds per product with it, and how much more than with nothing."""
    x = jnp.ones((TOKENS, WIDTH), jnp.bfloat16)
    w = jax.random.normal(jax.random.key(0), (WIDTH, WIDTH), jnp.bfloat16) / WIDTH**0.5
    seconds = {kind: _median_seconds(kind, x, w) / PLACES for kind in KINDS}
    lines = ["| between products | us per product | us more | per step |", "|---|---|---|---|"]
    for kind in KINDS:
        more = seconds[kind] - seconds["nothing"]
        lines.append(f"| {kind} | {seconds[kind] * 1e6:.1f} | {more * 1e6:.1f} | {more * PLACES * 1e3:.2f} ms |")
        print(lines[-1], flush=True)
    return lines


def _median_seconds(kind: str, x: jax.Array, w: jax.Array) -> float:
    def run() -> float:
        begin = time.perf_counter()
        jax.block_until_ready(chain(x, w, jnp.int32(0), kind=kind, places=PLACES))
        return time.perf_counter() - begin

    run()  # compiles
    return statistics.median(run() for _ in range(RUNS))


if __name__ == "__main__":
    sys.exit(main())
