"""Where bfloat16 is faster than float32 on this CPU: the table behind `--dtype=auto` (`dsv3/engine/dtypes.py`).

    JAX_PLATFORMS=cpu python -m benchmarks.cpu_dtypes [--models bundled 256x2 512x2 512x4 1024x2 1024x4] [--rows 1 4 16]
        [--prompt 512] [--rounds 5]

A model is the bundled one, or a random one of HIDDENxLAYERS: `benchmarks/cpu_step.py`'s with widths and vocabulary in
proportion to the hidden size. Steps are decode after 192 tokens, head included, and prefill of one prompt, compiled as
the engine does. Both types run in turns. A figure is the speed of bfloat16 over float32's, the median of the rounds and
their range; a round's time is that of its fastest call. "MB per token" are those of the weights that a decode step of
one row reads in float32.
"""

import argparse
import dataclasses
import os
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.cpu_step import RANDOM, Step, compiled, in_turns, initialized, load
from dsv3.config.engine import pages_for
from dsv3.config.model import ModelConfig
from dsv3.kv_cache.layout import Pool, pool
from dsv3.model import AttentionForm, PrefillBatch, logits, prefill
from dsv3.model.params import Params
from pallas_kernels.backend import resolve_backend

CONTEXT = 192
DTYPES = ("float32", "bfloat16")


def model(name: str, dtype: str) -> tuple[Params, ModelConfig]:
    """Returns the bundled model, or the random one of a name like "512x4". Raises ValueError for other names."""
    if name == "bundled":
        return load("bundled", 0, dtype)
    hidden, _, layers = name.partition("x")
    cfg = scaled(int(hidden), int(layers))
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


def prompt_step(params: Params, cfg: ModelConfig, tokens: int) -> Step:
    """Returns the prefill of one new prompt of `tokens` tokens, with the head for its last one."""
    pages_each, backend = pages_for(tokens, 64), resolve_backend()
    batch = PrefillBatch(
        jnp.asarray(np.random.default_rng(0).integers(0, cfg.vocab_size, tokens), jnp.int32),
        jnp.arange(tokens, dtype=jnp.int32),
        jnp.asarray([0, tokens], jnp.int32),
        jnp.zeros(1, jnp.int32),
        jnp.arange(pages_each, dtype=jnp.int32)[None],
        form=AttentionForm.NEW,
    )
    empty = pool(cfg, jnp.dtype(params.embed.dtype).name, pages_each)

    def body(params: Params, batch: PrefillBatch, pages: Pool) -> tuple[jax.Array, Pool, jax.Array]:
        out = prefill(params, cfg, batch, pages, backend=backend)
        return logits(params, cfg, out.hidden[-1:], backend), out.pages, out.expert_counts

    pages = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), empty)
    began = time.process_time()
    program = jax.jit(body, donate_argnums=2).lower(params, batch, pages).compile()
    taken = time.process_time() - began
    _, pages, _ = program(params, batch, pages)
    return Step(f"prompt {tokens}", program, [params, batch, pages], 0, taken)


def steps(name: str, dtype: str, rows: list[int], prompt: int) -> list[Step]:
    """Returns the steps of one model and type: decode per number of rows, then the prompt."""
    params, cfg = model(name, dtype)
    decoding = [compiled(params, cfg, each, CONTEXT, resolve_backend()) for each in rows]
    return [*decoding, prompt_step(params, cfg, prompt)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["bundled", "256x2", "512x2", "512x4", "1024x2", "1024x4"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.2, help="of each step in a round")
    arguments = parser.parse_args()
    titles = (*(f"{n} at once" for n in arguments.rows), f"prompt of {arguments.prompt}")
    print(f"| model | MB per token | {' | '.join(titles)} |\n|---|---|{'---|' * len(titles)}")
    for name in arguments.models:
        print(line(name, arguments), flush=True)
    print(f"load {os.getloadavg()[0]:.1f}")


def line(name: str, arguments: argparse.Namespace) -> str:
    """Measures one model and returns its line of the table."""
    both = [steps(name, dtype, arguments.rows, arguments.prompt) for dtype in DTYPES]
    pairs = [step for pair in zip(*both, strict=True) for step in pair]
    seconds = in_turns(pairs, arguments.rounds, arguments.seconds)[:, :, 0]
    ratios = (seconds[:, ::2] / seconds[:, 1::2]).T
    shown = [f"{statistics.median(each):.2f} ({each.min():.2f} to {each.max():.2f})" for each in ratios]
    return f"| {name} | {both[0][0].weight_bytes / 1e6:.1f} | {' | '.join(shown)} |"


if __name__ == "__main__":
    main()
