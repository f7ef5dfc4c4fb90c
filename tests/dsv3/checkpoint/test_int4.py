"""INT4 experts from files to devices: kept, dequantized and as FP8; replicas; damage is found."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsv3.checkpoint import CheckpointError, convert_checkpoint, load_params, save_hf
from dsv3.config.hugging_face import load_config, to_hf
from dsv3.model.params import Fp8Weight, Int4Weight, Params
from pallas_kernels.fp8 import dequantize_128x128
from pallas_kernels.grouped import dequantize_int4
from tests.dsv3.checkpoint import hf, int4

CFG = int4.config()
SMALL, PLAIN = int4.packed(hf.random_tensors(CFG))
EXPERT = "model.layers.2.mlp.experts.1.up_proj.weight"


@pytest.fixture(scope="module")
def directories(tmp_path_factory) -> Path:
    """The packed checkpoint, and the dequantized one."""
    root = tmp_path_factory.mktemp("int4")
    hf.write(root / "hf", SMALL, shards=3)
    (root / "hf" / "config.json").write_text(json.dumps(to_hf(CFG)))
    hf.write(root / "plain", PLAIN)
    return root


def load(directory: Path, cfg=CFG, **options) -> Params:
    return load_params(directory, cfg, **{"dtype": "float32", "progress": False, **options})


@functools.cache
def plain(directory: Path) -> Params:
    return load(directory, dataclasses.replace(CFG, int4_experts=False))


def experts(params: Params) -> list:
    return [params.moe.moe.gate_up, params.moe.moe.down]


def test_kept_words_stand_for_the_dequantized_model(directories: Path) -> None:
    assert load_config(directories / "hf") == CFG
    loaded, wanted = load(directories / "hf"), plain(directories / "plain")
    for weight, real in zip(experts(loaded), experts(wanted), strict=True):
        assert isinstance(weight, Int4Weight) and (weight.data.dtype, weight.scale.dtype) == (jnp.int32, jnp.bfloat16)
        assert weight.data.nbytes + weight.scale.nbytes == real.size * 4.5 / 8
        np.testing.assert_array_equal(dequantize_int4(weight.data, weight.scale, jnp.float32), real)
    np.testing.assert_array_equal(loaded.moe.moe.shared.gate_up, wanted.moe.moe.shared.gate_up)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dequantized_while_loading(directories: Path, dtype: str) -> None:
    loaded = load(directories / "hf", dtype=dtype, int4="dequantize")
    for weight, real in zip(experts(loaded), experts(plain(directories / "plain")), strict=True):
        np.testing.assert_array_equal(weight, real.astype(dtype))


def test_requantized_to_fp8(directories: Path) -> None:
    """Half a step of 3 mantissa bits, or half the smallest subnormal of a block."""
    for weight, real in zip(
        experts(load(directories / "hf", int4="fp8")), experts(plain(directories / "plain")), strict=True
    ):
        assert isinstance(weight, Fp8Weight)
        error = np.abs(dequantize_128x128(weight.data, weight.scale, jnp.float32) - real)
        assert (error <= np.maximum(np.abs(real) / 16, weight.scale.max() * 2.0**-10)).all()
        assert error.max() > 0


@pytest.mark.parametrize("mode", ["keep", "fp8"])
def test_replicas_of_packed_experts(directories: Path, mode: str) -> None:
    """Each device holds its replicas alone, in every mode."""
    phy2log = np.array([[3, 0, 1, 2, 1, 1, 0, 3], [0, 1, 2, 3, 3, 2, 1, 0]])
    mesh = Mesh(np.array(jax.devices()[:4]), ("d",))
    where = NamedSharding(mesh, PartitionSpec())
    specs = jax.tree.map(lambda _: where, plain(directories / "plain"))
    spread = NamedSharding(mesh, PartitionSpec(None, "d"))
    moe = dataclasses.replace(specs.moe.moe, gate_up=spread, down=spread)
    specs = dataclasses.replace(specs, moe=dataclasses.replace(specs.moe, moe=moe))
    found = load(directories / "hf", int4=mode, shardings=specs, phy2log=phy2log)
    whole = load(directories / "hf", int4=mode)
    layer = np.arange(2)[:, None]
    for got, wanted in zip(jax.tree.leaves(experts(found)), jax.tree.leaves(experts(whole)), strict=True):
        assert {shard.data.shape[1] for shard in got.addressable_shards} == {2}
        np.testing.assert_array_equal(np.asarray(got).view(np.uint8), np.asarray(wanted)[layer, phy2log].view(np.uint8))


def bad(name: str, value: np.ndarray | None) -> hf.Tensors:
    tensors = {key: tensor for key, tensor in SMALL.items() if key != name}
    return tensors if value is None else tensors | {name: value}


SCALE = SMALL[f"{EXPERT}_scale"]
DAMAGE = {
    "no scale": (bad(f"{EXPERT}_scale", None), r"missing tensors.*up_proj\.weight_scale_inv"),
    "no words": (bad(f"{EXPERT}_packed", None), r"missing tensors.*experts\.1\.up_proj\.weight"),
    "words of bytes": (
        bad(f"{EXPERT}_packed", SMALL[f"{EXPERT}_packed"].view(np.uint8)),
        r"weight_packed .* is \[256, 128\], expected \[256, 32\]",
    ),
    "unsigned words": (bad(f"{EXPERT}_packed", SMALL[f"{EXPERT}_packed"].view(np.uint32)), "is U32, expected I32"),
    "scales of float32": (bad(f"{EXPERT}_scale", SCALE.astype(np.float32)), "is F32, expected BF16"),
    "scales of 128 columns": (bad(f"{EXPERT}_scale", SCALE[:, :2]), r"is \[256, 2\], expected \[256, 8\]"),
    "a stated shape of one number": (bad(f"{EXPERT}_shape", np.array([256], np.int32)), r"is \[1\], expected \[2\]"),
    "another stated shape": (
        bad(f"{EXPERT}_shape", np.array([256, 512], np.int64)),
        r"weight_shape: is \[256, 512\], but .*up_proj\.weight_packed holds \[256, 256\]",
    ),
    "a scale that is no number": (bad(f"{EXPERT}_scale", np.full_like(SCALE, np.nan)), "a block scale is nan"),
    "a negative scale": (bad(f"{EXPERT}_scale", -SCALE), "a block scale is -"),
    "a packed head": (
        bad("lm_head.weight", None) | {"lm_head.weight_packed": np.zeros((40, 32), np.int32)},
        r"lm_head\.weight .* is I32, expected",
    ),
    "an expert that is not packed": (SMALL | {EXPERT: PLAIN[EXPERT]}, "tensors that mean the same"),
    "no expert that is packed": (PLAIN, r"gate_proj\.weight .* is F32, expected I32 of an INT4 expert"),
}  # fmt: skip


@pytest.mark.parametrize(("tensors", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_named(tmp_path: Path, tensors: hf.Tensors, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(hf.write(tmp_path, tensors))


def test_words_without_a_configuration_for_them(directories: Path) -> None:
    with pytest.raises(CheckpointError, match="is I32, expected"):
        load(directories / "hf", dataclasses.replace(CFG, int4_experts=False))


def test_a_scale_may_be_zero(tmp_path: Path) -> None:
    """Values of 0 need none."""
    loaded = load(hf.write(tmp_path, bad(f"{EXPERT}_scale", np.zeros_like(SCALE))), int4="dequantize")
    assert not loaded.moe.moe.gate_up[0, 1, 256:].any()


def test_int4_is_not_written(directories: Path, tmp_path: Path) -> None:
    """A dequantized model is written like any other."""
    with pytest.raises(CheckpointError, match=r"moe\.moe\.gate_up is INT4, which cannot be written"):
        convert_checkpoint(directories / "hf", tmp_path / "no", CFG)
    with pytest.raises(CheckpointError, match=r"moe\.moe\.gate_up is INT4, which cannot be written"):
        save_hf(tmp_path / "no", CFG, load(directories / "hf"))
    assert not (tmp_path / "no").exists()
    save_hf(tmp_path / "plain", CFG, load(directories / "hf", int4="dequantize"))
    assert load_config(tmp_path / "plain") == dataclasses.replace(CFG, int4_experts=False)


def test_an_unknown_mode(directories: Path) -> None:
    with pytest.raises(ValueError, match="int4 'maybe' is not one of keep, fp8, dequantize"):
        load(directories / "hf", int4="maybe")
