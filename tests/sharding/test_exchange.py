"""Every transport must give what one device would, for any routing, on meshes of forced CPU devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from sharding.experts.capacity import expected_capacity, overflow_capacity
from sharding.experts.exchange import Exchange
from sharding.experts.hop import Hop
from sharding.experts.ring import Ring
from sharding.experts.rows import TokenRows
from sharding.experts.transport import Transport, pad_rounds
from sharding.mesh import Machine

T, K, D, EXPERTS = 24, 4, 16, 16
MORE = 4
AXES = ("node", "gpu")
ALL = PartitionSpec(AXES)


def dense(x: np.ndarray, ids: np.ndarray, weights: np.ndarray, w: np.ndarray) -> np.ndarray:
    y = np.zeros_like(x)
    for t, k in np.argwhere(ids >= 0):
        y[t] += weights[t, k] * (x[t] @ w[ids[t, k]])
    return y


def local_experts(w: jax.Array, rows: TokenRows) -> jax.Array:
    product = jnp.einsum("td,edf->tef", rows.payload["x"] * rows.payload["scale"], w)
    chosen = jnp.take_along_axis(product, jnp.maximum(rows.ids, 0)[:, :, None], axis=1)
    return (jnp.where(rows.ids >= 0, rows.weights, 0)[:, :, None] * chosen).sum(axis=1)


def transport(kind: str, nodes: int, gpus: int, capacity: int) -> Transport:
    machine, each = Machine(nodes, gpus), EXPERTS // (nodes * gpus)
    if kind == "ring":
        return Ring(machine, each)
    if kind == "flat":
        return Exchange(machine, each, (Hop(AXES, nodes * gpus, each, capacity, MORE),))
    to_nodes = Hop(("node",), nodes, each * gpus, capacity, MORE)
    return Exchange(machine, each, (to_nodes, Hop(("gpu",), gpus, each, 2 * capacity, MORE)))


def both_halves(transport: Transport, rows: TokenRows, experts) -> tuple[jax.Array, jax.Array]:
    """Sums [T, D], and rounds [1, MAX_HOPS] of this device."""
    y, rounds = transport.finish(transport.start(rows, experts), experts)
    return y, pad_rounds(rounds)[None]


@functools.cache
def program(kind: str, nodes: int, gpus: int, capacity: int):
    mesh = Mesh(np.array(jax.devices()[: nodes * gpus]).reshape(nodes, gpus), AXES)

    def step(x, ids, weights, w):
        rows = TokenRows({"x": x / 2, "scale": jnp.full((T, 1), 2.0)}, ids, weights)
        return both_halves(transport(kind, nodes, gpus, capacity), rows, functools.partial(local_experts, w))

    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(ALL,) * 4, out_specs=(ALL, ALL), check_vma=False))


def route(kind: str, tokens: int, rng: np.random.Generator) -> np.ndarray:
    if kind == "one expert for all":
        return np.full((tokens, K), [[3, -1, -1, -1]])
    if kind == "nobody":
        return np.full((tokens, K), -1)
    if kind == "one busy rank":
        return np.where(np.arange(tokens)[:, None] < T, np.full((tokens, K), [[3, 9, -1, -1]]), -1)
    ids = np.argsort(rng.random((tokens, EXPERTS)), axis=1)[:, :K]
    if kind == "some unset":
        ids = np.where(rng.random(ids.shape) < 0.3, -1, ids)
    return ids


@pytest.mark.parametrize("routing", ["random", "some unset", "one expert for all", "one busy rank", "nobody"])
@pytest.mark.parametrize(("kind", "nodes", "gpus"), [("ring", 2, 4), ("flat", 1, 2), ("flat", 2, 4), ("nodes", 2, 4)])
def test_equals_a_single_device(kind: str, nodes: int, gpus: int, routing: str) -> None:
    rng = np.random.default_rng(0)
    tokens = T * nodes * gpus
    x, w = rng.normal(size=(tokens, D)).astype(np.float32), rng.normal(size=(EXPERTS, D, D)).astype(np.float32)
    ids, weights = route(routing, tokens, rng).astype(np.int32), rng.random((tokens, K)).astype(np.float32)
    y, rounds = program(kind, nodes, gpus, 8)(x, ids, weights, w)
    np.testing.assert_allclose(y, dense(x, ids, weights, w), rtol=2e-5, atol=2e-5)
    if kind != "ring":
        peers = nodes * gpus if kind == "flat" else nodes
        assert (np.asarray(rounds)[:, 0] == rounds_of_first_hop(ids, peers, 8)).all()


def rounds_of_first_hop(ids: np.ndarray, peers: int, capacity: int) -> int:
    """A recount: the longest queue of any rank for any peer, in rounds; the first always runs."""
    goes = (ids[:, :, None] // (EXPERTS // peers) == np.arange(peers)).any(axis=1)  # [tokens, peers]
    longest = goes.reshape(-1, T, peers).sum(axis=1).max()
    return 1 + max(0, -(-(longest - capacity) // MORE))


def test_a_token_crosses_to_a_node_once() -> None:
    """All four experts of each token live on node 1: its buffer of T rows must do in one round."""
    ids = np.full((T * 8, K), [[8, 10, 12, 14]], np.int32)
    ones = np.ones((T * 8, D), np.float32)
    w = np.ones((EXPERTS, D, D), np.float32)
    y, rounds = program("nodes", 2, 4, T)(ones, ids, np.ones((T * 8, K), np.float32), w)
    np.testing.assert_allclose(y, 4 * D)
    assert (np.asarray(rounds)[:, 0] == 1).all()


@pytest.mark.parametrize(
    ("tokens", "peers", "experts", "pairs", "capacity"),
    [(128, 144, 8, 144 * 144, 17), (4, 8, 8, 64, 4), (4096, 32, 8, 32 * 32, 1034), (128, 18, 8, 144 * 18, 72)],
)
def test_capacity_stays_near_the_expected_load(
    tokens: int, peers: int, experts: int, pairs: int, capacity: int
) -> None:
    assert expected_capacity(tokens, peers, experts, pairs) == capacity
    assert capacity <= 2.5 * max(8, tokens * experts / peers)
    assert overflow_capacity(capacity) <= capacity


def test_a_layer_of_the_144_gpu_deployment_needs_one_round() -> None:
    """Drawn evenly, all queues of the node-limited exchange fit; the flat one takes overflow rounds for the longest."""
    nodes, gpus, tokens, chosen, slots = 18, 8, 128, 8, 288
    ranks = nodes * gpus
    drawn = np.random.default_rng(0).random((ranks * tokens, slots), np.float32)
    rank = np.argpartition(drawn, chosen, axis=1)[:, :chosen] // (slots // ranks)
    goes = np.zeros((ranks * tokens, ranks), bool)
    np.put_along_axis(goes, rank, True, axis=1)
    flat = goes.reshape(ranks, tokens, ranks).sum(axis=1)
    to_nodes = goes.reshape(ranks, tokens, nodes, gpus).any(axis=3).sum(axis=1)
    inside = flat.reshape(nodes, gpus, nodes, gpus).sum(axis=0)  # rows that meet on [gpu, node] on their way to [gpu]
    pairs = {"flat": ranks * ranks, "to_nodes": ranks * nodes, "inside": ranks * gpus}
    assert to_nodes.max() <= expected_capacity(tokens, nodes, chosen, pairs["to_nodes"])
    assert inside.max() <= expected_capacity(tokens * nodes, ranks, chosen, pairs["inside"])
    capacity = expected_capacity(tokens, ranks, chosen, pairs["flat"])
    assert capacity < flat.max() <= capacity + 2 * overflow_capacity(capacity)
