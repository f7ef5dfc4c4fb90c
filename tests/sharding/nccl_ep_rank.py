"""One of several processes with a CPU device each: a layer by NCCL EP, then calls in which the last rank dies.

python -m tests.sharding.nccl_ep_rank COORDINATOR RANKS RANK
"""

import functools
import os
import sys
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from sharding.collectives import Overlap
from sharding.experts.exchange import Exchange
from sharding.experts.library_hop import LibraryHop
from sharding.experts.rows import TokenRows
from sharding.mesh import Machine
from sharding.nccl_ep import library
from sharding.nccl_ep.library import Calls, GroupKey
from tests.sharding import nccl_ep
from tests.sharding.test_exchange import ALL, AXES, CHUNK, D, K, T, both_halves, dense, local_experts, route

EACH = 4
TIMEOUT_SECONDS, CALL_SECONDS = 8.0, 5.0


def main(coordinator: str, ranks: int, rank: int) -> None:
    jax.distributed.initialize(coordinator, ranks, rank)
    mesh = Mesh(np.array(jax.devices()).reshape(1, ranks), AXES)
    tokens, experts, last = T * ranks, EACH * ranks, ranks - 1
    hop = LibraryHop(AXES, ranks, EACH, T, Overlap.HOOKS, row_bytes=4096)
    bulk = Calls(GroupKey(ranks, T, K, experts, 4096, 0, CHUNK, ranks * CHUNK), halves=True)
    nccl_ep.use_stand_in(pytest.MonkeyPatch())
    library.create_groups(mesh, [hop.key(K), bulk.key], TIMEOUT_SECONDS, CALL_SECONDS)
    exchange = Exchange(Machine(1, ranks), EACH, (hop,))

    def step(x, ids, weights, w):
        rows = TokenRows({"x": x / 2, "scale": jnp.full((T, 1), 2.0)}, ids, weights)
        return both_halves(exchange, rows, functools.partial(local_experts, w))

    def count(ids, weights):
        """The rows that each chunk brings."""
        rows = jnp.zeros((T, 128))
        return bulk.complete(bulk.dispatch(ids, weights, [rows]), ids, weights, rows)[2]

    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(tokens, D)).astype(np.float32), rng.normal(size=(experts, D, D)).astype(np.float32)
    ids = (route("some unset", tokens, rng) % experts).astype(np.int32)
    weights = rng.random((tokens, K)).astype(np.float32)
    where = NamedSharding(mesh, ALL)
    given = [jax.make_array_from_callback(a.shape, where, a.__getitem__) for a in (x, ids, weights, w)]
    mapped = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    run = jax.jit(mapped(step, in_specs=(ALL,) * 4, out_specs=(ALL, ALL))).lower(*given).compile()
    counted = jax.jit(mapped(count, in_specs=(ALL, ALL), out_specs=ALL)).lower(*given[1:3]).compile()
    own = slice(rank * T, (rank + 1) * T)

    def check(ids: np.ndarray) -> None:
        y, _ = run(*given)
        found = np.asarray(y.addressable_data(0))
        np.testing.assert_allclose(found, dense(x, ids, weights, w)[own], rtol=2e-5, atol=2e-5)

    multihost_utils.sync_global_devices("compiled")
    check(ids)
    library.check_ranks()
    goes = (ids // EACH == rank).any(axis=1).reshape(ranks, T)
    wanted = [goes[:, first : first + CHUNK].sum() for first in range(0, T, CHUNK)]
    np.testing.assert_array_equal(counted(*given[1:3]).addressable_data(0), wanted)

    nccl_ep.number("stand_in_dies").value = rank == last
    for why in (f"did not return within {CALL_SECONDS:g} s", "a rank did not answer in time"):
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=why):
            jax.block_until_ready(counted(*given[1:3]))
    print("a call in which the last rank dies", flush=True)

    check(np.where(ids // EACH == last, -1, ids))
    named = rf"device \d+ \(process {last}\) did not answer in time and is left out"
    with pytest.raises(library.NcclEpError, match=named):
        library.check_ranks()
    with pytest.raises(jax.errors.JaxRuntimeError, match="a rank did not answer in time and is left out"):
        jax.block_until_ready(run(*given))
    print("a layer without the last rank", flush=True)


if __name__ == "__main__":
    status = 1
    try:
        main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
        status = 0
    except Exception:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)  # the coordination service would wait for the killed rank
