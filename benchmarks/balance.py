"""How evenly the ranks of an instance are loaded: today's balancer against the one before it, in a replay.

    python -m benchmarks.balance prefill [--ranks 8] [--steps 300]
    python -m benchmarks.balance decode [--ranks 8] [--steps 2000]

Runs the real scheduler and planners without a device: every sampled token is 1. Lengths are skewed (lognormal): prompts
of 4,096 tokens at the mean, answers of 2,048. Prompts begin with one of 256 prefixes, chosen by Zipf's law.

`prefill` keeps a backlog of 16 prompts per rank, with 8,192 tokens per step and rank. `decode` starts with 88 requests
per rank somewhere in their answers; as many arrive per step as end at the mean.

The rule before (`FewestRunning`) sent a request to the rank with the fewest running ones, the longer cached prefix
deciding ties, and computed prompts in their order. Prints for each load the largest of a rank over the mean: of all
steps (sum of the largest over sum of the means) and of the worst step in a hundred; and of the time to the first token
median and 99th percentile. The step's time is that of `tools.plan.roofline` for DeepSeek-V3 on H800s, without
collectives. The slowest rank sets each stage but the routed experts', which all ranks share.
"""

import argparse
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from configs.deepseek_v3 import DEEPSEEK_V3
from configs.deployments import H800
from dsv3.config.engine import EngineConfig
from dsv3.engine.job import EngineView, Planned
from dsv3.engine.jobs.decode import DecodePlanner
from dsv3.engine.jobs.prefill import PrefillPlanner
from dsv3.engine.jobs.sample import ForwardResults
from dsv3.kv_cache.page_keys import Key
from dsv3.sampling_params import SamplingParams
from dsv3.scheduler.balance import Balancer
from dsv3.scheduler.cost import keys_per_token
from dsv3.scheduler.request import EngineRequest, RequestRules, StepOutputs, prepare
from dsv3.scheduler.scheduler import Scheduler
from dsv3.scheduler.sequence import Sequence as Request
from dsv3.scheduler.sequence import sequence_of
from tools.plan.deployment import PlannedBatch, rates_of
from tools.plan.roofline import decode_stages, prefill_stages

VOCAB, LONGEST, BACKLOG, RUNNING = 1000, 32768, 16, 88
RATES = rates_of(H800, DEEPSEEK_V3)


class FewestRunning(Balancer):
    """The rule before."""

    def ranked(self, request: Request, useful: Sequence[Key]) -> Iterator[int]:
        running = self._slots.running
        found = [len(cache.match(useful)) for cache in self._pages.caches]
        order = sorted(range(len(running)), key=lambda rank: (running[rank], -found[rank]))
        return (rank for rank in order if self._slots.num_free_on(rank))

    def deal(self, prefilling: Sequence[Sequence[Request]], rows: int, budget: int) -> list[list[int]]:
        dealt = []
        for mine in prefilling:
            left, counts = budget, []
            for sequence in mine[:rows]:
                counts.append(min(len(sequence.tokens) - sequence.prefilled, left))
                left -= counts[-1]
            dealt.append(counts)
        return dealt


class Traffic:
    """Requests with skewed lengths and shared prefixes; the same ones for the same seed."""

    def __init__(self, shares: bool) -> None:
        self._random = np.random.default_rng(0)
        self._shares = shares
        self._prefixes = [64 * int(n) for n in self._lengths(256, 2048, 0.7) // 64]
        chances = 1 / np.arange(1, 257)
        self._chances = chances / chances.sum()
        self._ids = itertools.count()
        self._rules = RequestRules(vocab_size=VOCAB, max_model_len=LONGEST, enable_prefix_caching=shares)

    def _lengths(self, count: int, mean: float, sigma: float) -> np.ndarray:
        return np.minimum(self._random.lognormal(np.log(mean) - sigma**2 / 2, sigma, count), LONGEST / 2 - 64).astype(
            int
        )

    def request(self, answer: int, begun: int = 0) -> Request:
        """Returns a request for `answer` more tokens, behind a prompt and `begun` tokens of its answer."""
        i = next(self._ids)
        prefix = int(self._random.choice(256, p=self._chances))
        own = int(self._lengths(1, 2048, 1.3)[0]) + 1
        shared = self._prefixes[prefix]
        tokens = np.full(shared + own + begun, 2, np.int64)
        tokens[: 64 if self._shares else 0] = prefix + 3
        tokens[shared : shared + 3] = [i % 900 + 3, i // 900 % 900 + 3, i // 810_000 + 3]
        sampling = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        prompt = tokens[: LONGEST - answer - 1].tolist()
        request = EngineRequest(request_id=i, prompt_token_ids=prompt, sampling=sampling)
        return sequence_of(prepare(request, self._rules))

    def answers(self, count: int) -> list[int]:
        """Returns lengths of answers."""
        return (self._lengths(count, 2048, 0.8) + 1).tolist()


class Replay:
    """A scheduler with its planners; the results of a step are there at the next one."""

    def __init__(self, ranks: int, rule: type[Balancer], **limits: Any) -> None:
        self.cfg = EngineConfig(
            max_model_len=LONGEST, num_pages=10_000, num_ranks=ranks, max_num_queued_reqs=10**6, **limits
        )
        self.scheduler = Scheduler(self.cfg, VOCAB)
        balancer = rule(self.cfg, self.scheduler.slots, self.scheduler.pages, keys_per_token(DEEPSEEK_V3))
        self.scheduler.admission.balancer = balancer
        view = EngineView(self.scheduler, None)  # type: ignore[arg-type]
        self._planners: dict[str, Any] = {"decode": DecodePlanner(view), "prefill": PrefillPlanner(view)}
        self._before: list[Planned] = []

    def step(self) -> list[Planned]:
        """Plans a step, and takes in the one before."""
        jobs: list[Planned] = []
        for planner in self._planners.values():
            jobs += planner.plan(jobs)
        number = self.scheduler.pages.begin_step()
        for job in self._before:
            shape = self.cfg.num_ranks, max(self.cfg.decode_buckets), 1
            results = ForwardResults(sampled=(np.ones(shape, np.int32),) if job.command.sample else ())
            self._planners[job.kind].collect(job, results, StepOutputs([], []))
        self.scheduler.pages.collect(number - 1)
        self._before = jobs
        return jobs


def prefill_loads(jobs: list[Planned]) -> np.ndarray:
    """Returns tokens and pairs of token and key per rank, `[2, X]`."""
    [job] = [job for job in jobs if job.kind == "prefill"]
    tokens = [sum(c.stop - c.start for c in mine) for mine in job.context.chunks]
    pairs = [sum((c.stop - c.start) * (c.start + c.stop) / 2 for c in mine) for mine in job.context.chunks]
    return np.array([tokens, pairs])


def seconds(stages: Any, loads: np.ndarray) -> float:
    """Returns the time of a step with `loads` `[2, X]` (tokens, and pairs of token and key), in seconds."""
    mine = [PlannedBatch(int(t), p / max(t, 1), 2) for t, p in loads.T.tolist() if t]
    each = [stages(DEEPSEEK_V3, RATES, batch) for batch in mine]
    even = stages(DEEPSEEK_V3, RATES, PlannedBatch(int(loads[0].mean()), 0, 2))
    slowest = {name: max(stage[name] for stage in each) for name in even} | {"experts": even["experts"]}
    moe = slowest["shared_expert"] + slowest["experts"] + slowest["router"]
    attention = slowest["project"] + slowest["attention"]
    return 61 * attention + 58 * moe + 3 * slowest["mlp"] + slowest["head"]


def run_prefill(ranks: int, steps: int, rule: type[Balancer]) -> dict[str, Any]:
    """Returns how even the steps of a prefill instance with a backlog are, and its tokens per second."""
    replay = Replay(ranks, rule, max_num_seqs=64, max_num_batched_tokens=8192, role="prefill")
    traffic, scheduler = Traffic(shares=True), replay.scheduler
    loads, times, arrived, waits = [], [], {}, []
    for _ in range(steps + steps // 4):
        for _ in range(BACKLOG * ranks - len(scheduler.sequences)):
            scheduler.add(request := traffic.request(1))
            arrived[request.id] = len(times)
        jobs = replay.step()
        loads.append(prefill_loads(jobs))
        times.append(seconds(prefill_stages, loads[-1]))
        ended = [
            c.sequence.id
            for job in jobs
            if job.kind == "prefill"
            for mine in job.context.chunks
            for c in mine
            if c.is_last
        ]
        waits += [sum(times[arrived[i] :]) for i in ended if arrived[i] >= steps // 4]
    seen = np.array(loads[steps // 4 :])  # [steps, 2, X]
    cost = seen[:, 0] + seen[:, 1] / scheduler.balancer.keys
    time = sum(times[steps // 4 :])
    admission = scheduler.admission
    return {
        "tokens": _over_mean(seen[:, 0]),
        "attention": _over_mean(seen[:, 1]),
        "cost": _over_mean(cost),
        "hit_rate": round(admission.prefix_hits / admission.prefix_queries, 3),
        "ms_per_step": round(1e3 * time / steps, 1),
        "seconds_to_first_token": np.round(np.percentile(waits, (50, 99)), 1).tolist(),
        "tokens_per_second_and_rank": round(float(seen[:, 0].sum()) / time / ranks),
    }


def run_decode(ranks: int, steps: int, rule: type[Balancer]) -> dict[str, Any]:
    """Returns how even the ranks of a decode instance are, and its time per step."""
    replay = Replay(ranks, rule, max_num_seqs=128, max_num_batched_tokens=2**17, enable_prefix_caching=False)
    traffic, slots = Traffic(shares=False), replay.scheduler.slots
    random, rate = np.random.default_rng(1), 0.0
    answers = np.array(traffic.answers(4096))
    rate = RUNNING * ranks / answers.mean()
    for answer in random.choice(answers, RUNNING * ranks, p=answers / answers.sum()).tolist():
        begun = int(random.integers(answer))
        replay.scheduler.add(traffic.request(answer - begun, begun))
    loads = []
    for step in range(2 * steps):
        for answer in random.choice(answers, random.poisson(rate)).tolist():
            replay.scheduler.add(traffic.request(answer))
        replay.step()
        if step >= steps:
            loads.append([slots.running.copy(), slots.num_tokens()])
    seen = np.array(loads)  # [steps, 2, X]
    time = sum(seconds(decode_stages, step) for step in seen)
    return {
        "requests": _over_mean(seen[:, 0]),
        "cache": _over_mean(seen[:, 1]),
        "requests_per_rank": round(float(seen[:, 0].mean()), 1),
        "ms_per_step": round(1e3 * time / steps, 2),
    }


def _over_mean(loads: np.ndarray) -> list[float]:
    """Returns the largest over the mean of `[steps, X]`: of all steps, and of the worst in a hundred."""
    ratio = loads.max(axis=1) / loads.mean(axis=1)
    return [round(float(x), 3) for x in (loads.max(axis=1).sum() / loads.mean(axis=1).sum(), np.percentile(ratio, 99))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("prefill", "decode"))
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=0, help="300 of prefill, 2000 of decode if not given")
    args = parser.parse_args()
    run, steps = {"prefill": (run_prefill, 300), "decode": (run_decode, 2000)}[args.kind]
    before, now = (run(args.ranks, args.steps or steps, rule) for rule in (FewestRunning, Balancer))
    print("before", json.dumps(before), "now", json.dumps(now), sep="\n")
    print(f"time per step, before over now: {before['ms_per_step'] / now['ms_per_step']:.3f}")
    if args.kind == "prefill":
        rate = "tokens_per_second_and_rank"
        print(f"tokens per second, now over before: {now[rate] / before[rate]:.3f}")


if __name__ == "__main__":
    main()
