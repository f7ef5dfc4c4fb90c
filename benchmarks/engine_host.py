"""Host time between decode steps, with a device step that costs next to nothing.

    python -m benchmarks.engine_host [--running 128] [--steps 2000]
    XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m benchmarks.engine_host --ranks 8 [--rounds 5]

The model is replaced by one product-free function, so what is left is the engine: planning, launching two programs,
reading the tokens of the step before, outputs. Prints percentiles of the host's time in a step (the wait for the device
taken out), of whole steps, and of the engine thread's CPU time in a step, which a busy machine distorts least. XLA:CPU
runs part of the small programs on the calling thread: on a GPU the figures are lower.

With `--ranks` above 1 the same requests are spread over as many devices, and compared with one device in turns.
"""

import argparse
import gc
import json
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dsv3.config import ModelConfig
from dsv3.engine.config import EngineConfig
from dsv3.engine.engine import Engine
from dsv3.engine.step_bodies import StepFunctions
from dsv3.model.batch import DecodeBatch, PrefillBatch
from dsv3.request import EngineRequest
from dsv3.sampling_params import SamplingParams

VOCAB = 256


class Output(NamedTuple):
    hidden: Any
    pages: Any


def _prefill(params: Any, cfg: ModelConfig, batch: PrefillBatch, pages: jax.Array) -> Output:
    return Output(jnp.broadcast_to(batch.tokens[:, None], (batch.tokens.shape[0], 1)).astype(jnp.float32), pages)


def _decode(params: Any, cfg: ModelConfig, batch: DecodeBatch, pages: jax.Array) -> Output:
    return Output(batch.tokens[..., None].astype(jnp.float32), pages)


def _logits(params: Any, cfg: ModelConfig, hidden: jax.Array) -> jax.Array:
    return -jnp.abs(jnp.arange(VOCAB) - (hidden + 1) % VOCAB)


def make_engine(running: int, max_model_len: int, ranks: int = 1) -> Engine:
    """An engine around the empty model, with as many parameter arrays as a real one has.

    Raises ValueError where the ranks do not divide the requests.
    """
    if running % ranks:
        raise ValueError(f"{running} requests do not divide over {ranks} ranks: make --running a multiple")
    cfg = ModelConfig(
        vocab_size=VOCAB, hidden_size=1, num_hidden_layers=1, num_attention_heads=1, kv_lora_rank=1,
        qk_nope_head_dim=1, qk_rope_head_dim=1, v_head_dim=1, intermediate_size=1, moe_intermediate_size=1,
        n_routed_experts=1, num_experts_per_tok=1,
    )  # fmt: skip
    limits = EngineConfig(
        max_model_len=max_model_len,
        num_pages=running // ranks * max_model_len // 64,
        max_num_seqs=running // ranks,
        max_num_batched_tokens=1024,
        num_ranks=ranks,
    )
    params = [jnp.zeros(8) for _ in range(40)]
    return Engine(StepFunctions(_prefill, _decode, _logits), params, cfg, limits, jax.devices()[:ranks])


def measure(running: int, steps: int, ranks: int = 1) -> dict[str, float]:
    """Times `steps` decode steps of `running` requests on `ranks` devices together, in microseconds."""
    max_model_len = -(-(steps + 200) // 64) * 64
    engine = make_engine(running, max_model_len, ranks)
    engine.warm_up()
    sampling = SamplingParams(temperature=0, ignore_eos=True)
    for i in range(running):
        prompt = [(i + j) % VOCAB for j in range(1 + i % 64)]  # so that new pages fall due at different steps
        engine.add(EngineRequest(request_id=i, prompt_token_ids=prompt, sampling=sampling))
    while engine._scheduler.slots.decoding.sum() < running:
        engine.step()
    for _ in range(50):
        engine.step()
    gc.freeze()
    host, whole, cpu = np.empty(steps), np.empty(steps), np.empty(steps)
    for i in range(steps):
        before, started, cpu_started = engine._host_time.total, time.perf_counter(), time.thread_time()
        outputs = engine.step()
        whole[i], host[i] = time.perf_counter() - started, engine._host_time.total - before
        cpu[i] = time.thread_time() - cpu_started
        assert len(outputs) == running
    stats = engine.stats()
    assert stats.recompilations == 0
    result = {"running": running, "steps": steps, "ranks": ranks}
    for name, values in (("host", host * 1e6), ("step", whole * 1e6), ("thread_cpu", cpu * 1e6)):
        for percentile in (10, 50, 90, 99):
            result[f"{name}_us_p{percentile}"] = round(float(np.percentile(values, percentile)), 1)
    return result


def compare(running: int, steps: int, ranks: int, rounds: int) -> None:
    """Prints each measurement, and of the ratios of `ranks` devices to one, round by round, median and range."""
    ratios: dict[str, list[float]] = {"host_us_p50": [], "thread_cpu_us_p50": []}
    for _ in range(rounds):
        one, many = (measure(running, steps, n) for n in (1, ranks))
        print(json.dumps(one), json.dumps(many), sep="\n", flush=True)
        for name, values in ratios.items():
            values.append(many[name] / one[name])
    for name, values in ratios.items():
        print(f"{name}, {ranks} devices over 1: {np.median(values):.2f} ({min(values):.2f} to {max(values):.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=128)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=1, help="above 1: this many devices, against one in turns")
    parser.add_argument("--rounds", type=int, default=5, help="of turns")
    args = parser.parse_args()
    if args.ranks == 1:
        print(json.dumps(measure(args.running, args.steps)))
    else:
        compare(args.running, args.steps, args.ranks, args.rounds)


if __name__ == "__main__":
    main()
