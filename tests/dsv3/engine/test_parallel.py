"""The engine with experts spread over several devices gives transformers' tokens, as it does on one."""

import concurrent.futures
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest

from dsv3.config.engine import EngineConfig
from dsv3.config.options import EngineOptions
from dsv3.engine.build import build_engine, bundled_model
from dsv3.engine.components import EngineComponents
from dsv3.engine.engine import Engine
from dsv3.engine.expert_parallel import expert_parallel_functions
from dsv3.engine.jobs import experts
from dsv3.llm import LLM
from dsv3.model.inspection import inspect
from dsv3.scheduler.request import join_routed_experts
from sharding.experts import exchange, library_hop
from sharding.mesh import rank_mesh
from sharding.nccl_ep import library
from tests.dsv3.engine.driving import Gathered, request, run, take
from tests.dsv3.engine.fewer import one_bucket
from tests.dsv3.engine.spread import spread_experts
from tests.dsv3.model.golden import DIRECTORY, model
from tests.sharding import nccl_ep

LIMITS = dict(max_model_len=128, num_pages=16, max_num_batched_tokens=64)


def test_greedy_text_is_transformers_token_for_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks of two devices in each of two nodes.

    Buffers hold a quarter of the tokens, so most steps are repeated in parts. `test_balance` has two nodes with more
    capacity, `test_sparse` one row that two devices share.
    """
    monkeypatch.setattr(exchange, "expected_capacity", lambda tokens, *_, **__: max(1, tokens // 4))
    golden = json.loads((DIRECTORY / "greedy" / "greedy.json").read_text())
    params, cfg = jax.device_get(model("greedy")[0]), model("greedy")[1]  # jax would compile each array's distribution
    used, redundant = jax.devices()[:8], 8
    mesh = rank_mesh(used, num_nodes=2, tensor_parallel_size=2)
    spread = spread_experts(params, cfg, mesh, redundant)
    functions = expert_parallel_functions(cfg, mesh, redundant, transport="hierarchical")
    layout = dict(num_ranks=4, num_nodes=2, tensor_parallel_size=2, max_num_seqs=4, enable_return_routed_experts=True)
    with one_bucket():
        engine = Engine(EngineComponents.on_devices(functions, spread, cfg, EngineConfig(**LIMITS, **layout), used))
    count, length = 16, 12
    prompts = golden["prompts"][:count]
    how = dict(max_tokens=length, ignore_eos=True, return_routed_experts=True)
    requests = [request(str(i), p, **how) for i, p in enumerate(prompts)]
    gathered = run(engine, *requests)
    assert [gathered[str(i)].tokens for i in range(count)] == [g[:length] for g in golden["greedy"][:count]]
    assert engine.stats().pages_in_use == 0
    for i, prompt in enumerate(prompts):
        parts = [output.routed_experts for output in gathered[str(i)].outputs if output.routed_experts is not None]
        wanted = inspect(*model("greedy"), [*prompt, *golden["greedy"][i][: length - 1]], attention=False)
        ids = np.stack([each.expert_ids for each in wanted.layers[1:]], axis=1)
        np.testing.assert_array_equal(join_routed_experts(parts, len(ids) + 1), ids)
    assert all(engine.planners[phase]._capacity.factor > 1 for phase in ("decode", "prefill"))


def test_rows_travel_by_the_library_while_experts_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks by NCCL EP's stand-in: decode by low latency, prefill by high throughput in four chunks.

    The engine creates the groups of its programs. Experts with replicas move live, and tokens stay the same: the expert
    map is data, so the library sends each row where the last map says.
    """
    nccl_ep.use_stand_in(monkeypatch)
    for name, value in (("MAX_BUFFER_BYTES", 100_000), ("MAX_SHARED_BYTES", 250_000), ("MIN_CHUNK", 16)):
        monkeypatch.setattr(library_hop, name, value)
    monkeypatch.setattr(experts, "MOVE_BYTES", 1)  # one layer a step
    golden = json.loads((DIRECTORY / "greedy" / "greedy.json").read_text())
    params, cfg = jax.device_get(model("greedy")[0]), model("greedy")[1]
    used, redundant = jax.devices()[:2], 8
    mesh = rank_mesh(used)
    functions = expert_parallel_functions(cfg, mesh, redundant, transport="nccl_ep")
    options = EngineConfig(**LIMITS, num_ranks=2, max_num_seqs=2, eplb_interval=4, eplb_threshold=1.0)
    counted = [nccl_ep.number(f"stand_in_{name}") for name in ("calls", "chunks")]
    before, spread = [number.value for number in counted], spread_experts(params, cfg, mesh, redundant)
    with one_bucket():
        engine = Engine(EngineComponents.on_devices(functions, spread, cfg, options, used))
    assert functions.library_bytes(engine.cfg.forward_programs) > 0
    prompts, length = golden["prompts"][:6], 8
    gathered: dict[str, Gathered] = {}
    for i, prompt in enumerate(prompts):
        engine.add(request(str(i), prompt, max_tokens=length, ignore_eos=True))
    while engine.has_work:
        if (planning := engine.planners["experts"]._planning) is not None:
            concurrent.futures.wait([planning])
        take(engine.step(), gathered)
    assert [gathered[str(i)].tokens for i in range(6)] == [g[:length] for g in golden["greedy"][:6]]
    assert engine.stats().jobs["experts"].moved > 0 and engine.stats().recompilations == 0
    calls, chunks = (number.value - was for number, was in zip(counted, before, strict=True))
    assert calls > chunks > 0 and chunks % (2 * cfg.num_moe_layers * 4) == 0


def test_ranks_must_divide_the_slots() -> None:
    params, cfg = model("greedy")
    with pytest.raises(ValueError, match="do not divide over 8 devices: add redundant experts"):
        spread_experts(params, cfg, rank_mesh(jax.devices()), 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_redundant_experts=4), "needs enable_expert_parallel"),
        (dict(enable_expert_parallel=True, num_redundant_experts=-1), "-1 is not at least 0"),
        (dict(expert_transport="ring"), "'ring' needs enable_expert_parallel"),
        (dict(reserved_multiprocessors=8), "8 needs enable_expert_parallel"),
        (dict(reserved_multiprocessors=-1, enable_expert_parallel=True), "-1 is not at least 0"),
        (dict(expert_transport="nvshmem"), "'nvshmem' is not one of auto, ring, all_to_all, hierarchical, ragged"),
        (dict(enable_expert_parallel=True, expert_transport="ragged"), "not support on cpu: use expert_transport=auto"),
        (dict(enable_expert_parallel=True, expert_transport="nccl_ep"), "needs NVIDIA GPUs, not cpu: use"),
        (dict(enable_expert_parallel=True, expert_transport="hierarchical"), "needs 2 or more nodes"),
        (dict(expert_combine="int8"), "expert_combine: 'int8' needs enable_expert_parallel"),
        (dict(expert_overlap=False), "expert_overlap: False needs enable_expert_parallel"),
        (dict(enable_expert_parallel=True, expert_combine="fp8"), "'fp8' is not one of auto, int8"),
        (dict(enable_expert_parallel=True, expert_combine="int8", expert_transport="ring"), "not 'ring'"),
        (dict(data_parallel_size=0), "data_parallel_size: 0 is not at least 1"),
        (dict(tensor_parallel_size=0), "tensor_parallel_size: 0 is not at least 1"),
        (dict(tensor_parallel_size=3), "tensor_parallel_size 3 does not divide num_attention_heads 4"),
        (dict(data_parallel_size=8, tensor_parallel_size=2), "is 16 devices, but jax sees 8; lower one of them"),
        (dict(tensor_parallel_size=2, num_redundant_experts=1), "add redundant experts to reach 26"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_before_weights_are_read(
    options: dict, message: str, tmp_path: pathlib.Path
) -> None:
    shutil.copy(bundled_model() / "config.json", tmp_path)  # there are no weights to be read
    with pytest.raises(ValueError, match=message):
        build_engine(tmp_path, EngineOptions(**options), progress=False)


def test_a_missing_library_is_named_before_weights_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(library, "PLATFORMS", ("cpu",))
    monkeypatch.setattr(library, "_DISTRIBUTION", "no-such-package")
    shutil.copy(bundled_model() / "config.json", tmp_path)
    options = EngineOptions(enable_expert_parallel=True, expert_transport="nccl_ep")
    with pytest.raises(ValueError, match=r"needs the package no-such-package: install dsv3\[nccl_ep\]"):
        build_engine(tmp_path, options, progress=False)


def test_the_devices_of_a_rank_must_be_in_one_node() -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size 8 does not divide the 4 devices of a node"):
        rank_mesh(jax.devices(), num_nodes=2, tensor_parallel_size=8)


def test_a_notebook_can_spread_a_model_too() -> None:
    with pytest.raises(ValueError, match="data_parallel_size 8 times tensor_parallel_size 2"):
        LLM(data_parallel_size=8, tensor_parallel_size=2, enable_expert_parallel=True, progress=False)
