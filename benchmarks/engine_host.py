"""Host time between decode steps, with a device step that costs next to nothing.

    python -m benchmarks.engine_host [--running 128] [--steps 2000]
    python -m benchmarks.engine_host --unit
    python -m benchmarks.engine_host --drafts 1 [--unit] [--rounds 5]

The model is replaced by one product-free function, so what is left is the engine: planning, launching two programs,
reading the tokens of the step before, outputs. Rows are the host's time in a step (the wait for the device taken out),
the whole step, and the engine thread's CPU time in a step, which a busy machine distorts least. XLA:CPU runs part of
the small programs on the calling thread: on a GPU the figures are lower.

`--unit` is the published decode unit: 144 ranks with 128 requests each, over 18 hosts. Nothing is launched on a device:
the executor encodes each follower's part of the command, as a leader does, and gives every row a token. Each step's
frame to the API server is encoded too. A last table has what encoding a step's results for several API servers takes.

`--drafts` compares, in turns, steps with drafts and steps without, and no devices: those of one rank with
`--running` requests, or of the decode unit.
"""

import gc
import itertools
import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from benchmarks.engines import check_programs
from benchmarks.record import Report, arguments, run, spread
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
from dsv3.scheduler.request import EngineRequest, StepOutputs, Tokens, first_id
from dsv3.server.engine.api_servers import split_by_sender
from dsv3.server.engine.messages import Outputs
from sharding.mesh import DEVICES

VOCAB = 256
MAX_NUM_BATCHED_TOKENS = 1024
HOST, WHOLE, THREAD = "host's time", "whole step", "processor time of the engine's thread"
PERCENTILES = (10, 50, 90, 99)


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


def make_engine(running: int, max_model_len: int) -> Engine:
    """Returns an engine around the empty model, with as many parameter arrays as a real one has."""
    cfg = model_config()
    limits = EngineConfig(
        max_model_len=max_model_len,
        num_pages=running * max_model_len // 64,
        max_num_seqs=running,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
    )
    params = [jnp.zeros(8) for _ in range(40)]
    return Engine(EngineComponents.on_devices(StepFunctions(_prefill, _decode, _logits), params, cfg, limits))


def measure(running: int, steps: int) -> dict[str, np.ndarray]:
    """Times `steps` decode steps of `running` requests, in microseconds."""
    engine = make_engine(running, -(-(steps + 200) // 64) * 64)
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
    host, whole, cpu = np.empty((3, steps))
    for i in range(steps):
        before, started, cpu_started = engine.host_time.total, time.perf_counter(), time.thread_time()
        outputs = engine.step()
        whole[i], host[i] = time.perf_counter() - started, engine.host_time.total - before
        cpu[i] = time.thread_time() - cpu_started
        assert len(outputs) == running
    check_programs(engine)
    return {HOST: host * 1e6, WHOLE: whole * 1e6, THREAD: cpu * 1e6}


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
        self.sent: list[int] = []

    def compile_all(self, progress: Any = None, store: Any = None) -> None:
        """Has nothing to compile."""

    def launch_all(self) -> None:
        """Has nothing to launch."""

    def launch(self, command: StepCommand) -> None:
        self.sent = [len(messages.encode(messages.step_of(command.part(ranks)))) for ranks in self._parts]

    def fetch(self, command: StepCommand, launched: None) -> list[Any]:
        return [self._results(*job) for job in command.jobs]

    def _results(self, kind: str, command: Any) -> Any:
        if getattr(command, "sample", None) is None:
            return () if kind == "draft" else ForwardResults()
        return ForwardResults(sampled=(next(self._rows) if kind == "decode" else self._first,))


class Unit:
    """An engine without devices: `ranks * rows` requests decode over `nodes` hosts."""

    def __init__(self, ranks: int = 144, rows: int = 128, nodes: int = 18, drafts: int = 0) -> None:
        self._running = ranks * rows
        self.frame_bytes, self.tokens = 0, 0.0
        config = {"method": "mtp", "num_speculative_tokens": drafts} if drafts else None
        cfg = EngineConfig(
            max_model_len=4096, num_pages=rows * 24, max_num_seqs=rows, num_ranks=ranks, num_processes=nodes,
            num_nodes=nodes, max_num_queued_reqs=2 * self._running, speculative_config=config,
            tokens_per_row=1 + drafts,
        )  # fmt: skip
        mesh = AbstractMesh((nodes, ranks // nodes, 1, 1), DEVICES)
        functions = StepFunctions(_prefill, _decode, _logits)
        self.executor = UnitExecutor(cfg)
        self._engine = Engine(EngineComponents(functions, None, model_config(), cfg, mesh), self.executor)  # type: ignore[arg-type]
        self._lengths, self._ids = itertools.cycle(range(64, 1024)), itertools.count()
        while self._engine.scheduler.slots.decoding.sum() < self._running:
            self._arrive()
            self._engine.step()
        gc.freeze()

    def run(self, steps: int) -> dict[str, np.ndarray]:
        """Times steps and the engine thread's processor time in them, in microseconds; notes bytes and tokens."""
        times, processor, self.tokens = *np.empty((2, steps)), 0.0
        for i in range(steps):
            self._arrive()
            started, cpu_started = time.perf_counter(), time.thread_time()
            outputs = self._engine.step()
            self.frame_bytes = len(frames.encode(Outputs.from_outputs(outputs, None)))
            times[i], processor[i] = time.perf_counter() - started, time.thread_time() - cpu_started
            self.tokens += sum(len(columns.tokens) for columns in outputs.columns) / steps
        return {WHOLE: times * 1e6, THREAD: processor * 1e6}

    def _arrive(self) -> None:
        engine = self._engine
        for _ in range(self._running - len(engine.scheduler.sequences)):
            sampling = SamplingParams(temperature=0, ignore_eos=True, max_tokens=1000)
            prompt = [2] * next(self._lengths)
            engine.add(EngineRequest(request_id=next(self._ids), prompt_token_ids=prompt, sampling=sampling))


def tabulate(report: Report, title: str, measured: dict[str, np.ndarray]) -> None:
    """Reports percentiles of microseconds."""
    rows = ([name, *np.percentile(values, PERCENTILES)] for name, values in measured.items())
    report.table(title, ["per step (us)", "p10", "median", "p90", "p99"], rows)


def measure_unit(report: Report, unit: Unit, steps: int) -> None:
    """Reports times of the decode unit, and what a step sends."""
    tabulate(report, "A step of the decode unit", unit.run(steps))
    sizes = [
        ["a decode command to each follower", round(statistics.mean(unit.executor.sent))],
        ["a step's results", unit.frame_bytes],
    ]
    report.table("What it sends", ["what", "bytes"], sizes)
    rows = ([servers, statistics.median(send(servers) for _ in range(steps)) * 1e6] for servers in (1, 2, 4, 16))
    report.table("Results of 18,432 rows", ["API servers", "processor time of the engine's thread (us)"], rows)


def send(servers: int, rows: int = 18432) -> float:
    """Encodes a step's results as `ApiServerConnections.deliver` does; returns the thread's seconds."""
    ids = np.array([first_id(i % servers) + i for i in range(rows)], np.int64)
    tokens = Tokens(ids, np.ones(rows, np.int64), np.arange(rows, dtype=np.int32))
    outputs = StepOutputs([tokens], [])
    started = time.thread_time()
    for part in split_by_sender(outputs).values() if servers > 1 else [outputs]:
        frames.encode(Outputs.from_outputs(part, None))
    return time.thread_time() - started


def compare_drafts(report: Report, drafts: int, layout: dict[str, int], steps: int, rounds: int) -> None:
    """Reports the ratios of an engine that takes drafts to one that does not, in turns."""
    units = [Unit(**layout), Unit(**layout, drafts=drafts)]
    for unit in units:
        unit.run(steps)  # first steps give their requests' first tokens one by one
    ratios: dict[str, list[float]] = {WHOLE: [], THREAD: [], "tokens": []}
    for _ in range(rounds):
        none, some = (unit.run(steps) for unit in units)
        for name in none:
            ratios[name].append(float(np.median(some[name]) / np.median(none[name])))
        ratios["tokens"].append(units[1].tokens / units[0].tokens)
    title = f"{drafts} drafts per row over none, {layout.get('ranks', 144)} ranks of {layout.get('rows', 128)} rows"
    report.table(title, ["median of a step", "ratio"], ([name, spread(each)] for name, each in ratios.items()))


def main(report: Report) -> None:
    args = arguments(__doc__, running=128, steps=2000, rounds=5, unit=False, drafts=0)
    if args.drafts:
        layout = {} if args.unit else {"ranks": 1, "rows": args.running, "nodes": 1}
        compare_drafts(report, args.drafts, layout, min(args.steps, 40), args.rounds)
    elif args.unit:
        measure_unit(report, Unit(), min(args.steps, 300))
    else:
        tabulate(report, f"{args.running} running requests", measure(args.running, args.steps))


if __name__ == "__main__":
    run(main)
