"""Balancing experts: decisions at DeepSeek-V3's size, and a live rebalancing of the bundled model.

    python -m benchmarks.eplb
    JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m benchmarks.eplb --live \
        [--plot docs/expert_load.png]

58 layers of 256 experts are placed in 288 replicas. A line has, for each published deployment, the time of a
decision, how even it makes a lognormal load, and how many replicas keep their expert when the load drifts a little
(20 % per decision), with `keep_in_place` and without.

With `--live` requests of one kind, pieces of one module of Python's standard library, keep an engine of eight CPU
devices busy. After 256 steps it decides and moves experts while it serves; the load of a full window of later steps, of
other requests, is "after". The picture has the devices' load before and after.
"""

import inspect
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engines import bundled_engine
from benchmarks.record import Cell, Report, arguments, elapsed, run, spread
from dsv3.engine.build import bundled_model
from dsv3.engine.engine import Engine
from dsv3.sampling_params import SamplingParams
from dsv3.scheduler.request import EngineRequest
from dsv3.text.tokenizer import Tokenizer
from sharding.experts.eplb import ExpertMap, balancedness, device_load, keep_in_place, rebalance_experts

ROUNDS = 21
LAYERS, EXPERTS, REPLICAS, GROUPS = 58, 256, 288, 8
LIVE_DEVICES, REDUNDANT = 8, 8
INTERVAL, WINDOW_STEPS = 256, 1024
PROMPT, ANSWER = 32, 64
ROWS = 4


def main(report: Report) -> None:
    given = arguments(__doc__, live=False, plot=Path)
    if given.live:
        live(report, given.plot)
        return
    columns = ["deployment", "a decision (ms)", "keeping in place (ms)", "balancedness", "replicas that stay (%)",
               "without keeping (%)"]  # fmt: skip
    report.table("Decisions", columns, decisions(np.random.default_rng(0)))


def decisions(rng: np.random.Generator) -> Iterator[list[Cell]]:
    """Yields a line per published deployment."""
    weight = rng.lognormal(size=(LAYERS, EXPERTS))
    drifted = weight * rng.lognormal(sigma=0.2, size=weight.shape)
    for name, nodes, gpus in (("prefill, 4 nodes, hierarchical", 4, 32), ("decode, 18 nodes, global", 18, 144)):
        seconds, keeping = [], []
        result = rebalance_experts(weight, REPLICAS, GROUPS, nodes, gpus)
        new = rebalance_experts(drifted, REPLICAS, GROUPS, nodes, gpus)
        kept = keep_in_place(new, result, GROUPS, nodes, gpus)
        for _ in range(ROUNDS):
            seconds.append(1e3 * elapsed(lambda: rebalance_experts(weight, REPLICAS, GROUPS, nodes, gpus)))  # noqa: B023
            keeping.append(1e3 * elapsed(lambda: keep_in_place(new, result, GROUPS, nodes, gpus)))  # noqa: B023
        even = balancedness(weight, result, gpus).mean()
        stay = [100 * float((each.phy2log == result.phy2log).mean()) for each in (kept, new)]
        yield [name, spread(seconds, 1), spread(keeping, 1), even, *stay]


# A live rebalancing.


def live(report: Report, plot: Path | None) -> None:
    """Reports the devices' load before and after the first move."""
    engine = bundled_engine(
        data_parallel_size=LIVE_DEVICES, enable_expert_parallel=True, num_redundant_experts=REDUNDANT, enable_eplb=True,
        eplb_interval=INTERVAL, max_num_seqs=ROWS, max_model_len=PROMPT + ANSWER, max_num_batched_tokens=64,
    )  # fmt: skip
    windows = measure(engine)
    even = [balancedness(load, expert_map, LIVE_DEVICES) for load, expert_map in windows]
    rows = ([name, each.mean(), *each] for name, each in zip(("before", "after"), even, strict=True))
    layers = [f"layer {i}" for i in range(len(even[0]))]
    title = f"Balancedness; {engine.stats().recompilations} recompilations"
    report.table(title, ["window", "mean", *layers], rows)
    if plot is not None:
        draw(plot, *windows)


def measure(engine: Engine) -> tuple[Any, Any]:
    """Load and map of the window before the first move, and of a window after it."""
    balancer, requests = engine.planners["experts"], requests_of_one_kind()
    assert balancer is not None
    before, moved_at = (balancer.load, balancer.expert_map), 0
    while not moved_at or engine.stats().steps < moved_at + WINDOW_STEPS:
        if not engine.stats().waiting:
            engine.add(next(requests))
        engine.step()
        experts = engine.stats().jobs["experts"]
        if experts is not None and experts.moved == 0:
            before = balancer.load, balancer.expert_map
        elif not moved_at:
            moved_at = engine.stats().steps
    return before, (balancer.load, balancer.expert_map)


def requests_of_one_kind() -> Any:
    """Pieces of `tarfile`'s source, each with a seed of its own, for ever."""
    tokens = Tokenizer.from_directory(bundled_model()).encode(inspect.getsource(tarfile))
    for number, start in enumerate(np.random.default_rng(0).integers(0, len(tokens) - PROMPT, 2**20)):
        sampling = SamplingParams(max_tokens=ANSWER, temperature=0.7, seed=number, ignore_eos=True)
        prompt = tokens[start : start + PROMPT]
        yield EngineRequest(request_id=number, prompt_token_ids=prompt, sampling=sampling)


def draw(path: Path, *windows: tuple[np.ndarray, ExpertMap]) -> None:
    """One panel a layer: each device's share of the load, before and after; 1 is an even share."""
    from matplotlib.figure import Figure

    shares = [device_load(load, expert_map, LIVE_DEVICES) for load, expert_map in windows]
    shares = [share / share.mean(axis=1, keepdims=True) for share in shares]
    layers = shares[0].shape[0]
    figure = Figure(figsize=(3.4 * layers, 2.8), layout="constrained")
    for layer, axes in enumerate(figure.subplots(1, layers, sharey=True)):
        for i, (share, name, color) in enumerate(zip(shares, ("before", "after"), ("#b0b7c3", "#2563eb"), strict=True)):
            even = 1 / share[layer].max()
            axes.bar(
                np.arange(LIVE_DEVICES) + 0.4 * i - 0.2, share[layer], 0.4, label=f"{name}: {even:.2f}", color=color
            )
        axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
        axes.set(title=f"MoE layer {layer}", xlabel="device", xticks=range(LIVE_DEVICES))
        axes.legend(title="balancedness", fontsize="small", frameon=False)
        axes.set_ylim(0, 1.35 * max(share.max() for share in shares))
    figure.axes[0].set_ylabel("load over mean")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    run(main)
