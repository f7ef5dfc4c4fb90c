"""DeepSeek-V4's published forms, from files to devices: FP8, FP4 and plain; replicas; what is skipped; damage."""

import dataclasses
import functools
import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsv3.checkpoint import CheckpointError, convert_checkpoint, layout, load_params, save_hf
from dsv3.config.hugging_face import from_hf, load_config
from dsv3.config.model import ModelConfig
from dsv3.model.params import Fp4Weight, declare
from dsv3.model.tensor_parallel import arrange
from pallas_kernels.fp4 import to_e4m3
from sharding.mesh import partition, rank_mesh
from tests.dsv3.checkpoint import deepseek_v4 as v4
from tests.dsv3.checkpoint import hf
from tests.dsv3.checkpoint.deepseek_v4_tensors import stored_tensors
from tests.dsv3.checkpoint.trees import assert_same_bits, by_path
from tests.dsv3.deepseek_v4 import FLASH, PRO
from tests.dsv3.model.deepseek_v4 import MEMBERS, model
from tests.dsv3.model.golden import DIRECTORY

FORMS = {"FP4": v4.PREVIEW, "FP8": v4.base(v4.PREVIEW), "plain": v4.plain(v4.PREVIEW), "DSpark": v4.DSPARK}
Arrays = dict[str, np.ndarray]


@functools.cache
def tensors(form: str) -> hf.Tensors:
    return v4.random_tensors(from_hf(FORMS[form]))


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("deepseek_v4")
    for form in FORMS:
        hf.write(root / form, tensors(form))
    return root


def load(directory: Path, cfg: ModelConfig, **options: Any) -> Arrays:
    return by_path(cfg, load_params(directory, cfg, **{"dtype": "float32", "progress": False, **options}))


def wanted(form: str, cfg: ModelConfig, dtype: Any) -> Arrays:
    specs = layout.leaves(cfg)
    stored = {np.dtype(dtype)} if dtype == hf.BF16 else set()
    expected = v4.expected(cfg, tensors(form))
    return {path: expected[path].astype(spec.dtype_in(dtype, stored)) for path, spec in specs.items()}


def multiplied(arrays: Arrays) -> Arrays:
    """FP8 leaves multiplied out."""
    result = {path: a for path, a in arrays.items() if not path.endswith((".data", "gate_up.scale", "down.scale"))}
    for path in (path.removesuffix(".data") for path in arrays if path.endswith(".data")):
        data, scale = arrays[f"{path}.data"].astype(np.float32), arrays[f"{path}.scale"]
        assert arrays[f"{path}.data"].dtype == hf.E4M3 and scale.dtype == np.float32
        result.pop(f"{path}.scale", None)
        result[path] = data * of_blocks(scale, data.shape)
    return result


def of_blocks(scale: Any, shape: tuple[int, ...]) -> np.ndarray:
    """The scale of each value."""
    return np.asarray(scale).repeat(128, -2).repeat(128, -1)[..., : shape[-2], : shape[-1]]


@pytest.mark.parametrize("published", [FLASH, PRO, v4.DSPARK], ids=["Flash", "Pro", "DSpark"])
def test_leaves_have_all_published_tensors(published: dict[str, Any]) -> None:
    """All but scales; each once, with its shape in values."""
    cfg = from_hf(published)
    found = {p.name: p.shape for slices in layout.slices(cfg).values() for p in slices}
    assert found == {
        t.name: (t.shape[0], 2 * t.shape[1]) if t.dtype == np.int8 else t.shape
        for t in stored_tensors(cfg)
        if not t.name.endswith(".scale")
    }


@pytest.mark.parametrize(
    ("form", "dtype", "modules"),
    [
        *(("FP4", np.float32, 0), ("FP4", hf.BF16, 1)),
        *(("FP8", np.float32, 1), ("FP8", hf.BF16, 0)),
        *(("plain", np.float32, 0), ("plain", hf.BF16, 1)),
    ],
)
def test_dequantized(directories: Path, form: str, dtype: Any, modules: int) -> None:
    cfg = dataclasses.replace(from_hf(FORMS[form]), num_nextn_predict_layers=modules)
    assert_same_bits(load(directories / form, cfg, dtype=dtype, fp8="dequantize"), wanted(form, cfg, dtype))


@pytest.mark.parametrize("form", ["FP4", "FP8"])
def test_kept(directories: Path, form: str) -> None:
    """Products that files have in FP8 keep its bytes, FP4 experts become FP8, and no value changes."""
    cfg = from_hf(FORMS[form])
    kept = load(directories / form, cfg)
    for path, spec in layout.leaves(cfg).items():
        assert (f"{path}.data" in kept) == (spec.quantizable and path != "mtp.proj"), path
    assert_same_bits(multiplied(kept), wanted(form, cfg, np.float32))
    data = kept["moe.attention.qkv_a.data"][1, 128:]
    assert data.tobytes() == tensors(form)["layers.1.attn.wkv.weight"].tobytes()
    described = load_params(directories / form, cfg, dtype="float32", shapes=True)
    assert {path: (a.shape, a.dtype) for path, a in _shapes(cfg, described).items()} == {
        path: (a.shape, a.dtype) for path, a in kept.items()
    }


def _shapes(cfg: ModelConfig, params: Any) -> dict[str, Any]:
    flat, _ = jax.tree_util.tree_flatten_with_path(params)
    return {layout.leaf_path(keys): a for keys, a in flat}


def test_experts_stay_fp4(directories: Path, tmp_path: Path) -> None:
    cfg = from_hf(FORMS["FP4"])
    loaded = load_params(directories / "FP4", cfg, dtype="float32", fp4="keep", progress=False)
    described = load_params(directories / "FP4", cfg, dtype="float32", fp4="keep", shapes=True)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), described) == jax.tree.map(lambda a: (a.shape, a.dtype), loaded)
    expected = v4.expected(cfg, tensors("FP4"))
    for path, weight in (
        ("moe.moe.gate_up", loaded.moe.moe.gate_up),
        ("moe.moe.down", loaded.moe.moe.down),
        ("mtp.layers.moe.down", loaded.mtp.layers.moe.down),
    ):
        assert isinstance(weight, Fp4Weight)
        assert weight.data.nbytes + weight.powers.nbytes == expected[path].size * 4.25 / 8
        values = np.asarray(jax.jit(to_e4m3)(weight.data, weight.powers)).astype(np.float32)
        np.testing.assert_array_equal(values * of_blocks(weight.scale, values.shape), expected[path])


def test_narrow_experts_cannot_stay_fp4(tmp_path: Path) -> None:
    narrow = from_hf(v4.PREVIEW | {"hidden_size": 192})
    with pytest.raises(ValueError, match=r"multiples of 128 values, but moe\.moe\.gate_up has 192; choose 'fp8'"):
        load_params(
            hf.write(tmp_path, v4.random_tensors(narrow), shards=1), narrow, dtype="float32", fp4="keep", progress=False
        )


def test_an_unknown_mode(directories: Path) -> None:
    with pytest.raises(ValueError, match="fp4 'maybe' is not one of fp8, keep"):
        load(directories / "FP4", from_hf(FORMS["FP4"]), fp4="maybe")


def test_a_plain_checkpoint_stays_plain_or_becomes_fp8(directories: Path) -> None:
    cfg = from_hf(FORMS["plain"])
    assert_same_bits(load(directories / "plain", cfg), wanted("plain", cfg, np.float32))
    rounded = load(directories / "plain", cfg, fp8="quantize")
    assert rounded["moe.moe.down.data"].dtype == rounded["moe.attention.indexer.q_b.data"].dtype == hf.E4M3
    assert rounded["moe.attention.o_a"].dtype == rounded["moe.attention.sparse.value_score"].dtype == np.float32


@pytest.mark.parametrize("fp8", ["keep", "dequantize"])
def test_dspark(directories: Path, fp8: str) -> None:
    cfg = from_hf(FORMS["DSpark"])
    loaded = load(directories / "DSpark", cfg, fp8=fp8)
    assert ("mtp.main_proj.data" in loaded) == (fp8 == "keep")
    assert_same_bits(multiplied(loaded), wanted("DSpark", cfg, np.float32))


def test_a_file_without_dspark(directories: Path) -> None:
    cfg = dataclasses.replace(from_hf(FORMS["DSpark"]), num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match=r"mtp\.0\.main_proj\.weight"):
        load(directories / "FP4", cfg, fp8="dequantize")


@pytest.mark.parametrize("form", ["FP4", "DSpark"])
def test_draft_layers_that_are_not_wanted_are_skipped(
    directories: Path, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = dataclasses.replace(from_hf(FORMS[form]), num_nextn_predict_layers=0, dspark=None)
    with caplog.at_level(logging.INFO):
        loaded = load(directories / form, cfg, fp8="dequantize")
    assert "layers that make drafts, from 5 on, are not loaded" in caplog.text
    assert_same_bits(loaded, wanted(form, cfg, np.float32))


@pytest.mark.parametrize("member", MEMBERS)
def test_golden_checkpoints(member: str) -> None:
    """They are those whose logits and greedy texts equal the oracle's."""
    params, cfg = model(member)
    loaded = load(DIRECTORY / member, cfg, fp8="dequantize")
    assert_same_bits(loaded, by_path(cfg, params))


def test_products_narrower_than_a_block_cannot_stay_fp8() -> None:
    with pytest.raises(CheckpointError, match=r"(?s)fp8='dequantize'.*qkv_a: layers\.0\.attn\.wkv.*row 16"):
        load(DIRECTORY / "deepseek_v4", model("deepseek_v4")[1])


HOW = {
    "FP4": {"fp4": "keep"},
    "FP4 as FP8": {"fp4": "fp8"},
    "FP4 dequantized": {"fp8": "dequantize"},
    "FP8": {},
    "FP8 dequantized": {"fp8": "dequantize"},
}


@pytest.mark.parametrize("how", HOW)
def test_replicas_over_devices(directories: Path, how: str) -> None:
    """Each device holds its replicas alone, in an order of their own, and the modules' experts too."""
    form, options = how[:3], HOW[how]
    cfg, rng = from_hf(FORMS[form]), np.random.default_rng(0)
    phy2log = np.stack([rng.permutation([0, 1, 2, 3, 3, 1, 0, 2]) for _ in range(6)])
    mesh = Mesh(np.array(jax.devices()[:4][::-1]), ("d",))
    specs = jax.tree.map(
        lambda spec: NamedSharding(mesh, PartitionSpec(*("d" if a == "experts" else None for a in spec.axes))),
        declare(cfg),
    )
    found = load_params(
        directories / form, cfg, dtype="float32", progress=False, **options, shardings=specs, phy2log=phy2log
    )
    for part in jax.tree.leaves((found.moe.moe.gate_up, found.mtp.layers.moe.down)):
        assert {shard.data.shape[1] for shard in part.addressable_shards} == {2}
    whole = load(directories / form, cfg, **options)
    experts = {path for path, spec in layout.leaves(cfg).items() if "experts" in spec.axes}
    for path, got in by_path(cfg, found).items():
        want = whole[path]
        if path.removesuffix(".data").removesuffix(".powers").removesuffix(".scale") in experts:
            chosen = phy2log[:5] if path.startswith("moe.") else phy2log[5:]
            want = want[np.arange(len(chosen))[:, None], chosen]
        assert got.tobytes() == want.tobytes() and got.shape == want.shape, path


def test_two_devices_share_heads(directories: Path) -> None:
    cfg = dataclasses.replace(from_hf(FORMS["FP4"]), num_nextn_predict_layers=0)
    mesh = rank_mesh(jax.devices()[:2], 1, 2)
    where = jax.tree.map(lambda spec: NamedSharding(mesh, partition(spec.axes)), declare(cfg))
    how = {"dtype": "float32", "fp8": "dequantize", "progress": False}
    found = load_params(directories / "FP4", cfg, **how, shardings=where, tensor_parallel_size=2)
    whole = arrange(load_params(directories / "FP4", cfg, **how), cfg, 2)
    assert_same_bits(by_path(cfg, found), by_path(cfg, whole))
    o_a = found.moe.attention.o_a
    assert {shard.data.shape for shard in o_a.addressable_shards} == {(5, 1, 128, 256)}


@pytest.mark.parametrize(
    ("form", "fp8"), [("FP4", "keep"), ("FP4", "dequantize"), ("FP8", "keep"), ("plain", "keep"), ("DSpark", "keep")]
)
def test_a_converted_checkpoint_is_loaded_with_the_same_bits(directories: Path, tmp_path: Path, form, fp8) -> None:
    """FP4 experts become FP8 in blocks or the dtype, as when the original is loaded; MTP modules and stages stay."""
    cfg, how = from_hf(FORMS[form]), {"fp8": fp8, "dtype": "float32" if fp8 == "dequantize" else hf.BF16}
    convert_checkpoint(directories / form, tmp_path / "out", cfg, **how)
    written = load_config(tmp_path / "out")
    kept = cfg.fp8 if fp8 == "keep" else None
    assert written == dataclasses.replace(cfg, fp4_experts=False, fp8=kept)
    assert_same_bits(load(tmp_path / "out", written, dtype=None), load(directories / form, cfg, **how))


def test_parameters_are_written_as_they_are_but_not_those_of_four_bits(directories: Path, tmp_path: Path) -> None:
    cfg = from_hf(FORMS["FP4"])
    params = load_params(directories / "FP4", cfg, dtype=hf.BF16, progress=False)
    save_hf(tmp_path / "out", cfg, params, scale_dtype=hf.E8M0)
    written = load_config(tmp_path / "out")
    assert_same_bits(load(tmp_path / "out", written, dtype=None), by_path(cfg, params))
    packed = load_params(directories / "FP4", cfg, dtype=hf.BF16, fp4="keep", progress=False)
    with pytest.raises(CheckpointError, match="is FP4, which cannot be written"):
        save_hf(tmp_path / "no", cfg, packed)


def test_devices_that_do_not_divide_the_groups_of_heads(directories: Path) -> None:
    cfg = from_hf(FORMS["FP4"])
    with pytest.raises(ValueError, match="tensor_parallel_size 4 does not divide o_groups 2"):
        load(directories / "FP4", cfg, fp8="dequantize", tensor_parallel_size=4)


def changed(name: str, value: np.ndarray | None) -> hf.Tensors:
    others = {key: tensor for key, tensor in tensors("FP4").items() if key != name}
    return others if value is None else others | {name: value}


def stored(name: str) -> np.ndarray:
    return tensors("FP4")[name]


WQ_B, W1, TABLE = "layers.2.attn.wq_b", "layers.3.ffn.experts.1.w1", "layers.1.ffn.gate.tid2eid"


def far_below(places: int = 15) -> np.ndarray:
    """Scales of w3, of which one is so many places below the largest of its block."""
    scale = stored("layers.3.ffn.experts.1.w3.scale").astype(np.float32)
    scale[:] = 1
    scale[100, 5] = 2.0**-places
    return scale.astype(hf.E8M0)


def with_value(tensor: np.ndarray, value: float) -> np.ndarray:
    tensor = tensor.copy()
    tensor[3, 1] = value
    return tensor


DAMAGE = {
    "no weight": (changed(f"{WQ_B}.weight", None), r"missing tensors \(1\): layers\.2\.attn\.wq_b\.weight"),
    "no scale": (changed(f"{WQ_B}.scale", None), r"missing tensors \(1\): layers\.2\.attn\.wq_b\.scale"),
    "no scale of an expert": (changed(f"{W1}.scale", None), r"missing tensors \(1\): .*experts\.1\.w1\.scale"),
    "no sink": (changed("layers.0.attn.attn_sink", None), r"missing tensors \(1\): layers\.0\.attn\.attn_sink"),
    "no part of the MTP module": (changed("mtp.0.h_proj.weight", None), r"missing tensors \(1\): mtp\.0\.h_proj"),
    "no MTP module": (
        {name: tensor for name, tensor in tensors("FP4").items() if not name.startswith("mtp.")},
        r"lacks altogether; set num_nextn_predict_layers .*layer 5",
    ),
    "a weight of another width": (
        changed(f"{WQ_B}.weight", stored(f"{WQ_B}.weight")[:, :64]),
        r"wq_b\.weight in .* is \[512, 64\], expected \[512, 128\]",
    ),
    "an expert of another width": (
        changed(f"{W1}.weight", stored(f"{W1}.weight")[:, :64]),
        r"w1\.weight in .* is \[256, 64\], expected \[256, 128\]",
    ),
    "scales that were copied by value": (
        changed(f"{WQ_B}.scale", stored(f"{WQ_B}.scale").view(np.uint8)),
        r"wq_b\.scale in .* is U8, expected F32/F8_E8M0",
    ),
    "an expert's scales in float32": (
        changed(f"{W1}.scale", stored(f"{W1}.scale").astype(np.float32)),
        r"w1\.scale in .* is F32, expected F8_E8M0 of an FP4 expert",
    ),
    "an expert in FP8": (
        changed(f"{W1}.weight", np.zeros((256, 256), hf.E4M3)),
        r"w1\.weight in .* is F8_E4M3, expected I8 of an FP4 expert; set expert_dtype of config\.json to fp8",
    ),
    "a scale that is no number": (
        changed(f"{W1}.scale", with_value(stored(f"{W1}.scale"), np.nan)),
        r"w1\.scale: a block scale is nan, not a positive finite number",
    ),
    "a table of floats": (changed(TABLE, stored(TABLE).astype(np.float32)), r"tid2eid in .* is F32, expected I32/I64"),
    "a table of fewer tokens": (changed(TABLE, stored(TABLE)[1:]), r"tid2eid in .* is \[39, 2\], expected \[40, 2\]"),
    "an expert that does not exist": (
        changed(TABLE, with_value(stored(TABLE), 4)),
        r"tid2eid: has 4 at \[3, 1\], but must be 0 to 3; check n_routed_experts",
    ),
    "an expert beyond 32 bits": (changed(TABLE, with_value(stored(TABLE), 2**32)), r"has 4294967296 at \[3, 1\]"),
    "a tensor that is not known": (changed("layers.0.attn.wk.weight", np.zeros(3, np.float32)), "unexpected tensors"),
    "groups that are too far apart": (
        changed("layers.3.ffn.experts.1.w3.scale", far_below()),
        r"w3\.weight: row 100, columns 160 to 191: the scale is 2\*\*-15 of the largest .*fp8='dequantize'",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("damaged", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_named(tmp_path: Path, damaged: hf.Tensors, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(hf.write(tmp_path, damaged, shards=1), from_hf(FORMS["FP4"]))


def test_groups_that_are_too_far_apart_to_stay_fp4_become_fp8(tmp_path: Path) -> None:
    apart = changed("layers.3.ffn.experts.1.w3.scale", far_below(12))
    directory, cfg = hf.write(tmp_path, apart, shards=1), from_hf(FORMS["FP4"])
    with pytest.raises(
        CheckpointError, match=r"w3\.weight: row 100, .*'keep' has room for 2\*\*-11; load with fp4='fp8'"
    ):
        load(directory, cfg, fp4="keep")
    loaded = multiplied(load(directory, cfg))
    np.testing.assert_array_equal(loaded["moe.moe.gate_up"], v4.expected(cfg, apart)["moe.moe.gate_up"])


def test_groups_that_are_too_far_apart_are_dequantized(tmp_path: Path) -> None:
    apart = changed("layers.3.ffn.experts.1.w3.scale", far_below())
    cfg = from_hf(FORMS["FP4"])
    loaded = load(hf.write(tmp_path, apart, shards=1), cfg, fp8="dequantize")
    np.testing.assert_array_equal(loaded["moe.moe.gate_up"], v4.expected(cfg, apart)["moe.moe.gate_up"])


def test_a_table_may_have_32_bits(tmp_path: Path) -> None:
    cfg = from_hf(FORMS["FP4"])
    loaded = load(hf.write(tmp_path, changed(TABLE, stored(TABLE).astype(np.int32)), shards=1), cfg, fp8="dequantize")
    np.testing.assert_array_equal(loaded["moe.moe.by_token"][1], stored(TABLE))
