"""Every transport on CPU meshes gives the result of a single device, or reports overflow.

"library" is NCCL EP with a stand-in for NVIDIA's library, in halves: a call that sends, and one that receives. Rows of
"bulk" go by its high throughput, in chunks.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from sharding.collectives import Overlap
from sharding.experts.capacity import expected_capacity, headroom, pair_capacity
from sharding.experts.exchange import Exchange
from sharding.experts.hop import Hop
from sharding.experts.library_hop import LibraryHop
from sharding.experts.rows import Lines, TokenRows, fill_lines, unpacked
from sharding.experts.traffic import LayerRows
from sharding.experts.transport import Ring, Transport
from sharding.mesh import Machine
from sharding.words import shapes_of, to_words
from tests.sharding import nccl_ep

T, K, D, EXPERTS = 24, 4, 16, 16
PAIRS = 150
"""Pairs that the experts of a device have capacity for: random tokens fit, all tokens on one device do not."""
CHUNK = 10
"""Tokens of a call with high throughput: the last one has 4."""
AXES = ("node", "gpu")
ALL = PartitionSpec(AXES)


def dense(x: np.ndarray, ids: np.ndarray, weights: np.ndarray, w: np.ndarray) -> np.ndarray:
    y = np.zeros_like(x)
    for t, k in np.argwhere(ids >= 0):
        y[t] += weights[t, k] * (x[t] @ w[ids[t, k]])
    return y


def local_experts(w: jax.Array, rows: TokenRows) -> tuple[jax.Array, jax.Array]:
    rows = unpacked(rows)
    product = jnp.einsum("td,edf->tef", rows.payload["x"] * rows.payload["scale"], w)
    selected = jnp.take_along_axis(product, jnp.maximum(rows.ids, 0)[:, :, None], axis=1)
    y = (jnp.where(rows.ids >= 0, rows.weights, 0)[:, :, None] * selected).sum(axis=1)
    return y, (jnp.sum(rows.ids >= 0) > PAIRS).astype(jnp.int32)


def transport(kind: str, nodes: int, gpus: int, capacity: int) -> Transport:
    """Returns a transport by name; "packed" is "nodes" with sums as int8."""
    machine, each = Machine(nodes, gpus), EXPERTS // (nodes * gpus)
    if kind == "library":
        return Exchange(machine, each, (LibraryHop(AXES, nodes * gpus, each, T, Overlap.HOOKS, row_bytes=4096),))
    if kind == "bulk":
        sizes = {"row_bytes": 4096, "chunk": CHUNK, "received": capacity * CHUNK}
        return Exchange(machine, each, (LibraryHop(AXES, nodes * gpus, each, T, Overlap.HOOKS, **sizes),))
    if kind == "ring":
        return Ring(machine, each)
    if kind == "flat":
        return Exchange(machine, each, (Hop(AXES, nodes * gpus, each, capacity),))
    first, second = (T, T) if capacity < 0 else (capacity, nodes * capacity)
    int8 = kind == "packed"
    hops = Hop(("node",), nodes, each * gpus, first, int8_sums=int8), Hop(("gpu",), gpus, each, second, int8_sums=int8)
    return Exchange(machine, each, hops)


def both_halves(transport: Transport, rows: TokenRows, experts) -> tuple[jax.Array, jax.Array]:
    """Sums [T, D], and how many buffers of this device overflowed [1]."""
    y, overflows = transport.finish(transport.start(rows, experts))
    return y, jnp.zeros(1, jnp.int32) if overflows is None else overflows[None]


@functools.cache
def program(kind: str, nodes: int, gpus: int, capacity: int, fp8: bool = False):
    """The jitted step of all ranks; with `fp8` rows are dispatched in e4m3, and sums are bfloat16."""
    mesh = Mesh(np.array(jax.devices()[: nodes * gpus]).reshape(nodes, gpus), AXES)
    if kind in ("library", "bulk"):
        nccl_ep.create_groups(mesh, [transport(kind, nodes, gpus, capacity).hops[0].key(K)])

    def step(x, ids, weights, w):
        x = (x / 2).astype(jnp.float8_e4m3fn if fp8 else x.dtype)

        def experts(rows: TokenRows) -> tuple[jax.Array, jax.Array]:
            rows = unpacked(rows)
            y, overflow = local_experts(w, rows._replace(payload=jax.tree.map(jnp.float32, rows.payload)))
            return y.astype(jnp.bfloat16 if fp8 else y.dtype), overflow

        rows = TokenRows({"x": x, "scale": jnp.full((T, 1), 2.0)}, ids, weights)
        return both_halves(transport(kind, nodes, gpus, capacity), rows, experts)

    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(ALL,) * 4, out_specs=(ALL, ALL), check_vma=False))


def route(kind: str, tokens: int, rng: np.random.Generator) -> np.ndarray:
    if kind == "one expert for all":
        return np.full((tokens, K), [[3, -1, -1, -1]])
    if kind == "none":
        return np.full((tokens, K), -1)
    if kind == "one busy rank":
        return np.where(np.arange(tokens)[:, None] < T, np.full((tokens, K), [[3, 9, -1, -1]]), -1)
    ids = np.argsort(rng.random((tokens, EXPERTS)), axis=1)[:, :K]
    if kind == "some unset":
        ids = np.where(rng.random(ids.shape) < 0.3, -1, ids)
    return ids


@pytest.mark.parametrize("routing", ["random", "some unset", "one expert for all", "one busy rank", "none"])
@pytest.mark.parametrize(
    ("kind", "nodes", "gpus", "capacity"),
    [
        ("ring", 2, 4, T),
        ("library", 2, 4, T),
        ("bulk", 2, 4, T),
        *((kind, 2, 4, size) for kind in ("flat", "nodes") for size in (T, 8)),
    ],
)
def test_equals_a_single_device_or_reports_overflow(
    kind: str, nodes: int, gpus: int, capacity: int, routing: str
) -> None:
    """A buffer of T rows per peer never overflows, also where all tokens select one expert."""
    rng = np.random.default_rng(0)
    tokens = T * nodes * gpus
    x, w = rng.normal(size=(tokens, D)).astype(np.float32), rng.normal(size=(EXPERTS, D, D)).astype(np.float32)
    ids, weights = route(routing, tokens, rng).astype(np.int32), rng.random((tokens, K)).astype(np.float32)
    y, overflows = map(np.asarray, program(kind, nodes, gpus, capacity)(x, ids, weights, w))
    if kind != "ring":
        lost = longest_queues(ids, nodes if kind == "nodes" else nodes * gpus) > capacity
        assert (overflows[lost] > 0).all()
        assert lost.any() == (capacity < T and routing != "none")
        full = np.bincount(ids[ids >= 0] * nodes * gpus // EXPERTS, minlength=nodes * gpus) > PAIRS
        assert full.any() == (routing == "one expert for all" and tokens > PAIRS)
        if not lost.any():  # the second hop has enough capacity here
            np.testing.assert_array_equal(overflows, full)
    if not overflows.any():
        np.testing.assert_allclose(y, dense(x, ids, weights, w), rtol=2e-5, atol=2e-5)
        if kind == "library":
            np.testing.assert_array_equal(y, program("flat", nodes, gpus, T)(x, ids, weights, w)[0])


def test_the_library_equals_the_ring_bit_for_bit() -> None:
    """Numbers of few bits, whose sums are exact: a ring adds in another order. Then experts that have moved."""
    rng = np.random.default_rng(0)
    ids = route("some unset", T * 8, rng).astype(np.int32)
    shapes = (T * 8, D), (EXPERTS, D, D), (T * 8, K)
    x, w, weights = (rng.integers(-8, 8, shape).astype(np.float32) for shape in shapes)
    ring, library, bulk = (program(kind, 2, 4, T)(x, ids, weights, w) for kind in ("ring", "library", "bulk"))
    np.testing.assert_array_equal(library[0], ring[0])
    np.testing.assert_array_equal(bulk[0], ring[0])
    order = rng.permutation(EXPERTS)
    moved = np.where(ids < 0, -1, np.argsort(order)[ids]).astype(np.int32)
    foreign = np.where(ids == 3, EXPERTS, ids)  # an expert that no device owns
    for kind in ("library", "bulk"):
        np.testing.assert_array_equal(program(kind, 2, 4, T)(x, moved, weights, w[order])[0], ring[0])
        _, overflows = program(kind, 2, 4, T)(x, foreign, weights, w)
        np.testing.assert_array_equal(overflows, (ids == 3).reshape(8, -1).any(axis=1))


def test_high_throughput_reports_rows_that_do_not_fit_where_they_arrive() -> None:
    """Devices whose rows of a chunk exceed the lines report it, and no other."""
    rng = np.random.default_rng(0)
    ids, weights = route("some unset", T * 8, rng).astype(np.int32), rng.random((T * 8, K)).astype(np.float32)
    x, w = rng.normal(size=(T * 8, D)).astype(np.float32), rng.normal(size=(EXPERTS, D, D)).astype(np.float32)
    y, overflows = map(np.asarray, program("bulk", 2, 4, 3)(x, ids, weights, w))
    goes = (ids[:, :, None] // (EXPERTS // 8) == np.arange(8)).any(axis=1).reshape(8, T, 8)
    arrive = np.stack([goes[:, first : first + CHUNK].sum(axis=(0, 1)) for first in range(0, T, CHUNK)])
    lost = (arrive > 3 * CHUNK).any(axis=0)
    assert 0 < lost.sum() < 8
    np.testing.assert_array_equal(overflows, lost)
    whole = ~goes[..., lost].any(axis=-1).reshape(-1)  # tokens of other devices
    np.testing.assert_allclose(y[whole], dense(x, ids, weights, w)[whole], rtol=2e-5, atol=2e-5)


def test_the_library_carries_fp8_with_scales_and_returns_bfloat16() -> None:
    """High throughput adds sums in the order of devices, so they can differ in the last bit."""
    rng = np.random.default_rng(0)
    ids, weights = route("random", T * 8, rng).astype(np.int32), rng.random((T * 8, K)).astype(np.float32)
    x, w = rng.normal(size=(T * 8, D)).astype(np.float32), rng.normal(size=(EXPERTS, D, D)).astype(np.float32)
    kinds = ("flat", "library", "bulk")
    flat, library, bulk = (np.asarray(program(kind, 2, 4, T, True)(x, ids, weights, w)[0]) for kind in kinds)
    assert library.dtype == jnp.bfloat16
    np.testing.assert_array_equal(library.view(np.uint16), flat.view(np.uint16))
    np.testing.assert_allclose(bulk.astype(np.float32), flat.astype(np.float32), rtol=2**-7, atol=2**-7)
    np.testing.assert_allclose(library.astype(np.float32), dense(x, ids, weights, w), rtol=0.2, atol=2)


def longest_queues(ids: np.ndarray, peers: int) -> np.ndarray:
    """The rows of each rank's longest queue, [ranks], recounted."""
    goes = (ids[:, :, None] // (EXPERTS // peers) == np.arange(peers)).any(axis=1)  # [tokens, peers]
    return goes.reshape(-1, T, peers).sum(axis=1).max(axis=1)


def test_packed_sums_have_a_small_error() -> None:
    """Each partial sum is rounded twice: inside a node, and between nodes."""
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(T * 8, D)).astype(np.float32), rng.normal(size=(EXPERTS, D, D)).astype(np.float32)
    ids, weights = route("random", T * 8, rng).astype(np.int32), rng.random((T * 8, K)).astype(np.float32)
    y, overflows = map(np.asarray, program("packed", 2, 4, T)(x, ids, weights, w))
    expected = dense(x, ids, weights, w)
    assert not overflows.any()
    assert 0 < np.sqrt(np.square(y - expected).mean() / np.square(expected).mean()) < 0.01


def test_lines_round_trip() -> None:
    """FP8 values and scales, as experts read them: the first array gathered, the others whole."""
    rng = np.random.default_rng(0)
    values, scale = (jnp.asarray(rng.normal(size=(4, n)), t) for n, t in ((6, jnp.float8_e4m3fn), (3, jnp.float32)))
    sent = TokenRows((values, scale), jnp.zeros((4, 1), jnp.int32), jnp.ones((4, 1)))
    lines = Lines.from_words(to_words(sent), shapes_of(sent.payload))
    row = jnp.array([3, 4, 0, 3])
    there = np.array([0, 2, 3])
    np.testing.assert_array_equal(lines.gather(row)[there].astype(jnp.float32), values[row[there]].astype(jnp.float32))
    np.testing.assert_array_equal(lines.array(1), scale)
    again = unpacked(sent._replace(payload=lines)).payload
    np.testing.assert_array_equal(again[0].astype(jnp.float32), values.astype(jnp.float32))
    np.testing.assert_array_equal(again[1], scale)
    moved = fill_lines(sent._replace(payload=lines), jnp.array([1, 3, 0, 4]))
    assert np.asarray(moved[:, -2]).tolist() == [0, 0, 0, 2**32 - 1], "a line without a row selects nothing"
    np.testing.assert_array_equal(moved[:3, :-2], to_words(sent)[jnp.array([1, 3, 0]), :-2])


def test_a_token_is_sent_to_a_node_once() -> None:
    """All four experts of each token are on node 1: a buffer of T rows suffices; only the experts overflow."""
    ids = np.full((T * 8, K), [[8, 10, 12, 14]], np.int32)
    ones = np.ones((T * 8, D), np.float32)
    w = np.ones((EXPERTS, D, D), np.float32)
    y, overflows = program("nodes", 2, 4, T)(ones, ids, np.ones((T * 8, K), np.float32), w)
    np.testing.assert_allclose(y, 4 * D)
    assert np.asarray(overflows).tolist() == [0] * 4 + [1] * 4


def test_the_forwarding_device_reports_overflow_of_the_second_hop() -> None:
    """All tokens select expert 0: they fit on node 0, but not in the queues from its devices to its device 0."""
    rng = np.random.default_rng(0)
    ids = np.full((T * 8, K), [[0, -1, -1, -1]], np.int32)
    x, w = rng.normal(size=(T * 8, D)).astype(np.float32), rng.normal(size=(EXPERTS, D, D)).astype(np.float32)
    _, overflows = program("nodes", 2, 4, -T)(x, ids, np.ones((T * 8, K), np.float32), w)
    assert np.asarray(overflows).tolist() == [1] * 4 + [0] * 4


@pytest.mark.parametrize(
    ("tokens", "peers", "experts", "pairs", "replicas", "capacity"),
    [
        (128, 144, 8, 144 * 144, 2, 27),
        (4, 8, 8, 64, 32, 4),
        (4096, 32, 8, 32 * 32, 9, 1146),
        (128, 18, 8, 144 * 18, 16, 78),
    ],
)
def test_capacity_stays_near_the_expected_load(
    tokens: int, peers: int, experts: int, pairs: int, replicas: int, capacity: int
) -> None:
    assert expected_capacity(tokens, peers, experts, pairs, replicas) == capacity


BOTH = (Exchange.from_layer, Exchange.from_layer_by_node)


@pytest.mark.parametrize("tokens", [1, 3, 8, 64, 1024])
@pytest.mark.parametrize("machine", [Machine(1, 8), Machine(18, 8)])
def test_a_row_of_eight_tokens_always_fits(tokens: int, machine: Machine) -> None:
    """So serialized rows always complete: one row of a rank, or one token of every device."""
    rows = LayerRows.from_widths(tokens, 8, 7168, fp8_dispatch=True)
    for build in BOTH[: machine.nodes]:
        exchange = build(machine, 2, rows, Overlap.NONE)
        hops = exchange.hops
        assert all(hop.capacity >= min(8, tokens) for hop in hops)
        assert hops[-1].capacity >= (machine.nodes if len(hops) > 1 else 1)
        assert exchange.pairs is None or exchange.pairs >= 2 * max(8, machine.devices)


@pytest.mark.parametrize("hot", [1.0, headroom(2)])
def test_layers_of_the_144_gpu_deployment_fit_their_queues(hot: float) -> None:
    """Queues fit uniform routing, and one device per node that is selected more often by the whole headroom."""
    nodes, gpus, tokens, topk, slots = 18, 8, 128, 8, 288
    ranks = nodes * gpus
    likely = np.ones(slots, np.float32)
    likely.reshape(nodes, gpus, -1)[:, 0] = hot
    drawn = np.random.default_rng(0).exponential(size=(ranks * tokens, slots)).astype(np.float32) / likely
    rank = np.argpartition(drawn, topk, axis=1)[:, :topk] // (slots // ranks)
    sent_to = np.zeros((ranks * tokens, ranks), bool)
    np.put_along_axis(sent_to, rank, True, axis=1)
    flat = sent_to.reshape(ranks, tokens, ranks).sum(axis=1)
    to_nodes = sent_to.reshape(ranks, tokens, nodes, gpus).any(axis=3).sum(axis=1)
    inside = flat.reshape(nodes, gpus, nodes, gpus).sum(axis=0)  # rows on [gpu, node] with destination [gpu]
    pairs = np.bincount(rank.ravel(), minlength=ranks)
    rows = LayerRows.from_widths(tokens, topk, 7168, fp8_dispatch=True)
    each = [make(Machine(nodes, gpus), slots // ranks, rows, Overlap.NONE) for make in BOTH]
    (all_to_all,), (outer, inner) = (exchange.hops for exchange in each)
    assert flat.max() <= all_to_all.capacity and to_nodes.max() <= outer.capacity and inside.max() <= inner.capacity
    assert all(exchange.pairs is not None and pairs.max() <= exchange.pairs for exchange in each)


def test_pair_capacity_is_near_the_expected_load() -> None:
    """A micro-batch of the two published units, and buffers that cannot overflow."""
    assert pair_capacity(8192 * 4, 8, 8, 9, 8456) == 76_804  # 65,536 expected, at most 541,184
    assert pair_capacity(64 * 18, 8, 8, 2, 121) == 1_016  # 512 and 1,936
    assert pair_capacity(24, 8, 8, 36, 24) is None
