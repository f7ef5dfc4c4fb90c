"""A decode step on this CPU: C++ products beside XLA's and beside the memory's speed, in each type.

    JAX_PLATFORMS=cpu python -m benchmarks.cpu_step [--model bundled|random] [--layers 4] [--dtypes float32 bfloat16]
        [--rows 1 2 4 16] [--rounds 7]

A step is the model's decode program with the head, after `--context` tokens, as the engine compiles it. The random
model has hidden size 1,024, 16 heads, 32 experts of width 512 (6 per token), 2 shared ones, and a vocabulary of 32,000.
"fp8" is bfloat16 under `--fp8=quantize`; "int4" and "fp4" are bfloat16 with experts of four bits, random ones. The step
of each backend runs in turns with the others and with a copy of 256 MiB by as many threads as there are cores, each for
about `--seconds` per round. "Of the memory's speed" is the bytes of the weights that a step reads over the bytes that
the copy moves (both ways) in the same time. A round's time is that of its fastest call; processor time, of all threads,
is the mean of its calls, and the median of the rounds.
"""

import argparse
import dataclasses
import os
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.record import Cell, Report, arguments, run
from dsv3.checkpoint import load_params
from dsv3.checkpoint.layout import scale_shape
from dsv3.checkpoint.quantize import quantize_stack
from dsv3.checkpoint.reader import aligned_empty
from dsv3.config.engine import pages_for
from dsv3.config.hugging_face import load_config
from dsv3.config.model import ModelConfig
from dsv3.engine.build import bundled_model
from dsv3.kv_cache.layout import Pool, pool
from dsv3.model import DecodeBatch, decode, logits
from dsv3.model.params import Fp4Weight, Int4Weight, Params, declare, initialize
from pallas_kernels.backend import Backend, resolve_backend
from pallas_kernels.fp4 import GROUP, VALUES_PER_WORD, pack_powers

COPIED_BYTES = 256 << 20
FOUR_BITS = {"int4": Int4Weight, "fp4": Fp4Weight}
RANDOM = ModelConfig(
    vocab_size=32_000,
    hidden_size=1024,
    num_hidden_layers=12,
    num_attention_heads=16,
    q_lora_rank=512,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    intermediate_size=2816,
    moe_intermediate_size=512,
    n_routed_experts=32,
    num_experts_per_tok=6,
    n_shared_experts=2,
)
"""A model of the family whose weights, 745 million, are beyond any cache."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A compiled step; calling it runs it once.

    `weight_bytes` are those that it reads, `compile_seconds` the processor seconds of tracing and compiling it.
    """

    program: Any
    arguments: list[Any]
    weight_bytes: int
    compile_seconds: float

    def __call__(self) -> None:
        params, batch, pages = self.arguments
        out, self.arguments[2], _ = self.program(params, batch, pages)
        jax.block_until_ready(out)


def load(model: str, layers: int, dtype: str) -> tuple[Params, ModelConfig]:
    """Returns the bundled model, or a random one of `layers` layers, in a dtype or kind of this module's docstring."""
    if dtype == "fp8":
        params, cfg = load(model, layers, "bfloat16")
        return jax.tree.map(lambda spec, w: quantize_stack(w) if spec.quantizable else w, declare(cfg), params), cfg
    if dtype in FOUR_BITS:
        params, cfg = load(model, layers, "bfloat16")
        return with_four_bits(params, FOUR_BITS[dtype]), cfg
    if model == "bundled":
        cfg = dataclasses.replace(load_config(bundled_model()), num_nextn_predict_layers=0)
        return load_params(bundled_model(), cfg, dtype=jnp.dtype(dtype)), cfg
    cfg = dataclasses.replace(RANDOM, num_hidden_layers=layers)
    return initialized(cfg, dtype), cfg


def with_four_bits(params: Params, kind: type[Int4Weight | Fp4Weight]) -> Params:
    """Returns the parameters with random experts of four bits."""
    layers = params.moe
    assert layers is not None and layers.moe is not None
    experts = layers.moe

    def packed(weight: jax.Array) -> Int4Weight | Fp4Weight:
        *lead, n, k = weight.shape
        words = np.random.default_rng(2).integers(0, 2**32, (*lead, n, k // VALUES_PER_WORD), np.uint32)
        if kind is Int4Weight:
            scale = jnp.full((*lead, k // GROUP, n), 2.0**-8, jnp.bfloat16)
            return Int4Weight(jax.device_put(words.view(np.int32)), scale)
        powers = pack_powers(jnp.zeros((*lead, n, k // GROUP), jnp.int32))
        return Fp4Weight(jax.device_put(words), powers, jnp.full(scale_shape(weight.shape), 2.0**-14))

    moe = dataclasses.replace(experts, gate_up=packed(experts.gate_up), down=packed(experts.down))
    return dataclasses.replace(params, moe=dataclasses.replace(layers, moe=moe))


def initialized(cfg: ModelConfig, dtype: str) -> Params:
    """Returns random weights in huge pages, as those of a checkpoint are."""

    def moved(w: jax.Array) -> jax.Array:
        host = aligned_empty(w.shape, w.dtype)
        host[...] = w
        return jax.device_put(host)

    return jax.tree.map(moved, jax.jit(lambda: initialize(cfg, jax.random.key(0), jnp.dtype(dtype)))())


def compiled(params: Params, cfg: ModelConfig, rows: int, context: int, backend: Backend) -> Step:
    """Returns the decode step of `rows` requests with `context` tokens each, over pages of random latents; runs it."""
    pages_each = pages_for(context + 1, 64)
    batch = DecodeBatch(
        jnp.asarray(np.random.default_rng(0).integers(0, cfg.vocab_size, (rows, 1)), jnp.int32),
        jnp.full(rows, context, jnp.int32),
        jnp.arange(rows * pages_each, dtype=jnp.int32).reshape(rows, -1),
    )

    def body(params: Params, batch: DecodeBatch, pages: Pool) -> tuple[jax.Array, Pool, jax.Array]:
        out = decode(params, cfg, batch, pages, backend=backend)
        return logits(params, cfg, out.hidden, backend), out.pages, out.expert_counts

    rng, empty = np.random.default_rng(1), pool(cfg, jnp.dtype(params.embed.dtype).name, rows * pages_each)
    pages = jax.tree.map(lambda s: jnp.asarray(rng.standard_normal(s.shape, np.float32), s.dtype), empty)
    began = time.process_time()
    program = jax.jit(body, donate_argnums=2).lower(params, batch, pages).compile()
    taken = time.process_time() - began
    _, pages, counts = program(params, batch, pages)
    return Step(program, [params, batch, pages], weight_bytes(params, np.asarray(counts)), taken)


def weight_bytes(params: Params, counts: np.ndarray) -> int:
    """Returns the bytes of the weights that a step with these expert counts reads: chosen experts, and all others."""
    assert params.moe is not None and params.moe.moe is not None

    def size(tree: Any) -> int:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

    experts = size((params.moe.moe.gate_up, params.moe.moe.down))
    return round(size(params) - size(params.embed) - experts + experts * float((counts > 0).mean()))


class Copy:
    """Copies `COPIED_BYTES` in all, by one thread per core."""

    def __init__(self) -> None:
        threads = os.cpu_count() or 1
        self._from = np.ones((threads, COPIED_BYTES // threads), np.uint8)
        self._to = np.zeros_like(self._from)

    def __call__(self) -> None:
        threads = [threading.Thread(target=np.copyto, args=pair) for pair in zip(self._to, self._from, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def in_turns(calls: list[Callable[[], None]], rounds: int, seconds: float) -> np.ndarray:
    """Returns wall and processor seconds per call `[rounds, calls, 2]`.

    Each call repeats for about `seconds` in every round.
    """
    for call in calls:
        call()
    repeats = [max(1, round(seconds / timed(call, 2)[0])) for call in calls]
    return np.array([[timed(call, times) for call, times in zip(calls, repeats, strict=True)] for _ in range(rounds)])


def timed(call: Callable[[], None], times: int) -> tuple[float, float]:
    """Returns the wall seconds of the fastest of `times` calls, and the mean of their processor seconds.

    Other work on the machine interrupts calls. It does not count as their processor time.
    """
    seconds, began = [], time.process_time()
    for _ in range(times):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return min(seconds), (time.process_time() - began) / times


def main(report: Report) -> None:
    given = arguments(
        __doc__, model="bundled", layers=4, dtypes=("float32", "bfloat16"), rows=(1, 2, 4, 16), context=192, rounds=7,
        seconds=0.2,
    )  # fmt: skip
    for dtype in given.dtypes:
        measure(report, given, dtype)


def measure(report: Report, given: argparse.Namespace, dtype: str) -> None:
    """Reports the table of one dtype."""
    params, cfg = load(given.model, given.layers, dtype)
    backends = list(dict.fromkeys((Backend.REFERENCE, resolve_backend())))
    cases = [(rows, backend) for rows in given.rows for backend in backends]
    steps = [compiled(params, cfg, rows, given.context, backend) for rows, backend in cases]
    both = in_turns([Copy(), *steps], given.rounds, given.seconds)
    copy, times, processor = both[:, 0, 0], both[:, 1:, 0], both[:, 1:, 1]
    lines: list[list[Cell]] = []
    for i, ((rows, backend), step) in enumerate(zip(cases, steps, strict=True)):
        first, like = cases.index((given.rows[0], backend)), cases.index((rows, backends[0]))
        fastest, limit = times[:, i].min(), step.weight_bytes / (2 * COPIED_BYTES) * copy.min()
        lines.append([
            rows, backend.value, fastest * 1e3, statistics.median(times[:, i]) * 1e3, fastest / times[:, first].min(),
            statistics.median(times[:, like] / times[:, i]), limit / fastest,
            statistics.median(processor[:, i]) * 1e3, step.compile_seconds,
        ])  # fmt: skip
    title = f"{given.model}, {dtype}; the copy moves {2 * COPIED_BYTES / copy.min() / 1e9:.1f} GB/s"
    columns = ["rows", "backend", "fastest (ms)", "median (ms)", "over one row", "speed over reference",
               "of the memory's speed", "processor (ms)", "compiling (processor s)"]  # fmt: skip
    report.table(title, columns, lines)


if __name__ == "__main__":
    run(main)
