"""Balancing decisions at DeepSeek-V3's size: 58 layers of 256 experts in 288 replicas.

    python -m benchmarks.eplb

Prints, for both published deployments, the time of a decision, how even it makes a lognormal load, and how many
replicas keep their expert when the load drifts a little (20 % per decision). Then, for a decode step on 144 devices
under a Zipf load, how evenly the replicas of an expert share its rows as `choose_replicas` chooses them, and when drawn
at random. Last, how long choosing takes here, and how many times longer by cumulated one-hot counts.
"""

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from sharding.experts.eplb import ExpertMap, balancedness, keep_in_place, rebalance_experts
from sharding.experts.placement import choose_replicas, placement_of

ROUNDS = 21
LAYERS, EXPERTS, REPLICAS, GROUPS, TOP_K = 58, 256, 288, 8, 8
DEVICES = 144
STEPS = 8
ZIPF = 0.5


def main() -> None:
    rng = np.random.default_rng(0)
    weight = rng.lognormal(size=(LAYERS, EXPERTS))
    drifted = weight * rng.lognormal(sigma=0.2, size=weight.shape)
    for name, nodes, gpus in (("prefill, 4 nodes, hierarchical", 4, 32), ("decode, 18 nodes, global", 18, 144)):
        seconds, keeping = [], []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            result = rebalance_experts(weight, REPLICAS, GROUPS, nodes, gpus)
            seconds.append(time.perf_counter() - started)
            new = rebalance_experts(drifted, REPLICAS, GROUPS, nodes, gpus)
            started = time.perf_counter()
            kept = keep_in_place(new, result, GROUPS, nodes, gpus)
            keeping.append(time.perf_counter() - started)
        even = balancedness(weight, result, gpus).mean()
        stay = [float((m.phy2log == result.phy2log).mean()) for m in (new, kept)]
        print(f"{name}: median {1e3 * statistics.median(seconds):.1f} ms, balancedness {even:.3f} (lognormal load)")
        print(
            f"  keeping experts in place: {1e3 * statistics.median(keeping):.1f} ms, "
            f"{stay[1]:.0%} of the replicas keep their expert, {stay[0]:.0%} without"
        )
    print_replica_choice(rng)
    print_choice_times(rng)


def print_replica_choice(rng: np.random.Generator) -> None:
    """Prints the rows of the busiest replica of an expert over its replicas' mean; averages experts and steps."""
    load = rng.permutation(1 / np.arange(1, EXPERTS + 1) ** ZIPF)[None]
    expert_map = rebalance_experts(load, REPLICAS, GROUPS, 18, DEVICES)
    placement = placement_of(expert_map, REPLICAS - EXPERTS + 1)
    choose = jax.jit(jax.vmap(choose_replicas, (0, None, None, 0)))
    for tokens in (16, 128):
        excess: dict[str, list[float]] = {"in turn": [], "at random": []}
        for _ in range(STEPS):
            # Draws without repetition, in proportion to the load: the largest of log(load) plus Gumbel noise.
            noise = rng.gumbel(size=(DEVICES, tokens, EXPERTS))
            ids = np.argpartition(-(np.log(load) + noise), TOP_K, axis=2)[..., :TOP_K].astype(np.int32)
            in_turn = np.asarray(choose(ids, placement.replicas[0], placement.copies[0], np.arange(DEVICES)))
            column = rng.integers(0, placement.copies[0][ids])
            excess["in turn"].append(_excess(in_turn, expert_map))
            excess["at random"].append(_excess(placement.replicas[0][ids, column], expert_map))
        figures = ", ".join(f"{name} {statistics.mean(values):.4f}" for name, values in excess.items())
        print(f"copies, Zipf {ZIPF}, {DEVICES} devices of {tokens} tokens, busiest over mean: {figures}")


def print_choice_times(rng: np.random.Generator) -> None:
    """Prints the time of choosing replicas for one layer on this device, and its ratio by cumulated one-hot counts."""
    expert_map = rebalance_experts(rng.lognormal(size=(1, EXPERTS)), REPLICAS, GROUPS, 18, DEVICES)
    placement = placement_of(expert_map, REPLICAS - EXPERTS + 1)
    ways = {"sorted": jax.jit(choose_replicas), "one-hot": jax.jit(choose_by_one_hot)}
    for tokens in (64, 1024, 8192):
        ids = np.argsort(rng.random((tokens, EXPERTS)), axis=1)[:, :TOP_K].astype(np.int32)
        arguments = (ids, placement.replicas[0], placement.copies[0], 3)
        chosen = [np.asarray(way(*arguments)) for way in ways.values()]
        np.testing.assert_array_equal(*chosen)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, way in ways.items():
                started = time.perf_counter()
                jax.block_until_ready(way(*arguments))
                seconds[name].append(time.perf_counter() - started)
        in_order, one_hot = (statistics.median(seconds[name]) for name in ways)
        print(f"choosing replicas of {tokens} tokens: {1e3 * in_order:.2f} ms, one-hot {one_hot / in_order:.0f} times")


def choose_by_one_hot(ids: jax.Array, replicas: jax.Array, copies: jax.Array, device: int) -> jax.Array:
    """`choose_replicas` with counts cumulated over `[T * K, E]`."""
    flat = ids.reshape(-1)
    wanted = flat[:, None] == jnp.arange(copies.shape[0])
    turn = (jnp.cumsum(wanted, axis=0, dtype=jnp.int32) * wanted).sum(axis=1) - 1 + device
    return replicas[flat, turn % copies[flat]].reshape(ids.shape)


def _excess(chosen: np.ndarray, expert_map: ExpertMap) -> float:
    rows = np.bincount(chosen.ravel(), minlength=REPLICAS)
    copied = np.flatnonzero(expert_map.logcnt[0] > 1)
    copies = [rows[expert_map.log2phy[0, expert][: expert_map.logcnt[0, expert]]] for expert in copied]
    return statistics.mean(float(c.max() / c.mean()) for c in copies)


if __name__ == "__main__":
    main()
