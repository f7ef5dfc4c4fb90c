"""NCCL EP beside the exchange's tests: several processes, refusals, programs for GPUs, and the installed library."""

import contextlib
import ctypes
import functools
import importlib.metadata
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels import aot
from pallas_kernels.native.build import build_library
from sharding.collectives import Overlap
from sharding.experts.library_hop import MAX_BUFFER_BYTES, MAX_SHARED_BYTES, LibraryHop, low_latency_bytes, row_bytes
from sharding.experts.rows import TokenRows
from sharding.experts.traffic import LayerRows
from sharding.experts.transport import build
from sharding.experts.transport_kind import TransportKind
from sharding.mesh import Machine
from sharding.nccl_ep import library
from sharding.nccl_ep.library import Calls, GroupKey, Installed, NcclEpError
from tests.sharding import nccl_ep
from tests.sharding.test_exchange import AXES, both_halves

ROOT = pathlib.Path(__file__).parents[2]
RANKS = 3
DECODE, PREFILL = (Machine(18, 8), 288), (Machine(4, 8), 288)


def test_processes_exchange_rows_and_none_waits_without_a_limit_for_a_killed_one() -> None:
    """A rank dies in a call with high throughput: the others' programs fail after the limit, then at once.

    With low latency a step ends within the timeout and lacks the killed rank's experts; the next one is refused.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    nccl_ep.stand_in(), library.targets()  # built once, not by each process
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
    command = [sys.executable, "-m", "tests.sharding.nccl_ep_rank", address, str(RANKS)]
    started = [
        subprocess.Popen(
            [*command, str(rank)], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for rank in range(RANKS)
    ]
    try:
        outputs = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    assert started[-1].returncode == -signal.SIGKILL
    for process, (out, err) in zip(started[:-1], outputs[:-1], strict=True):
        assert process.returncode == 0 and out.count(b"the last rank") == 2, err.decode()


def dispatch(calls: Calls, calls_made: int, channels: int = 128) -> None:
    """Runs dispatches in one program, none of them completed, of rows of so many float32."""
    ranks = calls.key.ranks
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("gpu",))
    ids, weights = np.full((ranks, 1), -1, np.int32), np.ones((ranks, 1), np.float32)

    def step(ids, weights):
        for _ in range(calls_made):
            ids = calls.dispatch(ids, weights, [jnp.zeros((1, channels), jnp.float32)])[0].reshape(-1, 1)[:1]
        return ids

    spec = PartitionSpec("gpu")
    run = jax.shard_map(step, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False)
    jax.block_until_ready(jax.jit(run)(ids, weights))


def test_misuse_is_an_error_and_not_a_wrong_result() -> None:
    calls = Calls(GroupKey(ranks=2, tokens=1, top_k=1, experts=2, row_bytes=2048, slot=0), halves=True)
    nccl_ep.create_groups(Mesh(np.array(jax.devices()[:2]), ("gpu",)), [calls.key])
    with pytest.raises(jax.errors.JaxRuntimeError, match="enqueued before the last one was completed"):
        dispatch(calls, 2)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no group was created for this program on device"):
        dispatch(Calls(calls.key._replace(slot=1)), 1)


def test_a_call_that_fails_leaves_no_handle() -> None:
    """Rows of 384 bytes suit no kernel of the library."""
    calls = Calls(GroupKey(ranks=2, tokens=1, top_k=1, experts=2, row_bytes=2048, slot=2))
    nccl_ep.create_groups(Mesh(np.array(jax.devices()[:2]), ("gpu",)), [calls.key])
    handles = nccl_ep.number("stand_in_handles")
    before = handles.value
    with pytest.raises(jax.errors.JaxRuntimeError, match="ncclEpDispatch returned 4"):
        dispatch(calls, 1, channels=96)
    assert handles.value == before


def test_a_combine_without_a_dispatch_goes_by_its_own_ids() -> None:
    """An overlapped program begins with one: that must not send the rows of the program before once more."""
    calls = Calls(GroupKey(2, 8, 1, 4, 2048, slot=0, chunk=8, received=16))
    mesh = Mesh(np.array(jax.devices()[:2]), ("gpu",))
    nccl_ep.create_groups(mesh, [calls.key])

    def both(ids, weights):
        totals = calls.dispatch(ids, weights, [jnp.zeros((8, 128), jnp.float32)])[2]
        return calls.combine(jnp.ones((1, 16, 512), jnp.float32), totals, ids)[0]

    def later(ids, weights):
        del weights
        return calls.combine(jnp.ones((1, 16, 512), jnp.float32), jnp.zeros(1, jnp.int32), ids)[0]

    spec = PartitionSpec("gpu")
    for step, ids, wanted in ((both, 3, 1), (later, -1, 0)):
        run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False))
        found = run(np.full((16, 1), ids, np.int32), np.ones((16, 1), np.float32))
        np.testing.assert_array_equal(found, np.full((16, 512), wanted, np.float32))


def test_an_old_library_is_refused_by_name() -> None:
    for name, old, why in (
        ("version", 100, r"NCCL EP 0\.1 is refused, because .*: install 0\.2"),
        ("nccl", 22907, r"NCCL 2\.29\.7 is refused, because NCCL EP 0\.2 is released for 2\.30\.7"),
    ):
        version = nccl_ep.number(f"stand_in_{name}")
        version.value, good = old, version.value
        try:
            with pytest.raises(NcclEpError, match=why):
                library.open_library(Installed(nccl_ep.stand_in(), nccl_ep.stand_in(), {}))
        finally:
            version.value = good
    with pytest.raises(NcclEpError, match="cannot open shared object"):
        library.open_library(Installed(pathlib.Path("/no/libnccl.so.2"), nccl_ep.stand_in(), {}))


def test_errors_name_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NcclEpError, match="needs NVIDIA GPUs, not cpu: use expert_transport auto"):
        library.check_platform("cpu")
    library.check_platform("cuda")

    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(NcclEpError, match=r"needs the package nccl-extensions: install dsv3\[nccl_ep\]"):
        library.installed()
    rows = LayerRows.from_widths(16384, 8, 7168, fp8_dispatch=True)
    with pytest.raises(ValueError, match=r"16384 tokens from each of 512 devices .* needs 2048 tokens.*: use fewer"):
        build(TransportKind.NCCL_EP, Machine(64, 8), 512, rows)
    rows = LayerRows.from_widths(64, 8, 7168, fp8_dispatch=True, int8_sums=True)
    with pytest.raises(ValueError, match="use expert_combine auto"):
        build(TransportKind.NCCL_EP, *DECODE, rows)


def test_decode_of_144_gpus_sends_the_payload_only() -> None:
    rows = LayerRows.from_widths(64, 8, 7168, fp8_dispatch=True)
    exact, padded = (
        build(kind, *DECODE, rows).traffic(rows) for kind in (TransportKind.NCCL_EP, TransportKind.ALL_TO_ALL)
    )
    payload = rows.tokens * rows.experts_per_token * rows.row_bytes(2)
    assert 0.96 < exact.device_bytes / payload <= 1 < 2.5 < padded.device_bytes / payload
    assert row_bytes(rows) == 7 * 2048
    assert MAX_BUFFER_BYTES / 4 < low_latency_bytes(144, rows) < MAX_BUFFER_BYTES / 2


def test_prefill_of_32_gpus_sends_chunks_through_one_group_of_bounded_size() -> None:
    """A row crosses to a node once; steps of other sizes, and both micro-batches, have the same group."""
    machine, _ = PREFILL
    keys, sizes = set(), set()
    for tokens in (2048, 8192):
        rows = LayerRows.from_widths(tokens, 8, 7168, fp8_dispatch=True)
        (hop,) = build(TransportKind.NCCL_EP, *PREFILL, rows, Overlap.HOOKS).hops
        assert isinstance(hop, LibraryHop)
        keys.add(hop.of_micro_batch(1).key(8).shared)
        sizes.add(hop.buffer_bytes(machine, rows))
        arrive = tokens * 32 * (1 - (1 - 1 / 32) ** 8)
        assert arrive < hop.lines < 1.2 * arrive and hop.lines == hop.key(8).chunks * hop.received
    assert len(keys) == 1 and MAX_SHARED_BYTES / 2 < max(sizes) == min(sizes) <= MAX_SHARED_BYTES
    by_library, by_hops = (
        build(kind, *PREFILL, rows).traffic(rows) for kind in (TransportKind.NCCL_EP, TransportKind.HIERARCHICAL)
    )
    assert by_library.node_bytes < by_hops.node_bytes < 1.05 * by_library.node_bytes
    assert by_library.device_bytes < by_hops.device_bytes < 1.15 * by_library.device_bytes
    few = LayerRows.from_widths(16, 8, 7168, fp8_dispatch=True)
    (hop,) = build(TransportKind.NCCL_EP, *PREFILL, few).hops
    assert hop.key(8).shared == hop.key(8) and hop.key(8).chunk == 0


@pytest.mark.aot
def test_a_layer_of_the_published_decode_unit_compiles_for_its_gpus() -> None:
    """Four calls, in the order of the layer, and no collective."""
    (machine, replicas), tokens = DECODE, 64
    mesh = aot.gpu_mesh({"node": machine.nodes, "gpu": machine.gpus})
    rows = LayerRows.from_widths(tokens, 8, 512, fp8_dispatch=True)
    transport = build(TransportKind.NCCL_EP, machine, replicas, rows, Overlap.HOOKS)
    spec = PartitionSpec(AXES)

    def step(q, scale, ids, weights):
        def experts(rows: TokenRows) -> tuple[jax.Array, None]:
            q, scale = rows.payload
            return (q.astype(jnp.float32) * scale.sum(axis=1, keepdims=True)).astype(jnp.bfloat16), None

        return both_halves(transport, TokenRows((q, scale), ids, weights), experts)[0]

    def array(width: int, dtype) -> jax.ShapeDtypeStruct:
        where = jax.NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct((tokens * machine.devices, width), dtype, sharding=where)

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(spec,) * 4, out_specs=spec, check_vma=False)
    arrays = (array(512, jnp.float8_e4m3fn), array(4, jnp.float32), array(8, jnp.int32), array(8, jnp.float32))
    text = aot.compile_for(mapped, *arrays, mesh=mesh).as_text()
    called = re.findall(r'custom_call_target="dsv3_nccl_ep_(\w+)_\w{8}"', text)
    assert called == ["Dispatch", "Complete", "Combine", "Complete"]
    assert not re.search(r"all-to-all|all-gather|reduce-scatter|ragged", text)


@functools.cache
def wheel() -> pathlib.Path:
    """The folder of the installed library. Skips where there is none."""
    try:
        found = importlib.metadata.distribution("nccl-extensions")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("nccl-extensions is not installed")
    return pathlib.Path(str(found.locate_file("nccl/ep")))


def compiled(folder: pathlib.Path, name: str, text: str, *headers: pathlib.Path) -> pathlib.Path:
    source = folder / f"{name}.cc"
    source.write_text(text)
    return build_library(name, [source], headers)


STUBS = {
    "cuda.h": "typedef int cudaError_t; typedef struct S* cudaStream_t;",
    "nccl.h": "#include <cuda.h>\ntypedef int ncclResult_t; typedef int ncclDataType_t;"
    "typedef struct C* ncclComm_t; typedef struct W* ncclWindow_t;",
}


def test_the_installed_header_declares_what_ours_does(tmp_path: pathlib.Path) -> None:
    """Sizes, places of fields, and numbers, compared by the compiler; of CUDA's and NCCL's headers four types."""
    include = wheel() / "include"
    for name, text in STUBS.items():
        (tmp_path / name).write_text(text)
    fields = {
        ("Tensor", "ncclEpTensor_t"): "dimensions=ndim type=datatype data=data window_offset=win_offset sizes=sizes",
        ("GroupConfig", "ncclEpGroupConfig_t"): (
            "version=version algorithm=algorithm experts=num_experts tokens_per_rank=max_dispatch_tokens_per_rank "
            "token_bytes=max_token_bytes buffer_bytes=rdma_buffer_size multiprocessors=max_num_sms allocator=alloc "
            "enable_mask=enable_mask timeout_ns=timeout_ns zero_copy=zero_copy top_k=num_topk "
            "received_per_rank=max_recv_tokens_per_rank overflow_policy=overflow_policy"
        ),
        (
            "LayoutInfo",
            "ncclEpLayoutInfo_t",
        ): "source_counters=src_rank_counters total=recv_total_counter ids=recv_topk_idx_kind",
        ("DispatchInputs", "ncclEpDispatchInputs_t"): "tokens=tokens weights=topk_weights scales=scales",
        ("DispatchOutputs", "ncclEpDispatchOutputs_t"): (
            "tokens=tokens weights=topk_weights scales=scales ids=topk_idx"
        ),
        ("DispatchConfig", "ncclEpDispatchConfig_t"): "send_only=send_only recipe=quant_recipe",
        ("CombineInputs", "ncclEpCombineInputs_t"): "tokens=tokens",
        ("CombineOutputs", "ncclEpCombineOutputs_t"): "tokens=tokens",
        ("CombineConfig", "ncclEpCombineConfig_t"): "send_only=send_only",
    }
    numbers = (
        "kMagic=NCCL_EP_MAGIC kTensorMagic=NCCL_EP_TENSOR_MAGIC kApiVersion=NCCL_EP_API_VERSION "
        "kLowLatency=NCCL_EP_ALGO_LOW_LATENCY kRankMajor=NCCL_EP_LAYOUT_RANK_MAJOR kGlobal=NCCL_EP_EXPERT_ID_GLOBAL "
        "kScalesForwarded=NCCL_EP_DISP_QUANT_FWD kHighThroughput=NCCL_EP_ALGO_HIGH_THROUGHPUT "
        "kFlat=NCCL_EP_LAYOUT_FLAT kDrop=NCCL_EP_OVERFLOW_DROP"
    )
    checks = [f"sizeof(nccl_ep::{ours}) == sizeof({theirs})" for ours, theirs in fields]
    for (ours, theirs), pairs in fields.items():
        for mine, yours in (pair.split("=") for pair in pairs.split()):
            checks.append(f"offsetof(nccl_ep::{ours}, {mine}) == offsetof({theirs}, {yours})")
    checks += ["unsigned(nccl_ep::{}) == unsigned({})".format(*pair.split("=")) for pair in numbers.split()]
    text = '#include "abi.h"\n#include "nccl_ep.h"\n' + "".join(f"static_assert({check});\n" for check in checks)
    ours = pathlib.Path(library.__file__).with_name("abi.h")
    compiled(tmp_path, "nccl-ep-abi", text, ours, include / "nccl_ep.h", *(tmp_path / name for name in STUBS))


def test_the_installed_library_opens_and_is_not_refused(tmp_path: pathlib.Path) -> None:
    """The library opens without CUDA's driver and NCCL: empty libraries of their names are loaded before it."""
    for path in sorted((wheel() / "lib").glob("cu*/libnccl_ep.so")):
        with contextlib.suppress(OSError):
            ctypes.CDLL("libcuda.so.1")
            pytest.skip("this machine has CUDA's driver; the server's start opens the library there")
        source = tmp_path / "empty.cc"
        functions = "".join(
            f'extern "C" int {name}() {{ return 0; }}\n' for name in ("ncclGetUniqueId", "ncclCommInitRank")
        )
        functions += 'extern "C" int ncclGetVersion(int* version) { return *version = 23007, 0; }\n'
        source.write_text(functions)
        for name in ("libcuda.so.1", "libnccl.so.2"):
            command = ["c++", "-shared", "-fPIC", f"-Wl,-soname,{name}", str(source), "-o", str(tmp_path / name)]
            subprocess.run(command, check=True, timeout=60)
        script = (
            "import ctypes, pathlib, sys; from sharding.nccl_ep.library import Installed, open_library\n"
            "cuda, nccl, ep = map(pathlib.Path, sys.argv[1:])\n"
            "ctypes.CDLL(str(cuda)); open_library(Installed(nccl, ep, {})); version = ctypes.c_int()\n"
            "ctypes.CDLL(str(ep)).ncclEpGetVersion(ctypes.byref(version)); print(version.value)"
        )
        arguments = [str(tmp_path / "libcuda.so.1"), str(tmp_path / "libnccl.so.2"), str(path)]
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert int(done.stdout.split()[-1]) >= 200
