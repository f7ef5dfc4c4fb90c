"""How often the buffers of an exchange are too small, and what larger ones cost.

    JAX_PLATFORMS=cpu python -m benchmarks.room [--layers N]        minutes; needs no GPU and compiles nothing

The first table has the bytes of a micro-batch and layer of DeepSeek-V3's two published units: with the buffers as they
are, and with those for the worst case, whether they cross at once or in a fixed number of rounds. The second draws the
routing of layers, even and with one device of each node chosen more often than the others, and counts the layers in
which a queue is longer than its buffer, or a device's experts have more pairs than room.
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterator

import numpy as np

from sharding.experts.exchange import Exchange
from sharding.experts.traffic import LayerRows
from sharding.mesh import Machine
from sharding.wire.collectives import Overlap

TOP_K, REPLICAS, HIDDEN = 8, 288, 7168
CASES = (("decode, 64", Machine(18, 8), 64, 1), ("prefill, 8,192", Machine(4, 8), 8192, 40))
"""A micro-batch of the two published units: name, devices, tokens per device; and of how many layers one is drawn."""
UNEVEN = (1.0, 1.1, 1.25, 1.5, 2.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=400, help="layers to draw for each line of decode")
    args = parser.parse_args()
    for table in (sizes(), drawn(args.layers)):
        for line in table:
            print("| " + " | ".join(line) + " |", flush=True)
        print()
    return 0


def sizes() -> Iterator[list[str]]:
    """Yields the table of bytes."""
    yield ["tokens of each device", "buffers", "rows per pair", "MB in the node", "MB to others", "MB that arrive"]
    yield ["---"] * 6
    for name, machine, tokens, _ in CASES:
        rows = LayerRows.from_widths(tokens, TOP_K, HIDDEN, fp8_dispatch=True)
        served = Exchange.from_layer_by_node(machine, REPLICAS // machine.devices, rows, Overlap.NONE)
        outer, inner = served.hops
        most = dataclasses.replace(outer, capacity=tokens), dataclasses.replace(inner, capacity=tokens * machine.nodes)
        for what, exchange in (("as served", served), ("worst case", dataclasses.replace(served, hops=most))):
            sent, hops = exchange.traffic(rows), exchange.hops
            arrive = sum(hop.peers * hop.capacity for hop in hops) * rows.dispatch_bytes
            yield [
                *(name, what, " and ".join(f"{hop.capacity:,}" for hop in hops)),
                *(f"{each / 1e6:,.0f}" for each in (sent.device_bytes - sent.node_bytes, sent.node_bytes, arrive)),
            ]


def drawn(layers: int) -> Iterator[list[str]]:
    """Yields the table of draws."""
    yield [
        *("tokens of each device", "nodes x GPUs", "chosen as often", "rows per pair of nodes", "of devices"),
        *("longest queues", "room for pairs", "most pairs", "layers without room for a queue", "for pairs"),
    ]
    yield ["---"] * 10
    for name, machine, tokens, fewer in CASES:
        rows = LayerRows.from_widths(tokens, TOP_K, HIDDEN, fp8_dispatch=True)
        exchange = Exchange.from_layer_by_node(machine, REPLICAS // machine.devices, rows, Overlap.NONE)
        (outer, inner), pairs = exchange.hops, exchange.pairs
        for uneven in UNEVEN:
            rng = np.random.default_rng(0)
            count = max(1, layers // fewer)
            found = np.array([most_of_a_layer(rng, machine, tokens, uneven) for _ in range(count)])
            lost = found > (outer.capacity, inner.capacity, pairs or found.max())
            yield [
                *(name, f"{machine.nodes} x {machine.gpus}", f"{uneven:g} times", f"{outer.capacity:,}"),
                *(f"{inner.capacity:,}", " and ".join(f"{n:,}" for n in found.max(axis=0)[:2])),
                *(f"{pairs:,}" if pairs else "all", f"{found.max(axis=0)[2]:,}"),
                *(f"{sum(column)} of {count}" for column in (lost[:, :2].any(axis=1), lost[:, 2])),
            ]


def most_of_a_layer(rng: np.random.Generator, machine: Machine, tokens: int, uneven: float) -> tuple[int, int, int]:
    """Draws a layer; returns the longest queues to a node and to a device of a node, and the most pairs of a device.

    One device of each node is chosen `uneven` times as often as the others.
    """
    likely = np.ones(machine.devices, np.float32)
    likely[:: machine.gpus] = uneven
    each = REPLICAS // machine.devices
    goes, pairs = np.zeros((machine.devices, tokens, machine.devices), bool), np.zeros(machine.devices, int)
    for device in range(machine.devices):  # one at a time, for memory
        keys = rng.standard_exponential((tokens, REPLICAS), np.float32) / np.repeat(likely, each)
        chosen = np.argpartition(keys, TOP_K, axis=1)[:, :TOP_K] // each
        np.put_along_axis(goes[device], chosen, True, axis=1)
        pairs += np.bincount(chosen.ravel(), minlength=machine.devices)
    to_node = goes.reshape(*goes.shape[:2], machine.nodes, machine.gpus).any(axis=3).sum(axis=1)
    to_device = goes.sum(axis=1).reshape(machine.nodes, machine.gpus, machine.nodes, machine.gpus).sum(axis=0)
    return int(to_node.max()), int(to_device.max()), int(pairs.max())


if __name__ == "__main__":
    sys.exit(main())
