"""Leaves of a running engine are those of a fresh one with the same weights, wherever these come from; no program runs.

FP8, replicas that have been moved, rows divided among the devices of a rank, integer tables.
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsv3.checkpoint import load_params
from dsv3.config.options import EngineOptions
from dsv3.engine.build import build_engine
from dsv3.engine.engine import Engine
from dsv3.engine.operations import OperationRefused, UpdateWeights
from dsv3.engine.stored import COMPILE_EVENT, EventCounter
from dsv3.model.params import Fp8Weight, Int4Weight
from sharding.experts.eplb import map_of
from sharding.experts.placement import placement_of
from tests.dsv3.checkpoint import hf
from tests.dsv3.engine.driving import drain
from tests.dsv3.engine.test_weights import SPLITTABLE, write
from tests.dsv3.model.golden import DIRECTORY

LIMITS = {"max_model_len": 64, "max_num_seqs": 1, "max_num_batched_tokens": 64}
MODEL = dataclasses.replace(SPLITTABLE, num_hidden_layers=2, first_k_dense_replace=0, num_nextn_predict_layers=1)
SPREAD = {"data_parallel_size": 2, "tensor_parallel_size": 2, "num_redundant_experts": 2, "max_model_len": 64}
SPREAD |= {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}, "dtype": "bfloat16"}


def made(directory: Path, **options) -> Engine:
    """An engine that compiles nothing."""
    return build_engine(directory, EngineOptions(**(LIMITS | options)), progress=False)


def update(engine: Engine, source, on_progress=lambda: None) -> None:
    done = engine.operate(UpdateWeights(source, None, "keep"), on_progress)
    drain(engine)
    done.result(0)


def leaves(engine: Engine) -> list[np.ndarray]:
    """The bytes of all parameters, with their dtypes in front."""
    arrays = jax.tree.leaves(engine.executor.devices.params)
    return [np.frombuffer(str(a.dtype).encode() + np.asarray(a).tobytes(), np.uint8) for a in arrays]


def check_equal(engine: Engine, other: Engine) -> None:
    for mine, theirs in zip(leaves(engine), leaves(other), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def sharded(tree):
    """The tree as a trainer has it, on a mesh of its own, in another order and with more devices."""
    mesh = Mesh(np.array(jax.devices()[::-1]), ("trainer",))

    def place(leaf: jax.Array) -> jax.Array:
        axis = next((i for i, size in enumerate(leaf.shape) if size % mesh.size == 0), None)
        spec = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, "trainer")
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    return jax.tree.map(place, jax.device_get(tree))  # jax would compile each array's distribution


def move_experts(engine: Engine) -> None:
    """Gives the replicas of each expert other places, as EPLB does, and moves no weight: an update must."""
    devices, experts = engine.executor.devices, engine.executor.devices.layout.functions.experts
    stacks, old = experts.take(devices.params)
    phy2log = np.arange(experts.num_layers * experts.num_replicas).reshape(experts.num_layers, -1)[:, ::-1]
    placement = placement_of(map_of(phy2log % experts.num_experts, experts.num_experts), old.replicas.shape[2])
    placed = jax.tree.map(lambda new, array: jax.device_put(new, array.sharding), placement, old)
    devices.params = experts.put(devices.params, stacks, placed)


@pytest.fixture(scope="module")
def directories(tmp_path_factory) -> tuple[Path, Path]:
    """The model in FP8, and with other values."""
    folder = tmp_path_factory.mktemp("models")
    one, two = write(folder / "one", MODEL), folder / "two"
    hf.write(two, hf.random_tensors(MODEL, seed=1), shards=1)
    (two / "config.json").write_text((one / "config.json").read_text())
    return one, two


def test_leaves_are_those_of_a_fresh_engine_from_every_source(directories) -> None:
    """Four devices, experts in replicas; FP8 stays FP8. A second update compiles nothing at all."""
    one, two = directories
    engine, fresh = made(one, **SPREAD), made(two, **SPREAD)
    update(engine, two)
    check_equal(engine, fresh)
    move_experts(engine), move_experts(fresh)
    update(engine, one)
    update(fresh, hf.random_tensors(MODEL))  # by the names of tensors
    check_equal(engine, fresh)
    tree = load_params(two, fresh.model_cfg, dtype=jnp.bfloat16, progress=False)
    update(engine, sharded(tree))
    update(fresh, two)
    check_equal(engine, fresh)
    plain = load_params(two, fresh.model_cfg, dtype=jnp.float32, fp8="dequantize", progress=False)
    update(engine, plain)  # quantized anew: the values are near, and the trainer keeps its arrays
    kept = jax.tree.map(np.asarray, plain)
    for _ in range(2):
        with EventCounter(COMPILE_EVENT) as compilations:
            update(engine, plain)
    assert compilations.count == 0
    jax.tree.map(np.testing.assert_array_equal, kept, jax.tree.map(np.asarray, plain))
    mine, theirs = (each.executor.devices.params.params.moe.moe.down for each in (engine, fresh))
    assert isinstance(mine, Fp8Weight) and mine.data.sharding == theirs.data.sharding
    blocks = [
        np.asarray(weight.data, np.float32)[..., :128, :128] * np.asarray(weight.scale)[..., :1, :1]
        for weight in (mine, theirs)
    ]
    assert np.abs(blocks[0] - blocks[1]).max() <= np.abs(blocks[1]).max() / 16


def test_the_devices_never_hold_two_copies_of_the_model(directories) -> None:
    """Beyond one copy they hold at most the leaf that arrives, and its parts."""
    engine, seen = made(directories[0], dtype="bfloat16"), []

    def live() -> int:
        return sum(array.nbytes for array in jax.live_arrays())

    largest = max(leaf.nbytes for leaf in jax.tree.leaves(engine.executor.devices.params))
    tree = jax.tree.map(np.asarray, load_params(directories[0], engine.model_cfg, dtype=jnp.bfloat16, progress=False))
    before = live()
    for source in (directories[1], tree):
        update(engine, source, lambda: seen.append(live() - before))
    assert len(seen) > 25 and max(seen) <= largest


def test_integer_tables_stay_integers() -> None:
    """DeepSeek-V4's first layers choose experts by a table of token ids."""
    directory = DIRECTORY / "deepseek_v4"
    engine = made(directory, fp8="dequantize")
    before = leaves(engine)
    assert any(leaf.dtype == jnp.int32 and leaf.size for leaf in jax.tree.leaves(engine.executor.devices.params))
    update(engine, directory)
    rounded = jax.tree.map(lambda leaf: np.asarray(leaf, jnp.bfloat16), engine.executor.devices.params)
    with pytest.raises(OperationRefused, match=r"moe\.moe\.by_token is bfloat16\[.*\], expected integers"):
        update(engine, rounded)
    for mine, theirs in zip(leaves(engine), before, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_bad_source_is_refused_whole_with_the_names_of_leaves(directories, tmp_path) -> None:
    one, two = directories
    engine = made(two, dtype="bfloat16")
    before, tensors = leaves(engine), hf.random_tensors(MODEL)
    cfg = engine.model_cfg
    tree = load_params(one, cfg, dtype=jnp.bfloat16, progress=False)
    name, donated = "model.layers.0.input_layernorm.weight", jnp.array(tree.norm)
    donated.delete()
    bad = {
        f"missing tensors .*{name}": {n: t for n, t in tensors.items() if n != name},
        f"wrong shapes .*{name} in memory is ": tensors | {name: tensors[name][1:]},
        f"wrong dtypes .*{name} in memory is I32": tensors | {name: tensors[name].astype(np.int32)},
        "unexpected tensors .*odd": tensors | {"odd": tensors[name]},
        "dtypes that no checkpoint has .*norm.weight is complex": tensors | {name: np.zeros(24, np.complex64)},
        "neither model.safetensors.index.json": tmp_path,
        "No such file|neither": tmp_path / "none",
        r"missing leaves .*norm": dataclasses.replace(tree, norm=None),
        r"norm is bfloat16\[199\], expected \[200\]": dataclasses.replace(tree, norm=tree.norm[1:]),
        r"embed is int32\[.*expected floating-point": dataclasses.replace(tree, embed=tree.embed.astype(jnp.int32)),
        "list is neither a directory": [1],
        "norm has been deleted": dataclasses.replace(tree, norm=donated),
        "norm has another byte order": dataclasses.replace(tree, norm=np.asarray(tree.norm, ">f4")),
        "arrays of this engine itself": engine.executor.devices.params,
        "norm is a str, not an array": dataclasses.replace(tree, norm="norm"),
        f"unusable arrays .*{name} has been deleted.*odd is a list": tensors | {name: donated, "odd": [1]},
    }
    for text, source in bad.items():
        with pytest.raises(OperationRefused, match=f"(?s){text}"):
            update(engine, source)
    for mine, theirs in zip(leaves(engine), before, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert engine.state.weight_version == "default" and not engine.state.missing


def test_a_tree_of_plain_values_cannot_become_experts_of_four_bits(directories) -> None:
    """Only a checkpoint has them: no quantizer of ours makes four bits."""
    engine = made(directories[0], dtype="bfloat16")
    served = engine.executor.devices.layout.params
    four = Int4Weight(served.moe.moe.down.data, served.moe.moe.down.scale)
    moe = dataclasses.replace(served.moe, moe=dataclasses.replace(served.moe.moe, down=four))
    engine.executor.devices.layout.params = dataclasses.replace(served, moe=moe)
    tree = load_params(directories[0], engine.model_cfg, dtype=jnp.float32, fp8="dequantize", progress=False)
    with pytest.raises(OperationRefused, match=r"moe\.moe\.down is .*experts of four bits are served"):
        update(engine, tree)
