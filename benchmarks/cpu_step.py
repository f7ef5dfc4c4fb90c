"""A decode step on this CPU: C++ products beside XLA's and beside the memory's speed, and bfloat16 beside float32.

    JAX_PLATFORMS=cpu python -m benchmarks.cpu_step [--model bundled|random] [--layers 4] [--dtypes float32 bfloat16]
        [--rows 1 2 4 16] [--rounds 7]
    JAX_PLATFORMS=cpu python -m benchmarks.cpu_step --types bundled 256x2 512x2 512x4 1024x2 1024x4 [--rows 1 4 16]
    JAX_PLATFORMS=cpu python -m benchmarks.cpu_step --batch_invariant bundled 512x4 [--rows 1 4 16 64]
    JAX_PLATFORMS=cpu python -m benchmarks.cpu_step --routed_experts bundled 512x4 [--rows 1 4 16]

A step is the model's decode program with the head, after `--context` tokens, as the engine compiles it. The random
model has hidden size 1,024, 16 heads, 32 experts of width 512 (6 per token), 2 shared ones, and a vocabulary of
32,000. The step of each backend runs in turns with the others and with a copy of 256 MiB by as many threads as there
are cores. "Of the memory's speed" is the bytes of the weights that a step reads over the bytes that the copy moves
(both ways) in the same time. A round's time is that of its fastest call; processor time, of all threads, is the mean of
its calls, and the median of the rounds.

`--types` makes the table behind `--dtype=auto` (`dsv3/engine/dtypes.py`): the speed of bfloat16 over float32's. A model
is the bundled one, or the random one as HIDDENxLAYERS, with widths and vocabulary in proportion to the hidden size. The
last column is the prefill of one prompt of `--prompt` tokens. "MB per token" counts the weights that a decode
step of one row reads in float32.

`--batch_invariant` has the same columns for the processor time of float32 with that option over that without it, and
`--routed_experts` for steps that return the experts of their tokens over steps that do not.
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

from benchmarks.record import Cell, Report, parser_of, run, spread
from dsv3.checkpoint import load_params
from dsv3.checkpoint.quantize import quantize_stack
from dsv3.checkpoint.reader import aligned_empty
from dsv3.config.engine import pages_for
from dsv3.config.hugging_face import load_config
from dsv3.config.model import ModelConfig
from dsv3.engine.build import bundled_model
from dsv3.kv_cache.layout import Pool, pool
from dsv3.model import AttentionForm, DecodeBatch, PrefillBatch, decode, logits, prefill
from dsv3.model.params import Params, declare, initialize
from pallas_kernels import invariance
from pallas_kernels.backend import Backend, resolve_backend

COPIED_BYTES = 256 << 20
TYPES = ("float32", "bfloat16")
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
    """Returns the bundled model, or a random one of `layers` layers; "fp8" is bfloat16 under `--fp8=quantize`.

    A name like "512x4" is the random model in another size.
    """
    if dtype == "fp8":
        params, cfg = load(model, layers, "bfloat16")
        return jax.tree.map(lambda spec, w: quantize_stack(w) if spec.quantizable else w, declare(cfg), params), cfg
    if model == "bundled":
        cfg = dataclasses.replace(load_config(bundled_model()), num_nextn_predict_layers=0)
        return load_params(bundled_model(), cfg, dtype=jnp.dtype(dtype)), cfg
    hidden, _, count = model.partition("x") if model != "random" else (RANDOM.hidden_size, "", layers)
    cfg = scaled(int(hidden), int(count))
    return initialized(cfg, dtype), cfg


def scaled(hidden: int, layers: int) -> ModelConfig:
    """Returns the random model in another size."""

    def width(value: int) -> int:
        return value * hidden // RANDOM.hidden_size

    return dataclasses.replace(
        RANDOM,
        num_hidden_layers=layers,
        hidden_size=hidden,
        **{name: width(getattr(RANDOM, name)) for name in (
            "vocab_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank", "intermediate_size",
            "moe_intermediate_size",
        )},
    )  # fmt: skip


def initialized(cfg: ModelConfig, dtype: str) -> Params:
    """Returns random weights in huge pages, as those of a checkpoint are."""

    def moved(w: jax.Array) -> jax.Array:
        host = aligned_empty(w.shape, w.dtype)
        host[...] = w
        return jax.device_put(host)

    return jax.tree.map(moved, jax.jit(lambda: initialize(cfg, jax.random.key(0), jnp.dtype(dtype)))())


def compiled(
    params: Params, cfg: ModelConfig, rows: int, context: int, backend: Backend, routed_experts: bool = False
) -> Step:
    """Returns the decode step of `rows` requests with `context` tokens each."""
    pages_each = pages_for(context + 1, 64)
    batch = DecodeBatch(
        jnp.asarray(np.random.default_rng(0).integers(0, cfg.vocab_size, (rows, 1)), jnp.int32),
        jnp.full(rows, context, jnp.int32),
        jnp.arange(rows * pages_each, dtype=jnp.int32).reshape(rows, -1),
        returns_routed_experts=routed_experts,
    )

    def body(params: Params, batch: DecodeBatch, pages: Pool) -> tuple[Any, Pool, jax.Array]:
        out = decode(params, cfg, batch, pages, backend=backend)
        return (logits(params, cfg, out.hidden, backend), out.routed_experts), out.pages, out.expert_counts

    return _step(body, params, cfg, batch, rows * pages_each)


def prompt_step(params: Params, cfg: ModelConfig, tokens: int, routed_experts: bool = False) -> Step:
    """Returns the prefill of one new prompt of `tokens` tokens, with the head for its last one."""
    pages_each, backend = pages_for(tokens, 64), resolve_backend()
    batch = PrefillBatch(
        jnp.asarray(np.random.default_rng(0).integers(0, cfg.vocab_size, tokens), jnp.int32),
        jnp.arange(tokens, dtype=jnp.int32),
        jnp.asarray([0, tokens], jnp.int32),
        jnp.zeros(1, jnp.int32),
        jnp.arange(pages_each, dtype=jnp.int32)[None],
        form=AttentionForm.NEW,
        returns_routed_experts=routed_experts,
    )

    def body(params: Params, batch: PrefillBatch, pages: Pool) -> tuple[Any, Pool, jax.Array]:
        out = prefill(params, cfg, batch, pages, backend=backend)
        return (logits(params, cfg, out.hidden[-1:], backend), out.routed_experts), out.pages, out.expert_counts

    return _step(body, params, cfg, batch, pages_each)


def _step(body: Callable, params: Params, cfg: ModelConfig, batch: Any, num_pages: int) -> Step:
    """Compiles a step over pages of random latents, and runs it once."""
    rng, empty = np.random.default_rng(1), pool(cfg, jnp.dtype(params.embed.dtype).name, num_pages)
    pages = jax.tree.map(lambda s: jnp.asarray(rng.standard_normal(s.shape, np.float32), s.dtype), empty)
    began = time.process_time()
    options = dict(invariance.CPU_OPTIONS) if invariance.required() else None
    program = jax.jit(body, donate_argnums=2).lower(params, batch, pages).compile(options)
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
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=("bundled", "random"), default="bundled")
    parser.add_argument("--types", nargs="+", metavar="MODEL", help="compare float32 and bfloat16 for these models")
    parser.add_argument("--batch_invariant", nargs="+", metavar="MODEL", help="measure that option for these models")
    parser.add_argument("--routed_experts", nargs="+", metavar="MODEL", help="measure these for these models")
    parser.add_argument("--dtypes", nargs="+", default=[*TYPES], help="or fp8")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 16])
    for name, value in (("layers", 4), ("prompt", 512), ("context", 192), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--seconds", type=float, default=0.2, help="of each step in a round")
    arguments = parser.parse_args()
    columns = ["model", "MB per token", *(f"{n} at once" for n in arguments.rows), f"prompt of {arguments.prompt}"]
    if arguments.types:
        lines = (compare_types(name, arguments) for name in arguments.types)
        report.table("Speed of bfloat16 over float32", columns, lines)
        return
    if arguments.batch_invariant:
        lines = (compare_invariance(name, arguments) for name in arguments.batch_invariant)
        report.table("Processor time with --batch_invariant over that without", columns, lines)
        return
    if arguments.routed_experts:
        lines = (compare_routed_experts(name, arguments) for name in arguments.routed_experts)
        report.table("Processor time with the experts of tokens over that without", columns, lines)
        return
    for dtype in arguments.dtypes:
        measure(report, arguments, dtype)


def compare_types(name: str, arguments: argparse.Namespace) -> list[Cell]:
    """Measures one model in both types and returns its line of the table."""
    return _ratios(name, 0, *(_steps(*load(name, 0, dtype), arguments) for dtype in TYPES), arguments)


def compare_invariance(name: str, arguments: argparse.Namespace) -> list[Cell]:
    """Measures one model with and without `batch_invariant` and returns its line of the table."""
    params, cfg = load(name, 0, "float32")
    with invariance.batch_invariant():
        invariant = _steps(params, cfg, arguments)
    return _ratios(name, 1, invariant, _steps(params, cfg, arguments), arguments)


def compare_routed_experts(name: str, arguments: argparse.Namespace) -> list[Cell]:
    """Measures one model with and without the experts of tokens and returns its line of the table."""
    params, cfg = load(name, 0, "float32")
    returned, none = (_steps(params, cfg, arguments, routed_experts) for routed_experts in (True, False))
    return _ratios(name, 1, returned, none, arguments)


def _steps(params: Params, cfg: ModelConfig, arguments: argparse.Namespace, routed_experts: bool = False) -> list[Step]:
    """Returns decode steps of all numbers of rows, and the prefill of a prompt."""
    backend = resolve_backend()
    decoding = [compiled(params, cfg, rows, arguments.context, backend, routed_experts) for rows in arguments.rows]
    return [*decoding, prompt_step(params, cfg, arguments.prompt, routed_experts)]


def _ratios(name: str, kind: int, first: list[Step], second: list[Step], arguments: argparse.Namespace) -> list[Cell]:
    """Returns the line of a model: the time (`kind` 0: wall, 1: processor) of each `first` step over the second's."""
    pairs = [step for pair in zip(first, second, strict=True) for step in pair]
    seconds = in_turns(pairs, arguments.rounds, arguments.seconds)[:, :, kind]
    return [name, first[0].weight_bytes / 1e6, *map(spread, (seconds[:, ::2] / seconds[:, 1::2]).T)]


def measure(report: Report, arguments: argparse.Namespace, dtype: str) -> None:
    """Reports the table of one dtype."""
    params, cfg = load(arguments.model, arguments.layers, dtype)
    backends = list(dict.fromkeys((Backend.REFERENCE, resolve_backend())))
    cases = [(rows, backend) for rows in arguments.rows for backend in backends]
    steps = [compiled(params, cfg, rows, arguments.context, backend) for rows, backend in cases]
    both = in_turns([Copy(), *steps], arguments.rounds, arguments.seconds)
    copy, times, processor = both[:, 0, 0], both[:, 1:, 0], both[:, 1:, 1]
    lines: list[list[Cell]] = []
    for i, ((rows, backend), step) in enumerate(zip(cases, steps, strict=True)):
        first, like = cases.index((arguments.rows[0], backend)), cases.index((rows, backends[0]))
        fastest, limit = times[:, i].min(), step.weight_bytes / (2 * COPIED_BYTES) * copy.min()
        lines.append([
            rows, backend.value, fastest * 1e3, statistics.median(times[:, i]) * 1e3, fastest / times[:, first].min(),
            statistics.median(times[:, like] / times[:, i]), limit / fastest,
            statistics.median(processor[:, i]) * 1e3, step.compile_seconds,
        ])  # fmt: skip
    title = f"{arguments.model}, {dtype}; the copy moves {2 * COPIED_BYTES / copy.min() / 1e9:.1f} GB/s"
    columns = ["rows", "backend", "fastest (ms)", "median (ms)", "over one row", "speed over reference",
               "of the memory's speed", "processor (ms)", "compiling (processor s)"]  # fmt: skip
    report.table(title, columns, lines)


if __name__ == "__main__":
    run(main)
