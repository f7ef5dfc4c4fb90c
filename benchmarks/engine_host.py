"""Host time between decode steps, with a device step that costs next to nothing.

    python -m benchmarks.engine_host [--running 128] [--steps 2000]
    XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m benchmarks.engine_host --ranks 8 [--rounds 5]
    python -m benchmarks.engine_host --unit [--churn 18]
    python -m benchmarks.engine_host --drafts 1 [--unit] [--rounds 5]

The model is replaced by one product-free function, so what is left is the engine: planning, launching two programs,
reading the tokens of the step before, outputs. Prints percentiles of the host's time in a step (the wait for the device
taken out), of whole steps, and of the engine thread's CPU time in a step, which a busy machine distorts least. XLA:CPU
runs part of the small programs on the calling thread: on a GPU the figures are lower.

With `--ranks` above 1 the same requests are spread over as many devices, and compared with one device in turns.

`--unit` is the published decode unit: 144 ranks with 128 requests each, over 18 hosts. Nothing is launched on a device:
the executor encodes each follower's part of the command, as a leader does, and gives every row a token. Each step's
frame to the HTTP process is encoded too. `--churn` requests end and as many arrive in every step.

`--drafts` compares, in turns, steps with drafts and steps without, and no devices: those of one rank with
`--running` requests, or of the decode unit.
"""

import argparse
import gc
import itertools
import json
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from dsv3.config.engine import EngineConfig
from dsv3.config.model import ModelConfig
from dsv3.engine.cluster import messages
from dsv3.engine.components import EngineComponents
from dsv3.engine.engine import Engine
from dsv3.engine.functions import StepFunctions
from dsv3.engine.job import StepCommand
from dsv3.engine.jobs.sample import ForwardResults
from dsv3.model.batch import DecodeBatch, PrefillBatch
from dsv3.processes import frames
from dsv3.sampling_params import SamplingParams
from dsv3.scheduler.batch_slots import NOTHING
from dsv3.scheduler.request import EngineRequest
from dsv3.server.engine.messages import Outputs

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


def model_config() -> ModelConfig:
    """Returns the smallest model there is."""
    return ModelConfig(
        vocab_size=VOCAB, hidden_size=1, num_hidden_layers=1, num_attention_heads=1, kv_lora_rank=1,
        qk_nope_head_dim=1, qk_rope_head_dim=1, v_head_dim=1, intermediate_size=1, moe_intermediate_size=1,
        n_routed_experts=1, num_experts_per_tok=1,
    )  # fmt: skip


def make_engine(running: int, max_model_len: int, ranks: int = 1) -> Engine:
    """An engine around the empty model, with as many parameter arrays as a real one has.

    Raises ValueError where the ranks do not divide the requests.
    """
    if running % ranks:
        raise ValueError(f"{running} requests do not divide over {ranks} ranks: make --running a multiple")
    cfg = model_config()
    limits = EngineConfig(
        max_model_len=max_model_len,
        num_pages=running // ranks * max_model_len // 64,
        max_num_seqs=running // ranks,
        max_num_batched_tokens=1024,
        num_ranks=ranks,
    )
    params = [jnp.zeros(8) for _ in range(40)]
    return Engine(EngineComponents.on_devices(StepFunctions(_prefill, _decode, _logits), params, cfg, limits))


def measure(running: int, steps: int, ranks: int = 1) -> dict[str, float]:
    """Times `steps` decode steps of `running` requests on `ranks` devices together, in microseconds."""
    max_model_len = -(-(steps + 200) // 64) * 64
    engine = make_engine(running, max_model_len, ranks)
    engine.warm_up()
    sampling = SamplingParams(temperature=0, ignore_eos=True)
    for i in range(running):
        prompt = [(i + j) % VOCAB for j in range(1 + i % 64)]  # so that new pages fall due at different steps
        engine.add(EngineRequest(request_id=i, prompt_token_ids=prompt, sampling=sampling))
    while engine.scheduler.slots.decoding.sum() < running:
        engine.step()
    for _ in range(50):
        engine.step()
    gc.freeze()
    host, whole, cpu = np.empty(steps), np.empty(steps), np.empty(steps)
    for i in range(steps):
        before, started, cpu_started = engine.host_time.total, time.perf_counter(), time.thread_time()
        outputs = engine.step()
        whole[i], host[i] = time.perf_counter() - started, engine.host_time.total - before
        cpu[i] = time.thread_time() - cpu_started
        assert len(outputs) == running
    stats = engine.stats()
    assert stats.recompilations == 0
    result = {"running": running, "steps": steps, "ranks": ranks}
    return result | _percentiles({"host": host * 1e6, "step": whole * 1e6, "thread_cpu": cpu * 1e6})


class UnitExecutor:
    """A leader's work without devices: commands are encoded for every follower, and each row is given tokens 1.

    Of drafts 85 % are right, the second-token acceptance that DeepSeek published at the least.
    """

    def __init__(self, cfg: EngineConfig) -> None:
        self._parts = [cfg.ranks_of(process) for process in range(1, cfg.num_processes)]
        shape = (cfg.num_ranks, max(cfg.decode_buckets))
        self._first = np.ones((*shape, 1), np.int32)
        right = np.random.default_rng(0).random((8, *shape, cfg.tokens_per_row - 1)) < 0.85
        rest = np.where(np.logical_and.accumulate(right, axis=-1), 1, NOTHING).astype(np.int32)
        self._rows = itertools.cycle(np.concatenate([self._first, drafts], axis=-1) for drafts in rest)
        self.sent = 0

    def compile_all(self, progress: Any = None, store: Any = None) -> None:
        """Has nothing to compile."""

    def launch_all(self) -> None:
        """Has nothing to launch."""

    def launch(self, command: StepCommand) -> None:
        self.sent = sum(len(messages.encode(messages.step_of(command.part(ranks)))) for ranks in self._parts)

    def fetch(self, command: StepCommand, launched: None) -> list[Any]:
        return [self._results(*job) for job in command.jobs]

    def _results(self, kind: str, command: Any) -> Any:
        if getattr(command, "sample", None) is None:
            return () if kind == "draft" else ForwardResults()
        return ForwardResults(sampled=(next(self._rows) if kind == "decode" else self._first,))


class Unit:
    """An engine without devices: `ranks * rows` requests decode over `nodes` hosts, `churn` end in each step."""

    def __init__(self, ranks: int = 144, rows: int = 128, nodes: int = 18, churn: int = 0, drafts: int = 0) -> None:
        self._running, self._churn = ranks * rows, churn
        config = {"method": "mtp", "num_speculative_tokens": drafts} if drafts else None
        cfg = EngineConfig(
            max_model_len=4096, num_pages=rows * 24, max_num_seqs=rows, num_ranks=ranks, num_processes=nodes,
            num_nodes=nodes, max_num_queued_reqs=2 * self._running, speculative_config=config,
            tokens_per_row=1 + drafts,
        )  # fmt: skip
        mesh = AbstractMesh((nodes, ranks // nodes, 1), ("node", "gpu", "tensor"))
        functions = StepFunctions(_prefill, _decode, _logits)
        self.executor = UnitExecutor(cfg)
        self._engine = Engine(EngineComponents(functions, None, model_config(), cfg, mesh), self.executor)  # type: ignore[arg-type]
        self._lengths, self._ids = itertools.cycle(range(64, 1024)), itertools.count()
        while self._engine.scheduler.slots.decoding.sum() < self._running:
            self._arrive()
            self._engine.step()
        gc.freeze()

    def run(self, steps: int) -> dict[str, Any]:
        """Times steps and the engine thread's processor time in them, in microseconds."""
        times, processor, frame_bytes, tokens = np.empty(steps), np.empty(steps), 0, 0
        for i in range(steps):
            self._arrive()
            started, cpu_started = time.perf_counter(), time.thread_time()
            outputs = self._engine.step()
            frame_bytes = len(frames.encode(Outputs.from_outputs(outputs, None)))
            times[i], processor[i] = time.perf_counter() - started, time.thread_time() - cpu_started
            tokens += sum(len(columns.tokens) for columns in outputs.columns)
        result: dict[str, Any] = {"running": self._running, "steps": steps, "churn": self._churn}
        result |= {"frame_bytes": frame_bytes, "tokens_per_step": round(tokens / steps)}
        return result | _percentiles({"step": times * 1e6, "thread_cpu": processor * 1e6})

    def _arrive(self) -> None:
        engine = self._engine
        for _ in range(self._running - len(engine.scheduler.sequences)):
            length = 1000 if not self._churn else self._running // self._churn
            sampling = SamplingParams(temperature=0, ignore_eos=True, max_tokens=length)
            prompt = [2] * next(self._lengths)
            engine.add(EngineRequest(request_id=next(self._ids), prompt_token_ids=prompt, sampling=sampling))


def _percentiles(microseconds: dict[str, np.ndarray]) -> dict[str, float]:
    return {
        f"{name}_us_p{percentile}": round(float(np.percentile(values, percentile)), 1)
        for name, values in microseconds.items()
        for percentile in (10, 50, 90, 99)
    }


def measure_unit(steps: int, churn: int) -> dict[str, Any]:
    """Times the decode unit; also gives the bytes of a command to each follower."""
    unit = Unit(churn=churn)
    return unit.run(steps) | {"follower_bytes": unit.executor.sent / 17}


def compare_drafts(drafts: int, layout: dict[str, int], steps: int, rounds: int) -> None:
    """Prints, of the ratios of an engine that takes drafts to one that does not, in turns, median and range."""
    plain, drafting = Unit(**layout), Unit(**layout, drafts=drafts)
    names = ("step_us_p50", "thread_cpu_us_p50", "thread_cpu_us_p10", "tokens_per_step")
    ratios: dict[str, list[float]] = {name: [] for name in names}
    for unit in (plain, drafting):
        unit.run(steps)  # first steps give their requests' first tokens one by one
    for _ in range(rounds):
        none, some = plain.run(steps), drafting.run(steps)
        print(json.dumps(none), json.dumps(some), sep="\n", flush=True)
        for name, values in ratios.items():
            values.append(some[name] / none[name])
    for name, values in ratios.items():
        print(f"{name}, {drafts} drafts over none: {np.median(values):.2f} ({min(values):.2f} to {max(values):.2f})")


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
    parser.add_argument("--unit", action="store_true", help="the decode unit of 144 ranks, without devices")
    parser.add_argument("--churn", type=int, default=0, help="requests that end and arrive in each step of --unit")
    parser.add_argument("--drafts", type=int, default=0, help="per row, against none in turns")
    args = parser.parse_args()
    if args.drafts:
        layout = {} if args.unit else {"ranks": 1, "rows": args.running, "nodes": 1}
        compare_drafts(args.drafts, layout, min(args.steps, 40), args.rounds)
    elif args.unit:
        print(json.dumps(measure_unit(min(args.steps, 300), args.churn)))
    elif args.ranks == 1:
        print(json.dumps(measure(args.running, args.steps)))
    else:
        compare(args.running, args.steps, args.ranks, args.rounds)


if __name__ == "__main__":
    main()
