"""Loads with replicas and row order equal a plain load that is gathered afterwards; damage is still detected."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsv3.checkpoint import CheckpointError, layout, load_params, reader
from dsv3.model.params import declare
from dsv3.model.tensor_parallel import arrange
from sharding.mesh import partition, rank_mesh
from tests.dsv3.checkpoint import hf
from tests.dsv3.checkpoint.trees import assert_same_bits, by_path

EXPERTS, LAYERS = 6, 2
STORED = hf.fp8_config(n_routed_experts=EXPERTS)
SERVED = dataclasses.replace(STORED, num_nextn_predict_layers=0)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """An FP8 model with an MTP module."""
    root = tmp_path_factory.mktemp("replicas")
    hf.write(root / "hf", hf.random_tensors(STORED), shards=3)
    return root


def load(directory, cfg=SERVED, **options):
    return load_params(directory, cfg, **{"dtype": hf.BF16, "progress": False, **options})


def random_map(replicas: int) -> np.ndarray:
    """Every expert at least once, some several times, in an order of its own in each layer."""
    rng = np.random.default_rng(replicas)
    rows = [np.concatenate([np.arange(EXPERTS), rng.integers(0, EXPERTS, replicas - EXPERTS)]) for _ in range(LAYERS)]
    return np.stack([rng.permutation(row) for row in rows])


def gathered(cfg, params, phy2log) -> dict[str, np.ndarray]:
    """A plain load whose decoder's experts are copied to replicas."""
    layer = np.arange(len(phy2log))[:, None]
    spread = {path for path, spec in layout.leaves(cfg).items() if "experts" in spec.axes and path.startswith("moe.")}
    return {
        path: a[layer, phy2log] if path.removesuffix(".data").removesuffix(".scale") in spread else a
        for path, a in by_path(cfg, params).items()
    }


@pytest.mark.parametrize("fp8", ["keep", "dequantize"])
@pytest.mark.parametrize(("devices", "replicas"), [(2, 6), (4, 8), (8, 16)])
def test_replicas_hold_the_experts_of_a_plain_load(directories, fp8, devices, replicas):
    phy2log = random_map(replicas)
    mesh = Mesh(np.array(jax.devices()[:devices][::-1]), ("d",))
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, PartitionSpec(*("d" if a == "experts" else None for a in spec.axes))),
        declare(SERVED),
    )
    spread = load(directories / "hf", fp8=fp8, shardings=shardings, phy2log=phy2log)
    assert_same_bits(by_path(SERVED, spread), gathered(SERVED, load(directories / "hf", fp8=fp8), phy2log))
    experts = jax.tree.leaves(spread.moe.moe.gate_up)
    assert all(array.sharding == shardings.moe.moe.gate_up for array in experts)
    assert {s.data.shape[:2] for array in experts for s in array.addressable_shards} == {(LAYERS, replicas // devices)}


@given(phy2log=st.lists(st.integers(0, 3), min_size=6, max_size=14), block=st.integers(48, 4000))
@settings(deadline=None, max_examples=15)
def test_any_map_and_block_size(tmp_path_factory, phy2log, block):
    """Maps with and without all experts, runs of neighbours; several experts a block, several blocks an expert."""
    root, cfg = tmp_path_factory.mktemp("any"), hf.config(num_nextn_predict_layers=0)
    phy2log = np.array(phy2log[: len(phy2log) // 2 * 2]).reshape(LAYERS, -1)
    hf.write(root / "hf", hf.random_tensors(cfg))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "BLOCK_BYTES", block)
        want = gathered(cfg, load(root / "hf", cfg), phy2log)
        assert_same_bits(by_path(cfg, load(root / "hf", cfg, phy2log=phy2log)), want)


def test_mtp_modules_keep_their_logical_experts(directories):
    phy2log = random_map(8)
    want = gathered(STORED, load(directories / "hf", STORED), phy2log)
    assert_same_bits(by_path(STORED, load(directories / "hf", STORED, phy2log=phy2log)), want)


SPLITTABLE = dict(
    num_attention_heads=4, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=64, kv_lora_rank=96,
    intermediate_size=512, n_shared_experts=2, num_nextn_predict_layers=0,
)  # fmt: skip


@pytest.mark.parametrize("fp8", ["keep", "dequantize"])
@pytest.mark.parametrize("q_lora_rank", [None, 128])
def test_rows_stand_as_tensor_parallelism_arranges_them(tmp_path, fp8, q_lora_rank):
    cfg = hf.fp8_config(**SPLITTABLE, q_lora_rank=q_lora_rank)
    hf.write(tmp_path / "hf", hf.random_tensors(cfg))
    mesh = rank_mesh(jax.devices(), num_nodes=2, tensor_parallel_size=2)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, partition(spec.axes)), declare(cfg))
    phy2log = np.tile(np.arange(8) % 2, (LAYERS, 1))
    plain = load(tmp_path / "hf", cfg, fp8=fp8)
    got = load(tmp_path / "hf", cfg, fp8=fp8, shardings=shardings, phy2log=phy2log, tensor_parallel_size=2)
    assert_same_bits(by_path(cfg, got), gathered(cfg, arrange(plain, cfg, 2), phy2log))


def test_devices_that_cannot_split_the_model_are_rejected(directories):
    with pytest.raises(ValueError, match="tensor_parallel_size 2 does not divide num_attention_heads 3"):
        load(directories / "hf", tensor_parallel_size=2)


def test_damage_is_found_and_named(tmp_path):
    tensors = hf.random_tensors(STORED)
    name = "model.layers.3.mlp.experts.5.up_proj.weight_scale_inv"
    tensors[name][0, 0] = -1
    hf.write(tmp_path / "hf", tensors)
    with pytest.raises(
        CheckpointError, match=rf"model-00001-of-00003\.safetensors: tensor {name}: a block scale is -1\.0"
    ):
        load(tmp_path / "hf", phy2log=random_map(8))
    without = random_map(8)
    without[1, without[1] == 5] = 4
    load(tmp_path / "hf", phy2log=without)  # an expert without a replica is not read


@pytest.mark.parametrize(
    ("phy2log", "message"),
    [
        (np.zeros((3, 6), int), r"int64\[3, 6\]; it must be integers \[2 MoE layers, replicas\]"),
        (np.zeros((2, 0), int), r"int64\[2, 0\]"),
        (np.zeros((2, 6)), r"float64\[2, 6\]"),
        (np.full((2, 6), 6), "names experts 6 to 6; the model has 0 to 5"),
        (np.full((2, 6), -1), "names experts -1 to -1"),
    ],
)
def test_maps_of_another_model_are_rejected(directories, phy2log, message):
    with pytest.raises(ValueError, match=message):
        load(directories / "hf", phy2log=phy2log)
