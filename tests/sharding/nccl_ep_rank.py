"""One of several processes with a CPU device each: a layer by NCCL EP, then one without the last rank.

python -m tests.sharding.nccl_ep_rank COORDINATOR RANKS RANK
"""

import functools
import os
import signal
import sys

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from sharding.experts.exchange import Exchange
from sharding.experts.library_hop import LibraryHop
from sharding.experts.rows import TokenRows
from sharding.mesh import Machine
from sharding.nccl_ep import library
from sharding.wire.collectives import Overlap
from tests.sharding import nccl_ep
from tests.sharding.test_exchange import ALL, AXES, D, K, T, both_halves, dense, local_experts, route

EACH = 4
TIMEOUT_SECONDS = 10.0


def main(coordinator: str, ranks: int, rank: int) -> None:
    jax.distributed.initialize(coordinator, ranks, rank)
    mesh = Mesh(np.array(jax.devices()).reshape(1, ranks), AXES)
    hop = LibraryHop(AXES, ranks, EACH, T, Overlap.HOOKS, row_bytes=4096)
    nccl_ep.use_stand_in(pytest.MonkeyPatch())
    library.create_groups(mesh, [hop.key(K)], TIMEOUT_SECONDS)
    exchange = Exchange(Machine(1, ranks), EACH, (hop,))

    def step(x, ids, weights, w):
        rows = TokenRows({"x": x / 2, "scale": jax.numpy.full((T, 1), 2.0)}, ids, weights)
        return both_halves(exchange, rows, functools.partial(local_experts, w))

    rng = np.random.default_rng(0)
    tokens, experts = T * ranks, EACH * ranks
    x, w = rng.normal(size=(tokens, D)).astype(np.float32), rng.normal(size=(experts, D, D)).astype(np.float32)
    ids = (route("some unset", tokens, rng) % experts).astype(np.int32)
    weights = rng.random((tokens, K)).astype(np.float32)
    where = NamedSharding(mesh, ALL)
    given = [jax.make_array_from_callback(a.shape, where, a.__getitem__) for a in (x, ids, weights, w)]
    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(ALL,) * 4, out_specs=(ALL, ALL), check_vma=False))
    run = run.lower(*given).compile()
    own = slice(rank * T, (rank + 1) * T)

    def check(ids: np.ndarray) -> None:
        y, _ = run(*given)
        found = np.asarray(y.addressable_data(0))
        np.testing.assert_allclose(found, dense(x, ids, weights, w)[own], rtol=2e-5, atol=2e-5)

    multihost_utils.sync_global_devices("compiled")
    check(ids)
    library.check_ranks()
    if rank == ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    check(np.where(ids // EACH == ranks - 1, -1, ids))
    named = rf"device \d+ \(process {ranks - 1}\) did not answer in time and is left out"
    with pytest.raises(library.NcclEpError, match=named):
        library.check_ranks()
    with pytest.raises(jax.errors.JaxRuntimeError, match="a rank did not answer in time and is left out"):
        jax.block_until_ready(run(*given))
    print("a layer without the last rank", flush=True)
    os._exit(0)  # the coordination service would wait for the killed rank


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
