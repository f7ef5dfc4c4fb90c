"""Live rebalancing of the bundled model over eight CPU devices, and a picture of the devices' load before and after.

    JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m benchmarks.eplb_live \\
        [--plot docs/expert_load.png]

Requests of one kind, pieces of one module of Python's standard library, keep the engine busy. After 256 steps it
decides and moves experts while it serves; the load of a full window of later steps, of other requests, is "after".
"""

import argparse
import inspect
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

from dsv3.config.options import EngineOptions
from dsv3.engine.build import build_engine, bundled_model
from dsv3.engine.engine import Engine
from dsv3.sampling_params import SamplingParams
from dsv3.scheduler.request import EngineRequest
from dsv3.text.tokenizer import Tokenizer
from sharding.experts.eplb import ExpertMap, balancedness, device_load

DEVICES, REDUNDANT = 8, 8
INTERVAL, WINDOW_STEPS = 256, 1024
PROMPT, ANSWER = 32, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    options = EngineOptions(
        data_parallel_size=DEVICES,
        enable_expert_parallel=True,
        num_redundant_experts=REDUNDANT,
        enable_eplb=True,
        eplb_interval=INTERVAL,
        max_num_seqs=4,
        max_model_len=PROMPT + ANSWER,
        max_num_batched_tokens=64,
    )
    engine = build_engine(bundled_model(), options)
    engine.warm_up()
    before, after = measure(engine)
    for name, (load, expert_map) in {"before": before, "after": after}.items():
        even = balancedness(load, expert_map, DEVICES)
        print(f"{name}: balancedness {even.mean():.3f} (by layer {', '.join(f'{x:.3f}' for x in even)})")
    print(engine.stats())
    if arguments.plot is not None:
        draw(arguments.plot, before, after)


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

    shares = [device_load(load, expert_map, DEVICES) for load, expert_map in windows]
    shares = [share / share.mean(axis=1, keepdims=True) for share in shares]
    layers = shares[0].shape[0]
    figure = Figure(figsize=(3.4 * layers, 2.8), layout="constrained")
    for layer, axes in enumerate(figure.subplots(1, layers, sharey=True)):
        for i, (share, name, color) in enumerate(zip(shares, ("before", "after"), ("#b0b7c3", "#2563eb"), strict=True)):
            even = 1 / share[layer].max()
            axes.bar(np.arange(DEVICES) + 0.4 * i - 0.2, share[layer], 0.4, label=f"{name}: {even:.2f}", color=color)
        axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
        axes.set(title=f"MoE layer {layer}", xlabel="device", xticks=range(DEVICES))
        axes.legend(title="balancedness", fontsize="small", frameon=False)
        axes.set_ylim(0, 1.35 * max(share.max() for share in shares))
    figure.axes[0].set_ylabel("load over mean")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
